"""Where attention to evicted tokens goes, recounted token by token from the placement."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.engine.lags import NEEDED
from tests.engine.lanes import lane, placement, run

KEEPS = [
    "h2o(hold=tokens(12), recent=0.3)",
    "tova(hold=tokens(9))",
    "qevict(hold=share(0.4), sinks=2, window=4, period=3, recent=tokens(6))",
    "streaming_llm(sinks=2, hold=tokens(11)) >> quest(read=pages(2), page=4)",
    "snapkv(hold=tokens(14), window=5) >> kivi(group=2, residual=4)",
]
LANES = {
    "full": {},
    "sliding": {"window": 17},
    "ties": {"whole": True},
    "sinks": {"sinks": True, "softcap": 2.0},
    "strided": {"stride": 3},
}


def dense(source, h, i, g):
    """f64[T]: dense probability at the i-th captured step."""
    lay, t = source.layer, int(source.t[i])
    first = lay.first_visible(t)
    x = lay.scale * (source.k[h, first : t + 1].astype(float) @ source.q[i, h * lay.group + g].astype(float))
    x = lay.softcap * np.tanh(x / lay.softcap) if lay.softcap else x
    z = np.exp(x).sum() + (np.exp(lay.sinks[h * lay.group + g]) if lay.sinks else 0.0)
    out = np.zeros(source.request.total)
    out[first : t + 1] = np.exp(x) / z
    return out


def last_held(source, tables):
    """{(head, pos): the step at whose cut it went}, of evicted tokens, from the tiers table."""
    found = {}
    for h, step, runs in zip(*(tables["tiers"][c] for c in ("kv_head", "step", "runs")), strict=True):
        for r in runs:
            for p in range(r["start"], r["stop"]):
                if r["tier"] & 3 == 0:
                    found[int(h), p] = int(step)
    return found


@pytest.mark.parametrize("policy", KEEPS)
@pytest.mark.parametrize("options", LANES.values(), ids=LANES)
def test_lags_are_those_of_the_placement(policy, options):
    if options.get("stride") and "qevict" in policy:
        pytest.skip("its state needs every step")
    source = lane(prompt=30, steps=14, **options)
    tables = run(source, policy, explain=True)
    gone, found, group = last_held(source, tables), tables["lags"], source.layer.group
    assert len(gone) > 0
    for row in range(len(found["step"])):
        h, q, step = (int(found[c][row]) for c in ("kv_head", "q_head", "step"))
        i = source.steps.tolist().index(step)
        p, first = dense(source, h, i, q - h * group), source.layer.first_visible(int(source.t[i]))
        want, seen = np.zeros((step + 1).bit_length()), np.arange(first, source.t[i] + 1)
        lag = {x: step - gone[h, x] for x in seen.tolist() if gone.get((h, x), step) < step}
        for x, n in lag.items():
            want[int(np.log2(n))] += p[x]
        assert found["mass"][row] == pytest.approx(want, abs=2e-6)
        assert found["needed"][row] == min(NEEDED, len(seen))
        top = sorted(seen.tolist(), key=lambda x: (-logit(source, h, i, q - h * group, x), x))[:NEEDED]
        if not options.get("whole"):
            assert found["again"][row].tolist() == [x for x in top if x in lag]
        assert found["again_lag"][row].tolist() == [lag[x] for x in found["again"][row].tolist()]
        assert found["evicted_tokens"][row] == sum(1 for (head, _), s in gone.items() if head == h and s < step)


def logit(source, h, i, g, pos):
    return float(source.k[h, pos].astype(float) @ source.q[i, h * source.layer.group + g].astype(float))


@pytest.mark.parametrize("policy", KEEPS)
def test_lags_add_up_to_what_was_evicted(policy):
    source = lane(prompt=30, steps=14, seed=2)
    tables = run(source, policy, explain=True)
    rows = {
        (int(q), int(s)): m for q, s, m in zip(*(tables["heads"][c] for c in ("q_head", "step", "mass_evicted")), strict=True)
    }
    for q, step, mass in zip(*(tables["lags"][c] for c in ("q_head", "step", "mass")), strict=True):
        assert mass.sum() == pytest.approx(rows[int(q), int(step)], abs=2e-6)
    held = placement(source, tables["tiers"])
    assert max(tables["lags"]["evicted_tokens"]) <= (held[:, -1] & 3 == 0).sum(1).max()


@pytest.mark.parametrize("policy", KEEPS)
def test_neither_steps_nor_blocks_change_a_row(policy, monkeypatch):
    source = lane(prompt=30, steps=20, group=9, key_dim=8)
    whole = run(source, policy, explain=True)
    few = run(source, policy, explain=True, steps=[4, 11])
    monkeypatch.setattr("kvsim.engine.attend.steps_per_block", lambda group: 3)
    cut = run(source, policy, explain=True)
    for table in ("lags", "by_tier"):
        at = np.isin(whole[table]["step"].astype(int), [4, 11])
        for name, x in whole[table].items():
            assert all(equal(a, b) for a, b in zip(x[at], few[table][name], strict=True)), (table, name)
            assert all(equal(a, b, 1e-5) for a, b in zip(sort(whole[table], x), sort(cut[table], cut[table][name]), strict=True))


def sort(table, x):
    return x[np.lexsort((table["q_head"].astype(int), table["step"].astype(int)))]


def equal(a, b, near=0.0):
    return np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=0, atol=near, equal_nan=True)
