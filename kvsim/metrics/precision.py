"""How many bits a coded number takes in memory, beside those it is spoken of with: from `ledger`, ratios of sums."""

from __future__ import annotations

import polars as pl

KINDS = {"nominal": "the codes alone", "real": "with scales, zeros, outliers and padding"}  # in the order they stand on the chart


def precision(ledger: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, nominal, real: bits per number held in codes, over layers, kv heads and steps; overhead: real / nominal - 1. Only policies
    that code; sorted. A run whose ledger does not have the columns has no rows."""
    numbers = pl.col("coded_numbers").sum()
    return (
        ledger.filter(pl.col("coded_numbers") > 0)
        .group_by("policy")
        .agg(
            (pl.col("coded_nominal_bits").sum() / numbers).alias("nominal"),
            (8 * pl.col("coded_bytes").sum() / numbers).alias("real"),
        )
        .with_columns(overhead=pl.col("real") / pl.col("nominal") - 1)
        .sort("policy")
        .collect()
    )
