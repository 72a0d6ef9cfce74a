"""What a policy holds and touches, from `ledger`: tokens asked and achieved, bytes as the engine billed them."""

from __future__ import annotations

import polars as pl

ROWS = "read_bytes"
SIDE = ("index_bytes", "meta_bytes", "score_bytes", "host_read_bytes", "ssd_read_bytes")  # read beside the K and V rows
RESIDENT = ("resident_bytes", "index_resident_bytes", "meta_resident_bytes")  # on the device


def side_bytes() -> pl.Expr:
    """Bytes a step reads beside K and V rows: index, scales, scores, other tiers."""
    return pl.sum_horizontal(SIDE)


def traffic(ledger: pl.LazyFrame, layers: pl.LazyFrame) -> pl.DataFrame:
    """ledger, layers (layer, row_bytes) -> one row per policy, sorted; means over rows (kv head, decode step).

    visible_tokens, held_tokens, union_tokens (read by the group's query heads together) · row_bytes_read, side_bytes, touched_bytes
    (their sum), resident_bytes (index and metadata included) · read_share, resident_share: of what full attention reads and holds,
    ratios of sums; null without row_bytes."""
    whole = pl.col("visible_tokens").cast(pl.Int64) * pl.col("row_bytes")
    resident = pl.sum_horizontal(RESIDENT)
    return (
        ledger.join(layers, on="layer", how="left", maintain_order="left")
        .group_by("policy")
        .agg(
            *(pl.col(n).cast(pl.Float64).mean() for n in ("visible_tokens", "held_tokens")),
            pl.col("read_tokens").cast(pl.Float64).mean().alias("union_tokens"),
            pl.col(ROWS).cast(pl.Float64).mean().alias("row_bytes_read"),
            side_bytes().cast(pl.Float64).mean().alias("side_bytes"),
            (pl.col(ROWS) + side_bytes()).cast(pl.Float64).mean().alias("touched_bytes"),
            resident.cast(pl.Float64).mean().alias("resident_bytes"),
            _share(pl.col(ROWS) + side_bytes(), whole).alias("read_share"),
            _share(resident, whole).alias("resident_share"),
        )
        .sort("policy")
        .collect()
    )


def _share(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole.is_not_null().all() & (whole.sum() > 0)).then(part.sum() / whole.sum())


def asked(ledger: pl.LazyFrame, events: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, side ("hold" | "read"), unit, low, high: the budgets as they were stated; low and high differ where layers differ."""
    sides = [t.select("policy", "asked", "asked_unit", side=pl.lit(side)) for side, t in (("hold", events), ("read", ledger))]
    return (
        pl.concat(sides)
        .drop_nulls("asked")
        .group_by("policy", "side", pl.col("asked_unit").alias("unit"))
        .agg(pl.col("asked").min().alias("low"), pl.col("asked").max().alias("high"))
        .sort("policy", "side", "unit")
        .collect()
    )
