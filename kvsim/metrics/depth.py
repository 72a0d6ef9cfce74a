"""How deep a policy read: pages and rounds of each step and head, and what a stopping rule of its own came to."""

from __future__ import annotations

import polars as pl


def read_depth(heads: pl.LazyFrame, *by: str) -> pl.LazyFrame:
    """heads -> policy, `by`, and over the rows of each group: read_pages and rounds as NAME_mean, NAME_p95 (linear), NAME_max; certified, the
    share of rows whose proof was reached (null: no rule that proves); full_reads, the share that read every page there was (null in older
    runs, which do not count them). Only rows that read pages, without layers read whole by rule."""
    wanted = []
    for name in ("read_pages", "rounds"):
        x = pl.col(name).cast(pl.Float64)
        wanted += [
            x.mean().alias(f"{name}_mean"),
            x.quantile(0.95, "linear").alias(f"{name}_p95"),
            x.max().alias(f"{name}_max"),
        ]
    return (
        heads.filter(pl.col("read_pages").is_not_null() & ~pl.col("dense"))
        .group_by("policy", *by)
        .agg(
            *wanted,
            pl.col("certified").cast(pl.Float64).mean(),
            (pl.col("read_pages") == pl.col("held_pages")).cast(pl.Float64).mean().alias("full_reads"),
        )
    )
