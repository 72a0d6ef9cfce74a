"""What a layer would have read with another layer's pages, against softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.engine.neighbour import OWN, Plan, reuse
from tests.engine.lanes import by_step, columns, lane, run

SIZE = 4
LANES = {
    "plain": {"prompt": 50, "steps": 9, "group": 3, "evidence": ((3, 9), (20, 26))},
    "sliding, sinks": {"prompt": 50, "steps": 5, "window": 30, "sinks": True},
    "soft-capped, strided": {"prompt": 40, "steps": 9, "softcap": 3.0, "size": 3.0, "stride": 2},
}


def plan_of(tables) -> Plan:
    """The plans of a run as arrays."""
    rows = tables["plans"]
    pages = [np.array(p, np.int64) for p in rows["pages"]]
    kv_head, q_head, step = (np.asarray(rows[c], np.int64) for c in ("kv_head", "q_head", "step"))
    return Plan(kv_head, q_head, step, SIZE, np.concatenate(pages), np.append(0, np.cumsum([len(p) for p in pages])))


def found(source, plans):
    return columns({"reuse": reuse(source, plans)})["reuse"]


def at(table, distance, column):
    mine = table["distance"] == distance
    return by_step({c: x[mine] for c, x in table.items()}, column, "q_head")


def naive(source, q_head, i):
    """The dense probability of every position, from the definition."""
    lay, t = source.layer, int(source.t[i])
    logit = lay.scale * (source.k[q_head // lay.group, : t + 1].astype(np.float64) @ source.q[i, q_head].astype(np.float64))
    logit = lay.softcap * np.tanh(logit / lay.softcap) if lay.softcap else logit
    logit[: lay.first_visible(t)] = -np.inf
    sink = lay.sinks[q_head] if lay.sinks else -np.inf
    return np.exp(logit) / (np.exp(logit).sum() + np.exp(sink))


@pytest.mark.parametrize("heads", ["each", "max"])
@pytest.mark.parametrize("kind", LANES)
def test_mass_on_the_pages_of_another_layer(kind, heads):
    source, below = lane(**LANES[kind]), lane(**LANES[kind], seed=1)
    read = f'quest(read=pages(3), page={SIZE}, heads="{heads}")'
    own, other = run(source, read, plans=True), run(below, read, plans=True)
    table = found(source, {OWN: plan_of(own), 2: plan_of(other)})
    assert np.allclose(at(table, OWN, "mass_recall"), by_step(own["heads"], "mass_recall", "q_head"), atol=2e-6)
    assert np.array_equal(at(table, OWN, "pages"), by_step(own["heads"], "read_pages", "q_head"))
    mask = source.request.evidence_mask()
    if mask.any():
        assert np.allclose(at(table, OWN, "evidence_read"), by_step(own["heads"], "evidence_read", "q_head"), atol=2e-6)
    plans = other["plans"]
    for (q_head, i), mass in np.ndenumerate(at(table, 2, "mass_recall")):
        p = naive(source, q_head, i)
        page = np.arange(len(p)) // SIZE
        mine = (plans["q_head"] == q_head) | ((plans["q_head"] == -1) & (plans["kv_head"] == q_head // source.layer.group))
        now = plans["step"] == source.steps[i]
        [one] = plans["pages"][mine & now]
        every = np.unique(np.concatenate(plans["pages"][now].tolist()))
        assert mass == pytest.approx(p[np.isin(page, one)].sum(), abs=2e-6)
        assert at(table, 2, "layer_mass_recall")[q_head, i] == pytest.approx(p[np.isin(page, every)].sum(), abs=2e-6)
        assert (at(table, 2, "pages")[q_head, i], at(table, 2, "layer_pages")[q_head, i]) == (len(one), len(every))
        if mask.any():
            marked = p * mask[: len(p)]
            assert at(table, 2, "evidence_read")[q_head, i] == pytest.approx(marked[np.isin(page, one)].sum(), abs=2e-6)
            assert at(table, 2, "layer_evidence_read")[q_head, i] == pytest.approx(marked[np.isin(page, every)].sum(), abs=2e-6)


def test_only_steps_and_pages_that_both_layers_have():
    source = lane(**LANES["plain"])
    read = f"quest(read=pages(3), page={SIZE})"
    own, some = (plan_of(run(source, read, plans=True, steps=steps)) for steps in (None, [2, 5]))
    table = found(source, {OWN: own, 1: some})
    assert set(table["step"][table["distance"] == 1].tolist()) == {2, 5}
    larger = Plan(some.kv_head, some.q_head, some.step, 2 * SIZE, some.pages, some.start)
    assert set(found(source, {OWN: own, 1: larger})["distance"].tolist()) == {OWN}


def test_a_row_is_the_same_whatever_steps_are_written():
    source = lane(**LANES["plain"])
    read = f"quest(read=pages(3), page={SIZE})"
    whole, some = (plan_of(run(source, read, plans=True, steps=steps)) for steps in (None, [2, 5]))
    every, few = found(source, {OWN: whole, 1: whole}), found(source, {OWN: some, 1: some})
    kept = np.isin(every["step"], [2, 5])
    for column in few:
        a, b = every[column][kept], few[column]
        key = lambda t, m: np.lexsort((t["step"][m], t["q_head"][m], t["distance"][m]))  # noqa: E731
        assert np.array_equal(a[key(every, kept)], b[key(few, slice(None))]), column
