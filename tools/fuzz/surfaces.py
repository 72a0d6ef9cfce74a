"""What kvsim reads from strangers, and what must be true of it whatever they wrote: the table of all surfaces."""

from __future__ import annotations

from tools.fuzz import costs, policies, runs, traces
from tools.fuzz.surface import Surface, nothing

SURFACES = {
    "damaged-trace": Surface("bytes of a trace's tables that changed", traces.good, traces.damaged),
    "forged-trace": Surface("a trace made to mislead: manifest, paths, links, tables", traces.good, traces.forged),
    "dump": Surface("arrays to be made a trace", traces.dumps, traces.dump),
    "policy": Surface("policy expressions", nothing, policies.expression),
    "policy-file": Surface("policy files per layer and head", nothing, policies.per_layer),
    "profile": Surface("profilers' exports", costs.exports, costs.profile),
    "cost-file": Surface("samples, cost models, geometries, classes", costs.files, costs.file),
    "study": Surface("study files", nothing, runs.study),
    "rows": Surface("JSONL tasks", nothing, runs.rows),
    "run": Surface("run folders", runs.good, runs.run),
    "labels": Surface("names on a page", runs.page, runs.labels),
    "calibration": Surface("calibration files, replayed with", policies.calibrations, policies.calibration),
    "kit": Surface("names for new policies, and odd policies before check-policy", nothing, policies.kit),
    "numbers": Surface("traces of numbers that no model computes, replayed", traces.good, traces.numbers),
}
