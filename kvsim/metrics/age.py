"""What a set of pages is worth as it grows old: reads that rank only now and then."""

from __future__ import annotations

import polars as pl

from kvsim.metrics.quality import quality


def by_age(heads: pl.LazyFrame, together: int = 1) -> pl.DataFrame:
    """heads of a run -> policy, role, age, mass_recall, evidence_recall (ratio of sums), rel_l2, rows; sorted; policies that rank at every
    step have no rows. age: steps since the ranking, each that of the first of `together` steps."""
    aged = heads.filter(pl.col("set_age").is_not_null()).with_columns(age=pl.col("set_age") // together * together)
    return quality(aged, "role", "age").select("policy", "role", "age", "mass_recall", "evidence_recall", "rel_l2", "rows")
