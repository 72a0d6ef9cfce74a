"""From step to step: why what is read changes, and whether missed pages are read soon after; against loops over python sets."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.lanes import differing, lane, run
from tests.engine.policies import ALL

WIDE = {"key_dim": 16, "prompt": 130, "steps": 60, "kv_heads": 1, "group": 9}  # three blocks of 28 steps
QUEST = "quest(read=pages(4), page=8)"
SOON = (1, 4, 16)


def recovered(source, got, page):
    """{h: {(q_head, step): share}} from the plans: pages of most dense mass not read h steps ago, read since; with python sets."""
    lay, plans, heads = source.layer, got["plans"], got["heads"]
    read = {(int(h), int(s)): set(p) for h, s, p in zip(plans["q_head"], plans["step"], plans["pages"], strict=True)}
    missed = {}
    for (h, s), mine in read.items():
        t = int(source.t[s])
        pos = np.arange(t + 1)
        x = lay.scale * (source.rows("k", h // lay.group, pos) @ source.q[s, h].astype(float))
        mass = np.bincount(pos // page, np.exp(x - x.max()))
        missed[h, s] = set(np.lexsort((np.arange(len(mass)), -mass))[: len(mine)].tolist()) - mine
    out = {}
    for n in SOON:
        out[n] = {}
        for h, s in zip(heads["q_head"].tolist(), heads["step"].tolist(), strict=True):
            lost = missed.get((h, s - n))
            if lost:
                since = set().union(*(read[h, x] for x in range(s - n + 1, s + 1)))
                out[n][h, s] = len(lost & since) / len(lost)
    return out


@pytest.mark.parametrize("policy", [QUEST, "streaming_llm(sinks=8, hold=tokens(90)) >> quest(read=pages(4), page=8)"])
def test_recovery_is_what_a_loop_over_sets_finds(policy):
    source = lane(**WIDE)
    got = run(source, policy, plans=True, explain=True)
    explain, wanted = got["explain"], recovered(source, got, 8)
    for n in SOON:
        found = zip(explain["q_head"], explain["step"], explain[f"recovered_{n}"], strict=True)
        assert {(h, s): x for h, s, x in found if not np.isnan(x)} == pytest.approx(wanted[n])
        assert len(wanted[n]) > 300


def test_nothing_is_recovered_where_reads_never_change():
    source = lane(**WIDE)
    source.q[:] = source.q[:1]
    source.k[:, 130:] = source.k[:, 129:130]  # all in the last page, whose box stays as it is
    explain = run(source, 'quest(read=pages(1), page=64, tail="free")', explain=True)["explain"]
    for n in SOON:
        known = explain[f"recovered_{n}"][~np.isnan(explain[f"recovered_{n}"])]
        assert len(known)
        assert not known.any()


def test_all_is_recovered_where_the_next_step_reads_what_this_one_missed():
    """Two pages: one has the best key, the other has most mass, and with every other query the other way round."""
    source = lane(prompt=16, steps=20, key_dim=2, kv_heads=1, group=1)
    source.k[:], source.q[:] = 0, 0
    source.k[0, 0, 0] = source.k[0, 8, 1] = 2
    source.k[0, 8:16, 0] = source.k[0, :8, 1] = 1
    source.q[np.arange(20), 0, np.arange(20) % 2] = 1
    explain = run(source, 'quest(read=pages(1), page=8, tail="free")', explain=True)["explain"]
    for n in SOON:
        assert (explain[f"recovered_{n}"][n:] == 1).all()


# ------------------------------------------------------------------------------------------------ churn
def test_a_repeated_query_changes_nothing_by_itself():
    source = lane(**WIDE)
    source.q[1::2] = source.q[0::2]
    explain = run(source, QUEST, explain=True)["explain"]
    repeated = explain["step"] % 2 == 1
    assert not explain["churn_query"][repeated].any()
    assert np.nanmean(explain["churn_query"][~repeated]) > 0.2


@pytest.mark.parametrize(
    "policy", [QUEST, 'quest(read=pages(3), page=8, heads="split", private=1)', "quest(read=pages(4), page=8, sinks=3)"]
)
def test_frozen_summaries_change_nothing_by_themselves(policy):
    """New keys that lie in the box of their page: no summary moves."""
    source = lane(prompt=110, steps=40, key_dim=8)
    source.k[:, 110:] = source.k[:, 109:110]
    explain = run(source, policy.replace("page=8", "page=16"), explain=True)["explain"]
    inside = (source.t[explain["step"]] % 16 > 0) & (explain["step"] > 0)  # a page that begins is a change of its own
    assert not explain["churn_summary"][inside].any()
    assert explain["churn_query"][inside].mean() > 0.1
    moving = run(lane(**WIDE), policy, explain=True)["explain"]
    assert np.nanmax(moving["churn_summary"]) > 0


def test_both_parts_are_at_least_the_whole():
    """Jaccard's distance is a metric: d(A, B) <= d(A, C) + d(C, B). Nothing is evicted, so the whole is read_churn."""
    got = run(lane(**WIDE), QUEST, explain=True)
    parts = got["explain"]["churn_summary"] + got["explain"]["churn_query"]
    known = ~np.isnan(parts)
    assert (got["heads"]["read_churn"][known] <= parts[known] + 1e-6).all()
    assert known.sum() == len(parts) - 9  # all but the first step


def test_a_rule_has_no_parts():
    explain = run(lane(), "quest(read=exact(r=2), page=4)", explain=True)["explain"]
    assert np.isnan(explain["churn_query"]).all()
    assert not np.isnan(explain["recovered_1"]).all()


# ------------------------------------------------------------------------------------------------ the same rows
RANKED = [p for p in ALL if "quest" in p and "refresh" not in p]


@pytest.mark.parametrize("policy", RANKED)
def test_whatever_steps_are_written(policy):
    source = lane(**WIDE)
    whole = run(source, policy, explain=True)
    for steps in ([17], [0, 2, 27, 28, 59]):
        assert differing(whole, run(source, policy, explain=True, steps=steps), steps, ("explain",)) == []


def test_strided_steps_have_no_neighbours():
    explain = run(lane(prompt=40, steps=30, stride=3), QUEST, explain=True)["explain"]
    for column in ("churn_summary", "churn_query", *(f"recovered_{n}" for n in SOON)):
        assert np.isnan(explain[column]).all()


def test_the_other_tables_do_not_move():
    source = lane(**WIDE)
    asked = {"heads.oracle_rel_l2", "heads.oracle_held_rel_l2", "heads.oracle_coded_rel_l2"}  # columns that only --explain fills
    assert set(differing(run(source, QUEST, plans=True), run(source, QUEST, plans=True, explain=True))) <= asked
