"""Slack by what it depends on, joined over runs, against sums in plain Python."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvsim.metrics.slack import slack_by
from tests.engine.lanes import lane, run


def frame(rows):
    columns = ("policy", "layer", "q_head", "role", "page_size", "key_dim", "key_age", "pages", "slack_mean", "slack_max")
    return pl.DataFrame(rows, schema=list(columns), orient="row").lazy()


ONE = frame(
    [
        ("a", 0, 0, -1, 4, 8, 0, 10, 1.0, 2.0),
        ("a", 0, 1, -1, 4, 8, 0, 30, 3.0, 9.0),
        ("a", 0, 0, 3, 4, 8, 0, 10, 5.0, 5.0),
        ("a", 1, 0, -1, 4, 8, 2, 4, None, None),
    ]
)
OTHER = frame([("b", 0, 0, -1, 16, 8, 0, 5, 7.0, 8.0)])


def test_means_weigh_by_pages_and_runs_of_several_page_sizes_are_joined():
    assert slack_by([ONE, OTHER], "page_size").rows() == [(4, 44, 2.5, 9.0), (16, 5, 7.0, 8.0)]
    assert slack_by([ONE], "key_age").rows()[0] == (0, 40, 2.5, 9.0)
    unbounded = slack_by([ONE], "layer").filter(pl.col("layer") == 1)
    assert unbounded["pages"].item() == 4
    assert unbounded["slack_mean"].item() is None


def test_roles_are_told_apart_only_when_asked_for():
    assert slack_by([ONE], "role").rows() == [(3, 10, 5.0, 5.0)]


@pytest.mark.parametrize("page", [4, 8])
def test_it_is_the_mean_slack_of_heads(page):
    """The same pages, counted by age or by step."""
    got = run(lane(prompt=50, steps=10), f"quest(read=pages(2), page={page})", explain=True)
    table = pl.DataFrame(got["slack"]).with_columns(policy=pl.lit("p"), layer=0).lazy()
    [(_, pages, mean, most)] = slack_by([table], "page_size").rows()
    count = -(-(50 + got["heads"]["step"] + 1) // page)
    assert pages == count.sum()
    assert mean == pytest.approx(np.average(got["heads"]["slack_mean"], weights=count), rel=1e-5)
    assert most == pytest.approx(got["heads"]["slack_max"].max(), rel=1e-5)
