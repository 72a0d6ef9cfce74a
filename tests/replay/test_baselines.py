"""Beside a read policy stand others with its budget, its page size and its forced pages; nothing is added unasked."""

from __future__ import annotations

import pytest

from kvsim.policies.language import parse_policy, per_layer
from kvsim.replay.baselines import with_baselines
from kvsim.replay.run import replay

DENSE = "full() >> everything()"


def added(*policies):
    return [e for e in with_baselines([parse_policy(p) for p in policies]) if e.role == "baseline"]


def test_a_read_policy_gets_three_rankings_and_full_attention():
    policy = 'h2o(hold=share(0.5)) >> quest(read=share(0.1), page=8, sinks=4, recent=32, tail="free", refresh=2)'
    dense, *others = added(policy)
    assert (dense.policy.id, dense.beside) == (DENSE, None)
    assert [type(e.policy.default.part("read")).__name__ for e in others] == ["oracle", "recency", "random_read"]
    for e in others:
        read = e.policy.default.part("read")
        same = parse_policy(policy).default.part("read")
        assert [getattr(read, n) for n in ("read", "page", "forced")] == [getattr(same, n) for n in ("read", "page", "forced")]
        assert e.policy.id.startswith("full() >> ")
        assert e.beside == parse_policy(policy).id


def test_the_newest_page_that_quest_is_forced_to_read_is_forced_on_them_too():
    assert all(e.policy.default.part("read").forced.tail for e in added("quest(read=pages(4))")[1:])


@pytest.mark.parametrize("policy", ["h2o(hold=share(0.5))", "kivi()", "quest(read=exact(r=10))"])
def test_without_a_read_budget_only_full_attention_is_added(policy):
    assert [e.policy.id for e in added(policy)] == [DENSE]


def test_nothing_is_there_twice():
    policies = ["quest(read=pages(4))", 'quest(read=pages(4), heads="max")', "full()", 'oracle(read=pages(4), tail="forced")']
    entries = with_baselines([parse_policy(p) for p in policies])
    assert len({e.policy.id for e in entries}) == len(entries) == 4 + 2
    assert [e.role for e in entries] == ["asked"] * 4 + ["baseline"] * 2


def test_every_budget_of_a_policy_file_gets_its_own():
    policy = per_layer({1: "quest(read=pages(2))"}, default="quest(read=pages(4))")
    budgets = [e.policy.default.part("read").read.n for e in added(policy)[1:]]
    assert sorted(budgets) == [2, 2, 2, 4, 4, 4]


def test_roles_are_recorded_and_nothing_is_added_unasked(trace):
    run = replay(trace, "quest(read=pages(2), page=8)", baselines=True, workers=1)
    quest = parse_policy("quest(read=pages(2), page=8)").id
    told = [(p["role"], p["beside"]) for p in run.info["policies"]]
    assert told == [("asked", None), ("baseline", None)] + [("baseline", quest)] * 3
    assert run.heads["policy"].n_unique() == 5
    assert [p["role"] for p in replay(trace, "quest(read=pages(2), page=8)", workers=1).info["policies"]] == ["asked"]


def test_no_ranking_beats_the_oracle_at_its_budget(trace):
    run = replay(trace, "quest(read=pages(3), page=8)", baselines=True, workers=1)
    ids = [p["id"] for p in run.info["policies"]]
    recall = {i: run.heads.filter(run.heads["policy"].cast(str) == i)["mass_recall"] for i in ids}
    oracle = next(recall[i] for i in ids if "oracle" in i)
    for i in ids:
        if i != DENSE:
            assert (recall[i] <= oracle + 1e-6).all(), i
