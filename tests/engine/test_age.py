"""The age of a set: steps since the ranking it rests on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.lanes import differing, lane, run

QUEST = "quest(read=pages(2), page=4{})"


@pytest.fixture(scope="module")
def source():
    return lane(prompt=40, steps=20, key_dim=8, group=9, kv_heads=1)


@pytest.mark.parametrize("before", ["", "streaming_llm(sinks=2, hold=tokens(30)) >> ", "h2o(hold=tokens(30)) >> "])
def test_it_is_the_step_modulo_the_period(source, before):
    heads = run(source, before + QUEST.format(", refresh=6"))["heads"]
    assert np.array_equal(heads["set_age"], heads["step"] % 6)
    heads = run(source, before + QUEST.format(', refresh="never"'))["heads"]
    assert np.array_equal(heads["set_age"], heads["step"])


def test_what_ranks_at_every_step_or_never_ranked_has_none(source):
    for policy in (QUEST.format(""), "everything(page=4)", "full()"):
        heads = run(source, policy)["heads"]
        assert "set_age" not in heads or np.isnan(heads["set_age"].astype(float)).all()


@pytest.mark.parametrize("policy", [QUEST, "oracle(read=pages(2), page=4{})", "quest(read=top_p(p=0.5), page=4{})"])
def test_a_set_of_age_zero_is_that_of_a_ranking_at_every_step(source, policy):
    fresh, aged = run(source, policy.format("")), run(source, policy.format(", refresh=5"))
    steps = np.unique(aged["heads"]["step"][aged["heads"]["set_age"] == 0])
    assert steps.tolist() == [0, 5, 10, 15]
    for tables in (fresh, aged):
        for name in ("heads", "ledger"):
            keep = np.isin(tables[name]["step"], steps)
            tables[name] = {c: x[keep] for c, x in tables[name].items()}
    told = {"heads.set_age", "heads.certified", "heads.read_churn"}  # churn looks at the step before
    assert not set(differing(fresh, aged, names=("heads", "ledger"))) - told


def test_older_sets_miss_more(source):
    """Queries that drift away from the first: a set kept for ever loses mass with age."""
    far = np.linspace(0, 1, len(source.q))[:, None, None]
    source.q[:] = 6 * (source.q[:1] * (1 - far) + far * source.q[-1:])
    heads = run(source, QUEST.format(', refresh="never"'))["heads"]
    recall = [heads["mass_recall"][heads["set_age"] == a].mean() for a in (0, 19)]
    assert recall[0] > recall[1] + 0.05
