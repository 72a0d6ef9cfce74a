"""Rows that never existed: what stands for evicted rows, and that the account of what exists does not move by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvsim import check_policy, parse
from kvsim.errors import WrongUse
from kvsim.policies.estimate.evicted_moments import evicted_moments
from tests.engine.lanes import first_steps, lane, placement, run

KEEP = "h2o(hold=tokens(9))"


def estimated(source, tables, order):
    """Every query head's part of the softmax and its output, from the placement alone, by sums over the evicted rows themselves."""
    lay, where = source.layer, placement(source, tables["tiers"])
    k, v, q = (np.asarray(x, np.float64) for x in (source.k, source.v, source.q))
    weight, out, true = (np.empty((len(source.steps), lay.q_heads, *s)) for s in ((), (lay.value_dim,), (lay.value_dim,)))
    for i, t in enumerate(source.t):
        for j in range(lay.q_heads):
            h = j // lay.group
            before = tables_before(source, where, h, i)
            held, gone = (np.flatnonzero(x) for x in (before, ~before))
            s = np.exp(lay.scale * k[h, : t + 1] @ q[i, j])
            read, true[i, j] = s[held] @ v[h, held] / s[held].sum(), s @ v[h, : t + 1] / s.sum()
            z, o = 0.0, np.zeros(lay.value_dim)
            if len(gone):
                mk, mv = k[h, gone].mean(0), v[h, gone].mean(0)
                z, o = len(gone) * np.exp(lay.scale * mk @ q[i, j]), mv
                if order:
                    o = mv + lay.scale * ((v[h, gone] - mv).T @ (k[h, gone] - mk) / len(gone)) @ q[i, j]
            weight[i, j] = z / (z + s[held].sum())
            out[i, j] = weight[i, j] * o + (1 - weight[i, j]) * read
    return weight, np.linalg.norm(out - true, axis=2) / np.linalg.norm(true, axis=2)


def tables_before(source, where, head, i):
    """bool[t + 1]: what was held at the attention of the i-th step: after the cut before it, and the new row."""
    t = int(source.t[i])
    held = where[head, i - 1, : t + 1] > 0 if i else STARTS[id(source)][head, : t + 1] > 0
    held[t] = True
    return held


STARTS: dict[int, np.ndarray] = {}


def started(source, tables):
    """Placement after the prompt's cut."""
    out = np.zeros((source.layer.kv_heads, source.request.total), np.int8)
    for step, runs, h in zip(tables["tiers"]["step"], tables["tiers"]["runs"], tables["tiers"]["kv_head"], strict=True):
        for r in runs if step == -1 else ():
            out[h, r["start"] : r["stop"]] = r["tier"] & 3
    STARTS[id(source)] = out


@pytest.mark.parametrize("order", [0, 1])
def test_it_says_what_sums_over_the_evicted_rows_say(order):
    source = lane(prompt=30, steps=8)
    tables = run(source, f"{KEEP} >> evicted_moments(order={order})")
    started(source, tables)
    weight, error = estimated(source, tables, order)
    heads = tables["heads"]
    at = heads["step"], heads["q_head"]
    assert heads["mass_estimated"] == pytest.approx(weight[at], abs=1e-6)
    assert heads["rel_l2"] == pytest.approx(error[at], abs=1e-5)
    assert (heads["mass_estimated"] > 0).all()


def test_nothing_else_moves():
    """The four masses, who is held and what is read are those of the chain without it; so is the output but for the estimate."""
    source = lane(prompt=30, steps=8)
    bare, with_it = run(source, KEEP, f"{KEEP} >> evicted_moments()")
    for name in ("mass_recall", "mass_evicted", "mass_unread", "learned_sink_mass", "read_tokens"):
        assert np.array_equal(bare["heads"][name], with_it["heads"][name]), name
    assert np.array_equal(bare["heads"]["rel_l2"], with_it["heads"]["rel_l2_without"])
    assert np.array_equal(placement(source, bare["tiers"]), placement(source, with_it["tiers"]))


def test_where_nothing_is_evicted_nothing_is_estimated():
    source = lane(prompt=12, steps=4)
    heads = run(source, "h2o(hold=tokens(64)) >> evicted_moments()")["heads"]
    assert not heads["mass_estimated"].any()
    assert np.array_equal(heads["rel_l2"], heads["rel_l2_without"])


