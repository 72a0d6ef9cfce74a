"""How alike the pages are that different layers read at one step (card D12)."""

from __future__ import annotations

import polars as pl

DISTANCES = (1, 2, 4, 8)
UNIT = ("policy", "request", "step", "page_size")


def across_layers(plans: pl.LazyFrame, heads: pl.LazyFrame) -> pl.LazyFrame:
    """plans and heads of a run -> policy, request, step, layer, distance, jaccard, chance, a row per step and pair of layers:
    |A and B| / |A or B| of the pages that the heads of a layer, together, and those of the layer `distance` above chose.

    Pages read by rule (sinks, recent, tail) are no choice and count on neither side; nor do layers that are read whole by rule. chance: what
    sets of these sizes drawn at random from the pages left would have; pages that exist are those of the head that has most. Left out: pairs
    of which a layer was not captured or neither chose a page, and plans of older runs that do not say what was forced."""
    whole = heads.filter("dense").select(pl.col("policy").cast(pl.String), "request", "layer").unique()
    sets = (
        plans.filter(pl.col("exists").is_not_null())
        .with_columns(pl.col("policy").cast(pl.String))
        .join(whole, on=["policy", "request", "layer"], how="anti")
        .group_by(*UNIT, "layer")
        .agg(pl.col("exists").max(), *(pl.col(c).explode().drop_nulls().unique() for c in ("pages", "forced")))
        .select(
            *UNIT,
            pl.col("layer").cast(pl.Int32),
            pl.col("pages").list.set_difference("forced"),
            among=pl.col("exists") - pl.col("forced").list.len().cast(pl.Int32),
        )
    )
    pairs = []
    for distance in DISTANCES:
        above = sets.with_columns(layer=pl.col("layer") - distance)
        pairs.append(sets.join(above, on=[*UNIT, "layer"], suffix="_above").with_columns(distance=pl.lit(distance, pl.Int32)))
    both = pl.col("pages").list.set_intersection("pages_above").list.len().cast(pl.Float64)
    either = pl.col("pages").list.set_union("pages_above").list.len().cast(pl.Float64)
    here, there = (pl.col(c).list.len().cast(pl.Float64) for c in ("pages", "pages_above"))
    shared = here * there / pl.max_horizontal("among", "among_above", here, there)
    return (
        pl.concat(pairs)
        .filter(either > 0)
        .select("policy", "request", "step", "layer", "distance", jaccard=both / either, chance=shared / (here + there - shared))
    )
