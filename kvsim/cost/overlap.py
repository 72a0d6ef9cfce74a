"""Fetches behind the compute of the layer before: what a selection that is known one layer ahead saves.

    none:        sum over layers of fetch + compute
    next_layer:  fetch of the first layer + sum of max(compute of a layer, fetch of the next) + compute of the last

Source: SparDA, arXiv 2606.04511: pages of a layer are chosen from the layer before, and fetched while it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

OVERLAPS = ("none", "next_layer")
ATTENDS = ("dense_attn", "gather_attn")


def step_time(fetch: Any, compute: Any, overlap: str = "none") -> float:
    """Time of a step whose layers fetch and then compute, [L] each, in any unit."""
    fetch, compute = np.asarray(fetch, float), np.asarray(compute, float)
    if overlap == "none":
        return float(fetch.sum() + compute.sum())
    return float(fetch[0] + np.maximum(compute[:-1], fetch[1:]).sum() + compute[-1])


def layers_of(launches: pl.DataFrame) -> pl.DataFrame:
    """step, layers: those that attend."""
    attending = launches.filter(pl.col("class").is_in(ATTENDS))
    return attending.group_by("step", maintain_order=True).agg(layers=pl.col("layers").sum())


def next_layer(fetch: pl.Expr, compute: pl.Expr, layers: pl.Expr) -> pl.Expr:
    """`step_time(..., "next_layer")` of layers that are all alike, from their sums."""
    return (fetch + (layers - 1) * pl.max_horizontal(fetch, compute) + compute) / layers
