"""How alike the pages are that different layers read at one step (card D12)."""

from __future__ import annotations

import polars as pl

DISTANCES = (1, 2, 4, 8)


def across_layers(plans: pl.LazyFrame) -> pl.DataFrame:
    """plans of a run -> policy, request, layer, distance, jaccard, chance: |A and B| / |A or B| of the pages that the heads of a layer,
    together, and those of the layer `distance` above read, meaned over steps. chance: what sets of these sizes drawn at random from the
    pages that exist would have. Pairs of layers that were not both captured are left out."""
    unit = ["policy", "request", "step", "page_size"]
    sets = (
        plans.explode("pages")
        .group_by(*unit, "layer")
        .agg(pl.col("pages").unique().sort(), reach=pl.col("pages").max() + 1)
        .with_columns(pl.col("policy").cast(pl.String), pl.col("layer").cast(pl.Int32))
    )
    pairs = []
    for distance in DISTANCES:
        above = sets.with_columns(layer=pl.col("layer") - distance)
        pairs.append(sets.join(above, on=[*unit, "layer"], suffix="_above").with_columns(distance=pl.lit(distance, pl.Int32)))
    both = pl.col("pages").list.set_intersection("pages_above").list.len().cast(pl.Float64)
    either = pl.col("pages").list.set_union("pages_above").list.len().cast(pl.Float64)
    here, there = (pl.col(c).list.len().cast(pl.Float64) for c in ("pages", "pages_above"))
    shared = here * there / pl.max_horizontal("reach", "reach_above")
    return (
        pl.concat(pairs)
        .with_columns(jaccard=both / either, chance=shared / (here + there - shared))
        .group_by("policy", "request", "layer", "distance")
        .agg(pl.col("jaccard").mean(), pl.col("chance").mean())
        .sort("policy", "request", "layer", "distance")
        .collect()
    )
