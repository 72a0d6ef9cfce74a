"""What policies need and the trace does not have, refused by name: the policy, the need, the capture option that records it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.errors import WrongUse
from kvsim.geometry import (
    ALL_LAYERS,
    ATTENTION,
    BEFORE,
    FUTURE,
    INDEX,
    K_PRE,
    KEY_NORM,
    KEYS,
    PREFILL_MASS,
    Q_STATS,
    QUERIES,
    TRUTH,
    VALUES,
    WO_NORM,
    Layer,
    Need,
    Request,
    rope_problem,
)  # fmt: skip
from kvsim.policies import allocate
from kvsim.policies.calibrated import Calibrated
from kvsim.policies.parameters import written
from kvsim.policies.protocol import Chain, Part
from kvsim.policies.rules import Rule, gap
from kvsim.policies.store.offload import offload
from kvsim.replay.asked import Asked, jobs_of, spans
from kvsim.replay.lanes import layer_before
from kvsim.trace.open import Supply, Trace


def check_needs(trace: Trace, asked: Asked) -> None:
    """Every policy in every (request, layer). Raises WrongUse for the first thing that cannot be supplied."""
    for r in asked.requests:
        for layer in asked.layers:
            supply = asked.supplies[r.id, layer.id]
            if not len(supply.steps):
                where = f"trace {trace.id}, request {r.id}, layer {layer.id}"
                raise WrongUse(
                    f"{where}: no decode step is captured, so there is nothing to replay; capture with {ATTENTION.option}"
                )
            for entry in asked.entries:
                for job in jobs_of(entry.policy, layer):
                    _foreign(trace, r, layer, job.chain)
                    chain = _in_layer(job.chain, layer)
                    for problem in (*lacking(chain, asked, r, layer, supply), *_before(chain, trace, r, layer, supply)):
                        raise WrongUse(f"{problem} (trace {trace.id}, request {r.id}, layer {layer.id})")
                    allocate.hold_limit(chain.part("keep"), r.prompt - layer.first_visible(r.prompt - 1), r, layer)
                    _check_rule(chain, r, layer, supply)


def _check_rule(chain: Chain, r: Request, layer: Layer, supply: Supply) -> None:
    """Floor and cap of a stopping rule at the first and at the last step captured, between which all budgets lie. Raises WrongUse."""
    read = chain.part("read")
    if isinstance(read.read, Rule) and getattr(read.read, "file", None) is None:
        for t in (r.prompt + int(supply.steps[0]), r.prompt + int(supply.steps[-1])):
            allocate.rule_pages(read.read, read.page, t + 1 - layer.first_visible(t), r, layer)


def _in_layer(chain: Chain, layer: Layer) -> Chain:
    try:
        return allocate.for_layer(chain, layer)
    except WrongUse as e:  # an index that has no form in the dtype that is billed, or for these keys
        raise WrongUse(f"layer {layer.id}, kv dtype {layer.dtype}: {e}") from None


def _foreign(trace: Trace, r: Request, layer: Layer, chain: Chain) -> None:
    """Raises WrongUse for a part that was calibrated on what it is replayed on, the trace or this context of it: it would know what it is
    tried on; and for a rule whose file does not cover a kv head."""
    rule = chain.part("read").read
    if isinstance(rule, gap) and rule.file is not None:
        if r.digest in rule.calibration.about["contexts"]:
            where = f"request {r.id} of trace {trace.id}"
            raise WrongUse(
                f"gap: its calibration was made from the same context that is replayed, {where}; calibrate on other ones"
            )
        for head in range(layer.kv_heads):
            rule.weights(layer.id, head)
    store = chain.part("store")
    if isinstance(store, Calibrated) and (problem := store.foreign_to(trace.id, trace.sha256, r.digest)):
        raise WrongUse(problem)


def lacking(chain: Chain, asked: Asked, r: Request, layer: Layer, supply: Supply) -> Iterator[str]:
    """What a chain cannot be given in one (request, layer), in words."""
    yield from _latent(chain, layer)
    for part in chain.parts:
        if (turns := _turns(part)) and (problem := rope_problem(layer.rope)):
            yield f"{type(part).__name__} {turns}: {problem}"
        for need in sorted(part.needs, key=str):
            if problem := _missing(need, asked, r, layer, supply):
                yield f"{type(part).__name__} needs {need}: {problem}"
    if supply.contiguous:
        return
    gaps = f"the steps captured have gaps ({spans(supply.steps[:4].tolist())}, ...); capture with {ATTENTION.option}"
    for part in chain.parts:
        if (refresh := getattr(part, "refresh", 1)) != 1:
            yield f"{type(part).__name__}(refresh={written(refresh)}) counts every decode step: {gaps}"
        if getattr(part, "codecs", None):
            yield f"{type(part).__name__} codes rows at every decode step: {gaps}"
        if isinstance(part, offload):
            yield f"offload moves pages at every decode step: {gaps}"


def _latent(chain: Chain, layer: Layer) -> Iterator[str]:
    """Parts that take a row apart which all kv heads share."""
    for part in chain.parts:
        if layer.shared_row_bytes is not None and (getattr(part, "codecs", None) or isinstance(part, offload)):
            yield f"{type(part).__name__} codes or moves K and V of one head: this layer keeps latents, one row for all heads"


def _unindexed(supply: Supply) -> str | None:
    """What is not there of a learned indexer's rows."""
    if supply.index_steps is None:
        absent = "tables index_k and index_q of a learned indexer are not in the trace"
        return f"{absent}; kvsim capture records them of models that have one, TraceWriter writes them"
    lost = [*np.setdiff1d(supply.steps, supply.index_steps).tolist()]
    return f"index_q has no rows of decode steps {spans(lost)}; write those of every captured step" if lost else None


