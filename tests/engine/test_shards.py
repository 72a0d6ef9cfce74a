"""Shards deal pages out in runs, each picks its own; tiles change what a page takes in memory, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.select import dealt, page_order, pick
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


# ------------------------------------------------------------------------------------------------ whole runs
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
