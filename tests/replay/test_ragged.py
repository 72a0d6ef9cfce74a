"""run.json says of each policy whether its shapes vary from step to step, and the tables agree."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.errors import WrongUse
from kvsim.policies.language import per_layer
from kvsim.replay.run import replay

REGULAR = (
    "quest(read=pages(2), page=8)",
    "quest(read=share(0.4), page=8, heads='split')",
    "quest(read=pages(3), page=8, heads='max')",
    "quest(read=pages(3), page=8, shards=shards(2, budget='each'))",
    "oracle(read=pages(2), page=8)",
)
RAGGED = (
    "quest(read=exact(r=4), page=8)",
    "quest(read=mass(eps=0.2), page=8)",
    "quest(read=top_p(p=0.7), page=8)",
    "quest(read=gap(min=0.5, floor=pages(1), cap=pages(6)), page=8)",
    "quest(read=pages(2), page=8, heads='share')",
)


@pytest.fixture(scope="module")
def ragged_run(trace, tmp_path_factory):
    return replay(trace, REGULAR + RAGGED, tmp_path_factory.mktemp("ragged") / "run", workers=1)


def test_what_run_json_says(ragged_run):
    assert [p["ragged"] for p in ragged_run.info["policies"]] == [False] * len(REGULAR) + [True] * len(RAGGED)


def test_a_policy_is_ragged_where_reads_of_one_step_differ(ragged_run):
    """What sees as many tokens reads as many pages, unless it is ragged."""
    sizes = ragged_run.heads.group_by("policy", "request", "layer", "step").agg(pl.col("read_pages").n_unique())
    differs = dict(sizes.group_by("policy").agg((pl.col("read_pages") > 1).any()).iter_rows())
    assert differs == {p["id"]: p["ragged"] for p in ragged_run.info["policies"]}


def test_a_policy_file_is_ragged_where_one_of_its_chains_is(trace, tmp_path):
    mixed = per_layer({1: RAGGED[0]}, default=REGULAR[0])
    run = replay(trace, mixed, tmp_path / "run", workers=1)
    assert [p["ragged"] for p in run.info["policies"]] == [True]


def test_more_shards_than_pages_stop_a_replay_as_wrong_use(trace, tmp_path):
    with pytest.raises(WrongUse, match="pages of 8 tokens to deal out, expected a page for every shard"):
        replay(trace, "quest(read=pages(2), page=8, shards=shards(50))", tmp_path / "run", workers=1)
