"""The role of the query's token (question, forced answer, free answer): numbers of different roles are never averaged unseen."""

from __future__ import annotations

import polars as pl

ALL_STEPS = -1  # the role that stands for every decode step


def by_role(frame: pl.LazyFrame, heads: pl.LazyFrame) -> pl.LazyFrame:
    """Rows (request, step, ...) with the role that heads give their step; and all of them once more as ALL_STEPS."""
    roles = heads.select("request", "step", "role").unique()
    each = frame.drop("role", strict=False).join(roles, on=["request", "step"], how="inner", maintain_order="left")
    return pl.concat([each, each.with_columns(role=pl.lit(ALL_STEPS, pl.Int8))])