def _before(chain: Chain, trace: Trace, r: Request, layer: Layer, supply: Supply) -> Iterator[str]:
    """What keeps the queries of the attention layer before from standing in for this one's."""
    for part in (p for p in chain.parts if BEFORE in p.needs):
        name, other = f"{type(part).__name__} needs {BEFORE}", layer_before(trace, layer)
        if other is None:
            yield f"{name}: no attention layer lies before; leave this one whole, dense_layers={layer.id + 1}"
        elif not other.captured:
            yield f"{name}: layer {other.id} is not captured; capture with {BEFORE.option}"
        elif (other.q_heads, other.kv_heads, other.key_dim) != (layer.q_heads, layer.kv_heads, layer.key_dim):
            yield f"{name}: layer {other.id} has other heads; expected as many, of as many numbers"
        elif not np.array_equal(trace.supplies(r, other).steps, supply.steps):
            yield f"{name}: layer {other.id} has queries of other steps; capture all layers alike"


def _turns(part: Part) -> str:
    """What a part does that needs a RoPE which can be applied again."""
    codecs = getattr(part, "codecs", None)
    if codecs and codecs.keys == "pre":
        return "codes keys before RoPE"
    return "turns queries by RoPE" if Q_STATS in part.needs else ""


def _missing(need: Need, asked: Asked, r: Request, layer: Layer, supply: Supply) -> str | None:
    """Why a need is not met, and the option that would meet it; None when it is."""
    if need.name == "window":
        rows = min(need.rows, r.prompt)
        problem = (
            f"the last {rows} prompt queries, the window captured has {supply.window_rows}" if supply.window_rows < rows else ""
        )
    elif need in (ATTENTION, QUERIES):
        some = spans(supply.steps[:4].tolist())
        problem = "" if supply.contiguous else f"every decode step in turn, and the steps captured have gaps ({some}, ...)"
    elif need == ALL_LAYERS:
        there = {x.id for x in asked.layers}
        problem = (
            f"layers {spans(set(layer.among) - there)} are not captured or not asked for" if set(layer.among) - there else ""
        )
    elif need == INDEX:
        return _unindexed(supply)
    elif need in (TRUTH, FUTURE, KEY_NORM, KEYS, VALUES, BEFORE):
        problem = ""
    else:
        tables = {PREFILL_MASS: supply.prefill_mass, K_PRE: supply.k_pre, WO_NORM: supply.wo_norm, Q_STATS: supply.q_stats}
        what = {PREFILL_MASS: "the prefill table is", K_PRE: "keys before RoPE are", WO_NORM: "the values table is"}
        what[Q_STATS] = "statistics of the prompt queries are"
        if need not in tables:
            return "no trace has it"
        problem = "" if tables[need] else f"{what[need]} not in the trace"
    return f"{problem}; capture with {need.option}" if problem else None
