"""Tiers as runs, and events, recounted from where every token is."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.engine.fate import runs
from tests.engine.lanes import by_step, lane, placement, run

KEEPS = [
    "streaming_llm(sinks=2, hold=tokens(11))",
    "h2o(hold=tokens(12), recent=0.2)",
    "tova(hold=tokens(9))",
    "tova(hold=tokens(1))",
    "snapkv(hold=tokens(14), window=5)",
    "kivi(group=2, residual=4)",
    "h2o(hold=tokens(14)) >> kivi(group=2, residual=4)",
]


@pytest.mark.parametrize("policy", KEEPS)
@pytest.mark.parametrize("options", [{}, {"window": 13}, {"whole": True}], ids=["full", "sliding", "ties"])
def test_events_are_what_became_of_the_tokens(policy, options):
    source = lane(prompt=30, steps=14, **options)
    tables = run(source, policy)
    tiers, first = placement(source, tables["tiers"]), source.layer.first_visible
    for h in range(source.layer.kv_heads):
        born = source.request.prompt
        now = np.zeros(source.request.total, int)  # before the cut that follows prefill, all of the prompt is full
        now[first(born - 1) : born] = 2
        events = [
            row[h] for row in (by_step(tables["events"], c) for c in ("evicted", "demoted", "promoted", "aged_in", "churn"))
        ]
        start = {c: tables["tiers"][c][tables["tiers"]["kv_head"].astype(int) == h] for c in ("step", "runs")}
        after_prefill = np.zeros(source.request.total, int)
        for r in start["runs"][list(start["step"]).index(-1)]:
            after_prefill[r["start"] : r["stop"]] = r["tier"]
        states = [(born, after_prefill, 0), *((t + 1, tiers[h, i], 1) for i, t in enumerate(source.t.tolist()))]
        for i, (end, then, new) in enumerate(states):
            visible = np.arange(first(end - 1), end)
            now[end - new : end] = 2
            old = visible[visible < end - new]
            a, b = {*old[now[old] == 2].tolist()}, {*old[then[old] == 2].tolist()}
            want = [
                sum(now[p] > 0 and then[p] == 0 for p in visible),
                sum(now[p] == 2 and then[p] == 1 for p in visible),
                sum(now[p] == 1 and then[p] == 2 for p in visible),
                new,
                1 - len(a & b) / len(a | b) if a | b else 0,
            ]
            assert [e[i] for e in events] == pytest.approx(want, abs=1e-12)
            now = then.copy()


def test_runs_are_ranges_of_one_tier():
    assert runs(np.array([], int), np.array([], int)) == []
    got = runs(np.array([0, 1, 2, 5, 6, 9]), np.array([2, 2, 0, 0, 1, 1]))
    assert [(r["start"], r["stop"], r["tier"]) for r in got] == [(0, 2, 2), (2, 3, 0), (5, 6, 0), (6, 7, 1), (9, 10, 1)]
