"""The noise floor of a run: how far the outputs that the capture recorded lie from dense attention, as the replay measured it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import polars as pl

SCHEMA = {"request": pl.Int32, "layer": pl.Int16, "median": pl.Float64, "p95": pl.Float64}


class Floor(NamedTuple):
    """Relative L2 distance: means over contexts and layers of the median and the p95 over steps and query heads."""

    median: float
    p95: float


def floors(about: Mapping[str, Any]) -> pl.DataFrame:
    """run.json -> request, layer, median, p95, sorted; empty when the trace recorded no outputs."""
    rows = [r for r in about.get("noise_floor") or [] if isinstance(r, dict) and SCHEMA.keys() <= r.keys()]
    return pl.DataFrame([{n: r[n] for n in SCHEMA} for r in rows], schema=SCHEMA).sort("request", "layer")


def floor(about: Mapping[str, Any]) -> Floor | None:
    """run.json -> the floor of the whole run."""
    found = floors(about)
    return Floor(*found.select(pl.col("median", "p95").mean()).row(0)) if found.height else None
