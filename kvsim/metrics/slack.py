"""How loose an index is, by whatever it may depend on: key age, page size, layer, head, role, head dim."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

EVERY_ROLE = -1


def slack_by(tables: Iterable[pl.LazyFrame], *by: str) -> pl.DataFrame:
    """The tables `slack` of one or several runs -> a row per value of `by` (policy, page_size, key_dim, key_age, layer, q_head, role …):
    pages, slack_mean (over pages), slack_max, in scaled logits; sorted. Runs of several page sizes are joined by giving all of them.

    A bucket in which a summary is unbounded has no mean and counts in `pages` alone."""
    whole = pl.concat(list(tables))
    rows = whole.filter((pl.col("role") == EVERY_ROLE) != pl.lit("role" in by))
    mean, pages = pl.col("slack_mean").cast(pl.Float64), pl.col("pages").cast(pl.Float64)
    known = mean.is_finite()
    return (
        rows.group_by(by)
        .agg(
            pl.col("pages").sum(),
            slack_mean=pl.when(known.any()).then((mean * pages).filter(known).sum() / pages.filter(known).sum()),
            slack_max=pl.col("slack_max").cast(pl.Float64).max(),
        )
        .sort(by)
        .collect()
    )
