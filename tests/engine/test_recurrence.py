"""Late importance recurrence and churn against sets that python keeps, the card's example, and the values of the handed definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.evolve import evolve
from kvsim.engine.recurrence import DORMANCY, count, highest, leaders
from tests.engine.lanes import chain, lane, placement, run

QEVICT = "qevict(hold=share(0.5), sinks=2, window=4, period=3, recent=tokens(6))"
RESTLESS = "qevict(hold=share(0.5), quant_share=0.4, sinks=2, window=4, period=3, recent=tokens(6), decay=0.3)"
H2O = "h2o(hold=tokens(24), recent=0.3)"
SUMS = ("returns", "spells", "pairs", "spells_alive", "pairs_alive")


def masks(sets, total=8):
    return [np.isin(np.arange(total), sorted(s)) for s in sets]


def naive(full, held, dormancy):
    """(re-entries, spells, pairs, spells alive, pairs alive) of sets per event, spell by spell."""
    returns = spells = pairs = spells_alive = pairs_alive = 0
    for unit in set().union(*full):
        inside = [unit in f for f in full]
        for e in range(1, len(full)):
            if not inside[e - 1] or inside[e]:
                continue
            stop = next((x for x in range(e, len(full)) if inside[x]), None)
            events = range(e, len(full) if stop is None else stop)
            long = len(events) >= dormancy
            alive = all(unit in held[x] for x in events)
            returns += long and stop is not None
            spells += long
            spells_alive += long and alive
            pairs += sum(x - e + 1 >= dormancy for x in events)
            pairs_alive += sum(x - e + 1 >= dormancy and unit in held[x] for x in events)
    return [returns, spells, pairs, spells_alive, pairs_alive]


def counted(full, held):
    nothing = masks([set()] * len(full))
    n = len(full)
    return count(masks(full), masks(held), nothing, [0] * n, [8] * n, np.arange(8))


def test_the_example_of_the_card():
    """F: {0,1}, {0,2}, {0,2}, {0,1}, {1,2}: by events 2/4, by spells 2/3; with a dormancy of 2 both are 1/1."""
    full = [{0, 1}, {0, 2}, {0, 2}, {0, 1}, {1, 2}]
    everything = [set(range(8))] * 5
    found = counted(full, everything)
    assert (found.returns[0], found.pairs[0], found.spells[0]) == (2, 4, 3)
    assert naive(full, everything, 1)[:3] == [2, 3, 4]
    assert naive(full, everything, 2)[:3] == [1, 1, 1]
    assert found.churn_full == pytest.approx(2 / 3 + 0 + 2 / 3 + 2 / 3)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7))), min_size=1, max_size=24))
def test_counts_are_those_of_python_sets(events):
    full, held, gone = [], [], set()
    for now, lost in events:  # what is gone is never full again
        gone |= lost - now
        full.append(now - gone)
        held.append(set(range(8)) - gone)
    found = counted(full, held)
    for i, dormancy in enumerate(DORMANCY):
        assert [int(getattr(found, name)[i]) for name in SUMS] == naive(full, held, dormancy)
    pairs = list(itertools.pairwise(full))
    assert found.churn_full == pytest.approx(sum(1 - len(a & b) / len(a | b) if a | b else 0 for a, b in pairs))


def test_units_count_once_whatever_their_size():
    unit = leaders(np.array([-1, 5, 5, 6, 6, 6, 9]), 7)
    assert unit.tolist() == [-1, 1, 1, 3, 3, 3, 6]
    score, reach = np.array([9.0, 1, 1, 0, 0, 2, 2]), np.ones(7, bool)
    reach[0] = False
    assert np.flatnonzero(highest(score, reach, unit, 2)).tolist() == [1, 2, 3, 4, 5]  # sums 2, 2, 2: ties to the lower unit
    whole = [np.array([False, True, True, False, False, False, False]), np.zeros(7, bool)]
    found = count(whole, whole, [np.zeros(7, bool)] * 2, [0, 0], [7, 7], unit)
    assert found.spells[0] == 1


def test_protected_tokens_and_those_out_of_sight_have_no_spell():
    full = masks([{1, 2, 3}, set()])
    safe = masks([set(), {1}])
    found = count(full, full, safe, [0, 3], [6, 8], np.arange(8))  # 1 is protected now, 2 left the window, 3 lost its place
    assert found.pairs[0] == found.spells[0] == 1


def test_a_spell_ends_where_its_unit_is_protected_or_out_of_sight():
    full, none = masks([{1, 2, 3}, set(), set(), set()]), set()
    safe = masks([none, none, {1}, {1}])
    found = count(full, masks([set(range(8))] * 4), safe, [0, 0, 3, 3], [6, 7, 8, 8], np.arange(8))
    assert (found.spells[0], found.spells_alive[0]) == (3, 3)  # 1 and 2 after one event, 3 at the end
    assert found.pairs[0] == 1 + 1 + 3
    gone = count(full, masks([set(range(8)), {1, 2}, {1}, {1}]), safe, [0, 0, 3, 3], [6, 7, 8, 8], np.arange(8))
    assert (gone.spells[0], gone.spells_alive[0]) == (3, 2)


@pytest.mark.parametrize("policy", [RESTLESS, H2O, "tova(hold=tokens(15))", "snapkv(hold=tokens(20), window=5)"])
def test_a_run_counts_what_its_placement_says(policy):
    """Full and unprotected tokens at events, recounted from the tiers table. Who never codes never brings anything back."""
    source = lane(prompt=80, steps=18, size=3.0, seed=3)
    tables = run(source, policy, explain=True)
    mine = {n: np.asarray(x) for n, x in tables["recurrence"].items()}
    deployed = mine["set"] == "deployed"
    assert (mine["returns"] <= mine["pairs"]).all()
    assert (mine["spells_alive"] <= mine["spells"]).all()
    assert (mine["pairs_alive"] <= mine["pairs"]).all()
    if policy != RESTLESS:
        assert (mine["returns"][deployed] == 0).all()
        assert (mine["pairs_alive"][deployed] == 0).all()
        return
    tier = placement(source, tables["tiers"])[0] & 3
    start = np.zeros(source.request.total, int)
    first = list(tables["tiers"]["step"]).index(-1)
    for r in tables["tiers"]["runs"][first]:
        start[r["start"] : r["stop"]] = r["tier"] & 3
    full, held = [], []
    for e, now in [(-1, start), *((s, tier[s]) for s in range(2, 18, 3))]:
        reach = [w for w in range(24) if 2 + 4 * (w + 1) <= 80 + e + 1 - 6]
        full.append({w for w in reach if now[2 + 4 * w] == 2})
        held.append({w for w in reach if now[2 + 4 * w] > 0})
    for i, dormancy in enumerate(DORMANCY):
        assert [int(mine[name][deployed][i]) for name in SUMS] == naive(full, held, dormancy)
    assert mine["returns"][deployed][0] > 0
    assert mine["pairs"][deployed][1] > 0


def test_oracles_rank_by_dense_attention():
    """H2O of one token a head: the oracle's full set is the most attended token that is not protected."""
    source = lane(prompt=12, steps=20, kv_heads=1, seed=5)
    tables = run(source, "h2o(hold=tokens(3), recent=0.5)", explain=True)
    k, q = source.k[0].astype(float), source.q.astype(float)
    total, group = source.request.total, source.layer.group
    since = np.zeros((21, total))
    since[0, :12] = source.mass[:group].sum(0)
    for i, t in enumerate(source.t.tolist()):
        for g in range(group):
            e = np.exp(source.layer.scale * (k[: t + 1] @ q[i, g]))
            since[i + 1, : t + 1] += e / e.sum()
    for kind in ("oracle", "oracle_interval"):
        score, full = np.zeros(total), []
        for e in range(21):
            score = since[e] + (score if kind == "oracle" else 0)
            t = 11 + e
            reach = np.arange(t)  # recent = max(1, 1.5) = 1 is protected
            best = sorted(reach.tolist(), key=lambda p: (-score[p], p))[:2]
            full.append(set(best))
        got = {n: np.asarray(x)[np.asarray(tables["recurrence"]["set"]) == kind] for n, x in tables["recurrence"].items()}
        for i, dormancy in enumerate(DORMANCY):
            want = naive(full, [set(range(total))] * 21, dormancy)
            assert [int(got[name][i]) for name in SUMS] == want
        assert got["pairs"][0] > 0


