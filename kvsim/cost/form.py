"""The functional form: what time a launch group takes, a sum of terms with coefficients of 0 or more.

    t = n·t0 + bytes/BW  [+ L2 region] [+ per sequence] [+ per page] [+ longest request]

Source: cost study, section 3, with the longest request as a term of its own instead of inside a maximum: the form stays linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

Array = npt.NDArray[np.float64]

BASE = ("launch", "bytes")
EXTRA = ("l2", "sequence", "page", "longest")
UNITS = {
    "launch": "µs per launch",
    "bytes": "µs per MB from memory",
    "l2": "µs per MB from L2",
    "sequence": "µs per request and layer",
    "page": "µs per page and layer",
    "longest": "µs per MB that one request and kv head reads",
}


def usable(samples: pl.DataFrame, l2_bytes: int | None) -> list[str]:
    """The extra terms whose columns are filled in."""
    needs = {"sequence": ("batch",), "page": ("pages",), "longest": ("batch", "kv_heads")}
    there = [term for term, columns in needs.items() if all(samples[c].null_count() == 0 for c in columns)]
    return (["l2"] if l2_bytes else []) + there


def features(samples: pl.DataFrame, terms: tuple[str, ...], l2_bytes: int | None) -> Array:
    """What each term counts in each row, f64[rows, terms]; without a byte column there is no bandwidth to fit (a `step` of fixed work)."""
    layers = samples["layers"].to_numpy().astype(float)
    mb = samples["bytes"].fill_null(0).to_numpy().astype(float) / 1e6
    cached = found_in_l2(samples, l2_bytes) if "l2" in terms else np.zeros(len(mb))
    columns: dict[str, Callable[[], Any]] = {
        "launch": lambda: samples["n"].to_numpy().astype(float),
        "bytes": lambda: mb * (1 - cached),
        "l2": lambda: mb * cached,
        "sequence": lambda: samples["batch"].to_numpy() * layers,
        "page": lambda: samples["pages"].to_numpy() * layers,
        "longest": lambda: mb / np.maximum(samples["batch"].to_numpy() * samples["kv_heads"].to_numpy(), 1),
    }
    return np.stack([columns[term]() for term in terms], axis=1)


def found_in_l2(samples: pl.DataFrame, l2_bytes: int | None) -> Array:
    """The share of each row's bytes that comes from L2; nothing of a row whose cache was cold."""
    layer = samples["bytes"].fill_null(0).to_numpy() / samples["layers"].to_numpy()
    return np.where((samples["cache"] == "cold").to_numpy(), 0.0, hot_share(layer, l2_bytes))


def hot_share(layer_bytes: Array, l2_bytes: int | None) -> Array:
    """The share of bytes that a repeated measurement finds in L2: all up to its size, none from 1.25 times it, linear between.

    What is read in a circle through a cache a little too small is gone before its turn comes; an L40S shows it at 1.4 times."""
    return np.clip(5 - 4 * layer_bytes / l2_bytes, 0, 1) if l2_bytes else np.zeros(len(layer_bytes))


def place(samples: pl.DataFrame) -> Array:
    """Where a shape is, f64[rows, 2]: log2 of the batch, and of what grows: pages, else context, else bytes."""
    size = samples.select(pl.coalesce("pages", "context", "bytes", pl.lit(1))).to_series().to_numpy()
    return np.log2(np.stack([np.maximum(samples["batch"].fill_null(1).to_numpy(), 1), np.maximum(size, 1)], axis=1).astype(float))
