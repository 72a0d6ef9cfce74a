"""A layer on several devices by heads and by channels, against plain loops over the tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import WrongUse
from kvsim.metrics.run import open_run
from kvsim.metrics.shards import by_channels, by_heads
from kvsim.policies.index.boxes import boxes
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize

QUEST = "quest(read=pages(2), page=8)"
POLICIES = (QUEST, "quest(read=exact(r=4), page=8)", "recency(read=pages(2), page=8)", "full()")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    trace = synthesize(folder / "trace", requests=1, layers=1, prompt=60, steps=6, q_heads=6, kv_heads=3)
    return open_run(replay(trace, POLICIES, folder / "run", workers=1).path)


def test_heads_dealt_in_runs_larger_first(run):
    found = by_heads(run, 2)
    assert found["collective_bytes"].to_list() == [0] * 4
    ledger = run.ledger.collect()
    for row in found.iter_rows(named=True):
        mine = ledger.filter(policy=row["policy"])
        if mine["read_pages"].null_count():
            assert row["page_imbalance"] is None
            continue
        pages = {(r["step"], r["kv_head"]): r["read_pages"] for r in mine.iter_rows(named=True)}
        uneven = [2 * max(a := pages[s, 0] + pages[s, 1], b := pages[s, 2]) / (a + b) for s in range(6)]
        assert row["page_imbalance"] == pytest.approx(np.mean(uneven))
        assert row["page_imbalance_max"] == pytest.approx(max(uneven))
    one = by_heads(run, 1).drop_nulls()
    assert one["page_imbalance"].to_list() == [1] * 3


def test_channels_tell_parts_of_scores_and_logits(run):
    ledger, heads = run.ledger.collect(), run.heads.collect()
    for row in by_channels(run, 4).iter_rows(named=True):
        logits = heads.filter(policy=row["policy"])["read_tokens"].sum() / 6
        assert row["logit_bytes"] == logits * 4 * 4
        scanned = ledger.filter(policy=row["policy"])["index_bytes"].sum() > 0
        pages = np.mean([6 * ((60 + s) // 8 + 1) for s in range(6)]) if scanned else 0  # of every query head
        assert scanned == ("quest" in row["policy"])
        assert row["score_bytes"] == pytest.approx(pages * 4 * 4)
        assert row["collective_bytes"] == row["score_bytes"] + row["logit_bytes"]


def test_the_two_shards_of_the_card():
    q, keys = np.array([1, -2, 0.5, 3]), np.array([(1, 0, 2, -1), (0, 1, -1, 2)], float)
    parts = [score(q[c], keys[:, c]) for c in (slice(0, 2), slice(2, 4))]
    assert parts == [1, 7]
    assert score(q, keys) == 8


def score(q, keys):
    summary = boxes().summarise(keys[None], np.ones((1, len(keys)), bool), np.ones(1, bool))
    return boxes().score(q[None, None, None], {n: x[None] for n, x in summary.items()}).item()


@given(st.integers(0, 2**32), st.integers(1, 9))
def test_a_bound_is_the_sum_of_its_channels_parts(seed, cut):
    rng = np.random.default_rng(seed)
    q, keys = rng.standard_normal(10), rng.standard_normal((5, 10))
    assert score(q[:cut], keys[:, :cut]) + score(q[cut:], keys[:, cut:]) == pytest.approx(score(q, keys))


@pytest.mark.parametrize("ranks", [0, 4])
def test_more_devices_than_heads_are_refused(run, ranks):
    with pytest.raises(WrongUse, match=f"ranks={ranks}: expected 1 to 3, as many as every layer has kv_heads"):
        by_heads(run, ranks)


def test_more_devices_than_channels_are_refused(run):
    with pytest.raises(WrongUse, match="as many as every layer has key_dim"):
        by_channels(run, 1000)
