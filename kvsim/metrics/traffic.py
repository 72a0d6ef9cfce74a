"""What a policy holds and touches, from `ledger`: tokens asked and achieved, bytes as the engine billed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


# ---------------------------------------------------------------------------------------------- by class
STEP_CLASSES = {  # what one step moves, by what it is
    "K and V rows read": ("read_bytes", "host_read_bytes", "ssd_read_bytes"),
    "index scanned": ("index_bytes",),
    "scales and zeros read": ("meta_bytes",),
    "attention scores written and read": ("score_bytes",),
    "rows and index written or rebuilt": ("write_bytes", "rebuild_bytes"),
    "moved between tiers": ("moved_in_bytes", "moved_out_bytes", "collective_bytes"),
}
KEPT_CLASSES = {  # what stays in memory, by what it is
    "K and V rows": ("resident_bytes",),
    "index": ("index_resident_bytes",),
    "scales and zeros": ("meta_resident_bytes",),
    "copies on host or disk": ("host_resident_bytes", "ssd_resident_bytes"),
}


def by_class(ledger: pl.LazyFrame, classes: Mapping[str, Sequence[str]]) -> pl.DataFrame:
    """-> policy, part (one of `classes`), order, bytes: means per kv head and step, sorted by policy and order."""
    sums = [pl.sum_horizontal(names).cast(pl.Float64).mean().alias(part) for part, names in classes.items()]
    return (
        ledger.group_by("policy")
        .agg(sums)
        .unpivot(index="policy", variable_name="part", value_name="bytes")
        .with_columns(order=pl.col("part").replace_strict({n: i for i, n in enumerate(classes)}, return_dtype=pl.Int8))
        .sort("policy", "order")
        .collect()
    )


def whole(ledger: pl.LazyFrame, layers: pl.LazyFrame) -> float | None:
    """Bytes of the K and V rows that full attention holds, and reads, per kv head and step; None where row bytes are not known."""
    rows = ledger.select("policy", "layer", "visible_tokens").filter(pl.col("policy") == pl.col("policy").first())
    size = rows.join(layers, on="layer", how="left").select(pl.col("visible_tokens").cast(pl.Int64) * pl.col("row_bytes"))
    column = size.collect().to_series()
    return float(column.cast(pl.Float64).mean()) if len(column) and not column.null_count() else None  # type: ignore[arg-type]


def by_step(ledger: pl.LazyFrame, layers: pl.LazyFrame, together: int = 1) -> pl.DataFrame:
    """-> policy, step, bytes, share: what a step reads and writes per kv head, and as a part of what full attention reads; sorted."""
    moved = pl.sum_horizontal([n for names in STEP_CLASSES.values() for n in names])
    full = pl.col("visible_tokens").cast(pl.Int64) * pl.col("row_bytes")
    return (
        ledger.join(layers, on="layer", how="left", maintain_order="left")
        .group_by("policy", (pl.col("step") // together * together).alias("step"))
        .agg(moved.cast(pl.Float64).mean().alias("bytes"), _share(moved, full).alias("share"))
        .sort("policy", "step")
        .collect()
    )


def scattered(ledger: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, pages, runs (of neighbouring pages), per kv head and step; run_pages: pages a run; whole_pages: bytes of whole pages
    over bytes of the rows read. Only policies that read pages; sorted."""
    pages = pl.col("read_pages").cast(pl.Float64)
    return (
        ledger.filter(pl.col("read_pages").is_not_null())
        .group_by("policy")
        .agg(
            pages.mean().alias("pages"),
            pl.col("read_runs").cast(pl.Float64).mean().alias("runs"),
            (pages.sum() / pl.col("read_runs").sum()).alias("run_pages"),
            (pl.col("page_bytes").cast(pl.Float64).sum() / pl.col("read_bytes").sum()).alias("whole_pages"),
        )
        .sort("policy")
        .collect()
    )