def test_rows_that_are_alike_are_stood_for_exactly():
    source = lane(prompt=30, steps=6)
    alike = replace(source, k=np.array(source.k), v=np.array(source.v))
    alike.k[:, :], alike.v[:, :] = alike.k[:, :1], alike.v[:, :1]
    alike.k[:, -6:], alike.v[:, -6:] = source.k[:, -6:], source.v[:, -6:]
    heads = run(alike, "streaming_llm(sinks=1, hold=tokens(9)) >> evicted_moments(order=0)")["heads"]
    assert heads["rel_l2"] == pytest.approx(0, abs=2e-6)
    assert (heads["rel_l2_without"] > 0.1).any()


def test_the_estimated_mass_is_never_above_the_true_one():
    """Jensen: n exp(mean) is at most the sum of exp."""
    for seed in range(20):
        heads = run(lane(prompt=40, steps=6, size=3.0, seed=seed), f"{KEEP} >> evicted_moments()")["heads"]
        assert (heads["mass_estimated"] <= heads["mass_evicted"] + 1e-6).all()


def test_a_shorter_trace_gives_the_same_beginning():
    source = lane(prompt=30, steps=9)
    whole, part = run(source, f"{KEEP} >> evicted_moments()"), run(first_steps(source, 5), f"{KEEP} >> evicted_moments()")
    for table in ("ledger", "heads"):
        few = whole[table]["step"] < 5
        for name, x in part[table].items():
            if x.dtype != object:
                assert np.array_equal(whole[table][name][few], x, equal_nan=True), name


def test_the_steps_that_are_written_change_nothing():
    source = lane(prompt=30, steps=9)
    whole, some = run(source, f"{KEEP} >> evicted_moments()"), run(source, f"{KEEP} >> evicted_moments()", steps=[2, 7])
    few = np.isin(whole["heads"]["step"], [2, 7])
    for name in ("rel_l2", "mass_estimated", "rel_l2_without"):
        assert np.array_equal(whole["heads"][name][few], some["heads"][name])


@pytest.mark.parametrize(("order", "numbers"), [(0, 1 + 8), (1, 1 + 8 + 16)])
def test_its_numbers_are_billed(order, numbers):
    """One count, a mean key, a mean value and their covariance, at the dtype of the cache, read and held while something is gone."""
    source = lane(prompt=30, steps=4)
    ledger = run(source, f"{KEEP} >> evicted_moments(order={order})")["ledger"]
    assert (ledger["meta_bytes"] == 4 * numbers).all()
    assert (ledger["meta_resident_bytes"] == 4 * numbers).all()
    assert (ledger["write_bytes"] == source.layer.row_bytes + 4 * numbers).all()


def test_the_bytes_of_a_head_of_128_channels():
    sums = evicted_moments().empty(128, 128)
    assert 2 * sum(x.size for x in sums.values()) == 33_282


def test_in_sliding_layers_nothing_is_estimated():
    heads = run(lane(prompt=30, steps=6, window=16), f"{KEEP} >> evicted_moments()")["heads"]
    assert not heads["mass_estimated"].any()


def test_with_a_learned_sink_its_part_stays():
    source = lane(prompt=30, steps=6, sinks=True)
    heads = run(source, f"{KEEP} >> evicted_moments()")["heads"]
    parts = sum(heads[x] for x in ("mass_recall", "mass_evicted", "mass_unread", "learned_sink_mass"))
    assert parts == pytest.approx(1, abs=1e-6)
    assert (heads["mass_estimated"] <= heads["mass_evicted"] + 1e-6).all()


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        ("evicted_moments()", "nothing is evicted before it"),
        ("full() >> evicted_moments()", "nothing is evicted before it"),
        ("h2o(hold=tokens(9)) >> kivi(bits=2) >> evicted_moments()", "codes rows"),
        ("qevict(hold=share(0.2)) >> evicted_moments()", "codes rows"),
        ("h2o(hold=tokens(9)) >> quest(read=pages(2)) >> evicted_moments()", "the order is"),
        ("h2o(hold=tokens(9)) >> evicted_moments(order=2)", "order=2"),
    ],
)
def test_what_it_cannot_do_is_refused(policy, part):
    with pytest.raises(WrongUse, match=part):
        parse(policy)


def test_capped_logits_are_refused():
    with pytest.raises(WrongUse, match="caps its logits"):
        run(lane(softcap=2.0), f"{KEEP} >> evicted_moments()")


@pytest.mark.parametrize(
    "policy",
    [
        f"{KEEP} >> evicted_moments()",
        "snapkv(hold=tokens(24), window=8) >> evicted_moments(order=0) >> quest(read=pages(2), page=4)",
    ],
)
def test_it_keeps_the_laws(policy):
    assert check_policy(parse(policy)) == []