@pytest.mark.parametrize("policy", [QEVICT, H2O])
def test_neither_steps_nor_blocks_change_it(policy, monkeypatch):
    source = lane(prompt=30, steps=20, group=9, kv_heads=2, key_dim=8)
    whole = run(source, policy, explain=True)["recurrence"]
    assert same(whole, run(source, policy, explain=True, steps=[4, 11])["recurrence"])
    monkeypatch.setattr("kvsim.engine.attend.steps_per_block", lambda group: 3)
    assert same(whole, run(source, policy, explain=True)["recurrence"], near=1e-6)


def same(a, b, near=0.0):
    cosines = (np.asarray(x["score_cosine"], float) for x in (a, b))
    return np.allclose(*cosines, rtol=0, atol=near, equal_nan=True) and all(
        (np.asarray(a[name]) == np.asarray(b[name])).all() for name in a if name != "score_cosine"
    )


def test_without_explain_only_those_who_code_are_counted():
    source = lane(prompt=40, steps=9)
    assert set(run(source, QEVICT)["recurrence"]["set"]) == {"deployed"}
    assert not run(source, H2O)["recurrence"]
    assert set(run(source, H2O, explain=True)["recurrence"]["set"]) == {"deployed", "oracle", "oracle_interval"}


def test_the_cosine_of_scores_is_that_of_attention_with_captured_keys():
    """Own softmax over held tokens with decoded and with captured keys, summed between cuts."""
    source = lane(prompt=40, steps=9, seed=6)
    tables = run(source, QEVICT, explain=True)
    chain_of, held = chain(QEVICT), placement(source, tables["tiers"])
    record = evolve(source, chain_of, sets=True)
    lay, found, score = source.layer, [], np.zeros((2, source.request.total))
    start = record.start & 1
    for i, t in enumerate(source.t.tolist()):
        for h in range(lay.kv_heads):
            before = (start[h] > 0) & (np.arange(len(start[h])) < 40) if i == 0 else held[h, i - 1] & 3 > 0
            coded = (record.start[h] & 8 > 0) if i == 0 else held[h, i - 1] & 3 == 1
            live = np.flatnonzero(before | (np.arange(len(before)) == t))
            exact = source.k[h, live].astype(float)
            stored = np.where(coded[live][:, None], record.decoded["k"][h, live], exact)
            promoted = held[h, i - 1, live] & 4 > 0 if i else np.zeros(len(live), bool)
            stored = np.where(promoted[:, None], record.decoded["k"][h, live], stored)
            for g in range(lay.group):
                for kind, keys in enumerate((stored, exact)):
                    e = np.exp(lay.scale * (keys @ source.q[i, h * lay.group + g].astype(float)))
                    score[kind, live] += e / e.sum()
        if i % 3 == 2:
            units = [range(2 + 4 * w, 6 + 4 * w) for w in range(20) if 6 + 4 * w <= t + 1 - 6]
            low, full = (np.array([s[list(u)].sum() for u in units]) for s in score)
            found.append(low @ full / np.linalg.norm(low) / np.linalg.norm(full))
            score[:] = 0
    got = np.asarray(tables["recurrence"]["score_cosine"], float)[np.asarray(tables["recurrence"]["set"]) == "deployed"]
    assert got == pytest.approx(np.mean(found), abs=1e-6)
    assert got[0] < 1 - 1e-6


def test_there_is_no_cosine_where_nothing_is_coded():
    tables = run(lane(), H2O, explain=True)
    assert np.isnan(np.asarray(tables["recurrence"]["score_cosine"], float)).all()
