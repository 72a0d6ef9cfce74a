"""sparda_proxy: pages by the queries of the layer before, and what a trace must have for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvsim import check_policy, parse, replay
from kvsim.errors import WrongUse
from kvsim.metrics.run import open_run
from kvsim.replay.asked import resolve
from kvsim.replay.lanes import source_for
from kvsim.replay.needs import check_needs
from kvsim.synth.generate import synthesize
from kvsim.trace.bits import widen
from tests.engine.lanes import differing, lane, run

POLICY = "sparda_proxy(read=pages(3), page=4)"
SHAPE = {"prompt": 60, "steps": 6, "head_dim": 8, "seed": 2}


def test_the_pages_are_those_that_the_other_queries_rank_by_the_mean_of_keys():
    source = lane(prompt=30, steps=6, group=3)
    plans = run(source, POLICY, plans=True)["plans"]
    for head, step, pages in zip(plans["kv_head"], plans["step"], plans["pages"], strict=True):
        t = 30 + step
        q = source.before[step, 3 * head : 3 * head + 3].astype(float)
        means = [source.k[head, p : min(p + 4, t + 1)].astype(float).mean(axis=0) for p in range(0, t + 1, 4)]
        score = (np.array(means) @ q.T).mean(axis=1)
        tail = t // 4
        best = sorted((p for p in range(len(score)) if p != tail), key=lambda p: (-score[p], p))[:2]
        assert [*pages] == sorted([tail, *best])


def test_with_queries_of_its_own_it_is_quest_over_block_means():
    source = lane(prompt=30, steps=6)
    mine = run(replace(source, before=source.q), POLICY, plans=True)
    quest = run(source, 'quest(read=pages(3), page=4, index=block_mean(), heads="mean")', plans=True)
    assert [[*p] for p in mine["plans"]["pages"]] == [[*p] for p in quest["plans"]["pages"]]
    assert np.array_equal(mine["heads"]["mass_recall"], quest["heads"]["mass_recall"])
    assert np.array_equal(mine["ledger"]["index_bytes"], quest["ledger"]["index_bytes"])
    assert "slack_mean" not in mine["heads"]  # its scores bound nothing of this layer's queries
    assert "slack_mean" in quest["heads"]


def test_another_layer_before_is_another_ranking():
    source = lane(prompt=40, steps=6)
    other = replace(source, before=-source.before)
    assert differing(run(source, POLICY, plans=True), run(other, POLICY, plans=True)) != []


@pytest.mark.parametrize(
    "policy", [POLICY, 'sparda_proxy(read=share(0.3), page=4, heads="each", sinks=2)', f"h2o(hold=tokens(24)) >> {POLICY}"]
)
def test_it_keeps_the_laws(policy):
    assert check_policy(parse(policy)) == []


# ------------------------------------------------------------------------------------------------ over a trace
def test_a_replay_takes_the_queries_of_the_layer_before(tmp_path):
    trace = synthesize(tmp_path / "t", layers=3, **SHAPE)
    request, second = trace.requests[0], trace.layers[1]
    chain = parse(POLICY)
    _, source = source_for(trace, request, second, [chain])
    assert np.array_equal(source.before, widen(trace.lane(request, trace.layers[0]).q).astype(np.float32))
    assert source_for(trace, request, second, [parse("quest(read=pages(3))")])[1].before is None
    replay(trace, [POLICY], tmp_path / "r", layers=[0, 1])
    heads = open_run(tmp_path / "r").heads.collect()
    assert {*heads.filter(layer=0)["dense"].to_list()} == {True}  # which has none before it
    assert {*heads.filter(layer=1)["dense"].to_list()} == {False}


def test_what_is_lacking_is_named(tmp_path):
    some = synthesize(tmp_path / "some", layers=3, captured=[0, 2], **SHAPE)
    with pytest.raises(WrongUse, match=r"sparda_proxy needs queries_before: layer 1 is not captured; capture with --layers all"):
        check_needs(some, resolve(some, POLICY))
    trace = synthesize(tmp_path / "t", layers=2, **SHAPE)
    odd = tuple(replace(x, q_heads=2, kv_heads=1) if x.id == 0 else x for x in trace.layers)
    with pytest.raises(WrongUse, match="layer 0 has other heads"):
        check_needs(replace(trace, layers=odd), resolve(trace, POLICY, layers=[1]))
    with pytest.raises(WrongUse, match=r"dense_layers=0.*before the first there is none"):
        parse("sparda_proxy(read=pages(3), dense_layers=0)")
