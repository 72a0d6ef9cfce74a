"""Shards deal pages out in runs, each picks its own; tiles change what a page takes in memory, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.account import imbalance
from kvsim.engine.select import dealt, page_order, pick
from kvsim.errors import WrongUse
from kvsim.units import shards
from tests.engine.lanes import by_step, lane, run


def picked(scores, k, over=None, forced=(), exists=None):
    """The pages one head reads."""
    score, there = np.array(scores, float)[None, None], np.ones((1, len(scores)), bool)
    if exists is not None:
        there[0] = exists
    must = np.isin(np.arange(len(scores)), forced)[None] & there
    chosen = pick(page_order(score, there, must), there, must, np.array([k]), "each", 1, over)
    return np.flatnonzero(chosen[0, 0]).tolist()


def test_the_two_ranks_of_the_card():
    scores = [9, 8, 7, 1, 6, 5, 4, 3]
    assert picked(scores, 3) == picked(scores, 3, shards(2)) == [0, 1, 2]
    assert picked(scores, 3, shards(2, "split")) == [0, 1, 4]  # 2 and 1
    assert picked(scores, 3, shards(2, "each")) == [0, 1, 2, 4, 5, 6]
    assert picked(scores, 8, shards(2, "split")) == [*range(8)]


def test_forced_pages_are_inside_their_shards_part():
    scores = [9, 8, 7, 1, 6, 5, 4, 3]
    assert picked(scores, 4, shards(2, "split"), forced=[7]) == [0, 1, 4, 7]
    assert picked(scores, 2, shards(2, "split"), forced=[2, 3]) == [2, 3, 4]


@given(st.lists(st.booleans(), min_size=1, max_size=20).filter(any), st.integers(1, 6))
@settings(deadline=None)
def test_runs_differ_by_one_page_and_the_larger_come_first(exists, n):
    shard = dealt(np.array([exists]), n)[0]
    runs = np.array_split(np.flatnonzero(exists), n)
    assert [np.flatnonzero(shard == s).tolist() for s in range(n)] == [r.tolist() for r in runs]
    assert (shard[~np.array(exists)] == -1).all()


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9), st.sampled_from(["split", "each"]))
@settings(deadline=None, max_examples=60)
def test_every_shard_reads_the_best_of_its_own(seed, n, k, budget):
    rng = np.random.default_rng(seed)
    scores, exists = rng.integers(0, 5, 12), rng.random(12) < 0.8
    forced = [int(p) for p in np.flatnonzero(exists & (rng.random(12) < 0.2))]
    got, there = picked(scores, k, shards(n, budget), forced, exists), np.flatnonzero(exists)
    if k >= len(there):
        assert got == there.tolist()
        return
    want = []
    for s, run_ in enumerate(np.array_split(there, n)):
        part = k if budget == "each" else k // n + (s < k % n)
        order = sorted(run_.tolist(), key=lambda p: (p not in forced, -scores[p] if p not in forced else 0, p))
        want += order[: max(part, sum(p in forced for p in order))]
    assert got == sorted(want)


@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 8), st.integers(1, 12))
@settings(deadline=None)
def test_the_best_of_every_shards_best_are_the_best_of_all(seed, pages, n, k):
    """However the pages lie, runs or not, shards left empty or not; ties go to the lower page across shards, too."""
    rng = np.random.default_rng(seed)
    scores, shard = rng.integers(0, 4, pages), rng.integers(0, n, pages)
    best = lambda those: sorted(those, key=lambda p: (-scores[p], p))[:k]  # noqa: E731
    told = [p for s in range(n) for p in best(np.flatnonzero(shard == s).tolist())]
    assert sorted(best(told)) == picked(scores, k) == picked(scores, k, shards(n))


@given(st.integers(0, 2**32), st.integers(1, 5))
@settings(deadline=None)
def test_imbalance_is_the_busiest_shard_over_the_mean(seed, n):
    rng = np.random.default_rng(seed)
    exists = rng.random(15) < 0.8
    exists[:n] = True
    union = exists & (rng.random(15) < 0.4)
    union[0] = True
    counts = [union[run_].sum() for run_ in np.array_split(np.flatnonzero(exists), n)]
    assert imbalance(union[None], exists[None], n) == pytest.approx([max(counts) / np.mean(counts)])


# ------------------------------------------------------------------------------------------------ whole runs
def test_the_bytes_of_the_card():
    """Eight shards and 256 pages of 16 tokens, keys and values of 128 in fp16: 16 KiB of scores against 2 MiB of pages."""
    source = lane(prompt=2049 * 16 - 1, steps=1, kv_heads=1, group=1, key_dim=128, dtype="float16")
    ledger = run(source, "quest(read=pages(256), page=16, shards=shards(8))")["ledger"]
    assert ledger["read_bytes"].tolist() == [2_097_152]
    assert ledger["collective_bytes"].tolist() == [16_384 + 8 * (128 + 2) * 4]  # and a partial output of each


def test_imbalance_of_a_run_is_that_of_its_plans():
    source, n = lane(prompt=60, steps=6), 3
    found = run(source, f"quest(read=pages(4), page=4, shards=shards({n}))", plans=True)
    plans, uneven = found["plans"], by_step(found["ledger"], "page_imbalance")
    for head in range(2):
        for step in range(6):
            mine = (plans["kv_head"] == head) & (plans["step"] == step)
            union = set().union(*map(set, plans["pages"][mine]))
            runs = np.array_split(np.arange(plans["exists"][mine][0]), n)
            counts = [len(union & {*r.tolist()}) for r in runs]
            assert uneven[head, step] == pytest.approx(max(counts) / np.mean(counts))
    assert (uneven > 1).any()
    every = run(source, "quest(read=pages(99), page=4, shards=shards(4))")["ledger"]["page_imbalance"]
    assert every.min() >= 1
    assert every.max() <= 1.25  # 16 or 17 pages for 4 shards
    assert "page_imbalance" not in run(source, "quest(read=pages(4), page=4)")["ledger"]


@pytest.mark.parametrize("keep", ["", "h2o(hold=tokens(24)) >> "])
def test_more_shards_than_pages_are_refused(keep):
    source = lane(prompt=30, steps=4)
    run(source, f"{keep}quest(read=pages(2), page=8, shards=shards(3))")
    with pytest.raises(
        WrongUse, match=r'quest\(shards=shards\(9, budget="global"\)\): request 7, layer 3, step 0 has [34] pages of 8 tokens'
    ):
        run(source, f"{keep}quest(read=pages(2), page=8, shards=shards(9))")


def test_shards_that_rank_together_read_what_one_device_does_and_tell_their_best():
    source = lane(prompt=60, steps=6, group=2, value_dim=6)
    one, four = (run(source, f"quest(read=pages(3), page=4{more})") for more in ("", ", shards=shards(4)"))
    for column in set(one["heads"]) - {"_pages"}:
        assert np.array_equal(one["heads"][column], four["heads"][column], equal_nan=True), column
    merge = 4 * 2 * (6 + 2) * 4  # four shards, two query heads, an output of 6 with its maximum and sum
    assert (four["ledger"]["collective_bytes"] == merge + 4 * 2 * 3 * 8).all()  # 3 scores and pages of 4 shards, 2 heads
    joint = run(source, 'quest(read=pages(3), page=4, heads="max", shards=shards(4))')["ledger"]
    assert (joint["collective_bytes"] == merge + 4 * 3 * 8).all()
    for other in ("split", "each"):
        assert (
            run(source, f'quest(read=pages(3), page=4, shards=shards(4, budget="{other}"))')["ledger"]["collective_bytes"]
            == merge
        ).all()
    assert "collective_bytes" not in one["ledger"]


def test_no_scores_are_told_where_nothing_is_ranked():
    source = lane(prompt=21, steps=8, group=2, value_dim=4)
    ledger = run(source, "quest(read=pages(3), page=4, refresh=4, shards=shards(2))")["ledger"]
    told = by_step(ledger, "collective_bytes")
    merge = 2 * 2 * 6 * 4
    assert (told[:, [0, 4]] > merge).all()
    assert (told[:, [1, 2, 3, 5, 6, 7]] == merge).all()
    assert (run(source, "quest(read=pages(99), page=4, shards=shards(2))")["ledger"]["collective_bytes"] == merge).all()


def test_every_shard_its_own_budget_reads_more():
    source = lane(prompt=60, steps=6)
    pages = {
        b: run(source, f'quest(read=pages(4), page=4, shards=shards(4, budget="{b}"))')["heads"]["read_pages"]
        for b in ("global", "split", "each")
    }
    assert (pages["global"] == 4).all()
    assert (pages["split"] == 4).all()
    assert (pages["each"] >= 13).all()


def test_shards_behind_a_keep_that_watches():
    source = lane(prompt=40, steps=6)
    ledger = run(source, "h2o(hold=tokens(24)) >> quest(read=pages(2), page=4, shards=shards(2))")["ledger"]
    assert (ledger["collective_bytes"] > 2 * 2 * 6 * 4).all()


@pytest.mark.parametrize(("page", "tile", "rows"), [(12, 16, 16), (12, 4, 12), (16, 64, 64), (40, 16, 48), (4, 1, 4)])
def test_a_page_takes_whole_tiles_of_its_own(page, tile, rows):
    source = lane(prompt=100, steps=4)
    plain, tiled = (run(source, f"quest(read=pages(2), page={page}{more})")["ledger"] for more in ("", f", tile={tile}"))
    for column in ("page_bytes", "resident_page_bytes"):
        assert (tiled[column] * page == plain[column] * rows).all()
    for column in set(plain) - {"page_bytes", "resident_page_bytes", "_pages", "asked_unit"}:
        assert np.array_equal(plain[column], tiled[column]), column


def test_dense_layers_and_shared_pages_take_tiles_too():
    source = lane(prompt=100, steps=4)
    for allocator in ("head", "layer"):
        plain, tiled = (
            run(source, f"quest(read=pages(2), page=12, dense_layers=9{more})", allocator=allocator)["ledger"]
            for more in ("", ", tile=16")
        )
        assert (tiled["resident_page_bytes"] * 12 == plain["resident_page_bytes"] * 16).all()
        assert (tiled["page_bytes"] * 12 == plain["page_bytes"] * 16).all()
