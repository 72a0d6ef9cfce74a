"""Tiers as runs, and events, recounted from where every token is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvsim.engine.fate import runs
from kvsim.policies.protocol import Keep, Ranking, State
from kvsim.units import tokens
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


@dataclass(frozen=True, kw_only=True)
class remembers(Keep):
    """The newest tokens; remembers a number per token and kv head, two per token of the layer, and three besides."""

    hold: tokens

    def start(self, prefix, seen):
        n = seen.pos.shape[1]
        slots = {"each": np.zeros((len(seen.pos), n)), "layer": np.zeros((1, n)), "more": np.zeros((1, n))}
        return State(slots, {"besides": np.zeros(3), "name": "not a number"}), self.step(None, seen)

    def step(self, state, seen):
        return Ranking(seen.pos.astype(float))


def test_state_is_what_a_fork_would_copy():
    source = lane(prompt=30, steps=5)
    state = by_step(run(source, remembers(hold=tokens(12)))["events"], "state_bytes")
    assert state.tolist() == [[4 * (12 + 2 * 12 + 3)] * 6, [4 * 12] * 6]
    wide = by_step(run(source, remembers(hold=tokens(99)))["events"], "state_bytes")
    assert wide[1].tolist() == [4 * 30, *(4 * (30 + i + 1) for i in range(5))]
    h2o, streaming = (by_step(run(source, p)["events"], "state_bytes") for p in (KEEPS[1], KEEPS[0]))
    assert (h2o == 4 * 12).all()
    assert (streaming == 0).all()
