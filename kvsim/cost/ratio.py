"""How much faster one step is than another, with an interval in which errors they share cancel.

Coefficients are those of the same resample on both sides. A time taken over from another kernel may be 40 % off, and then is so on both sides
where both took it from the same fit. What a fit misses at a shape (its spread) is the shape's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from kvsim.cost.model import TRANSFER
from kvsim.cost.price import parts
from kvsim.cost.prices import Prices

Array = npt.NDArray[np.float64]
MOST = 100  # resamples
CORNERS = 4  # fits that may be off together or apart


def speedups(prices: Prices, launches: pl.DataFrame, pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """(baseline, policy) steps of one launches table -> {speedup, low, high} each; low and high null where a side is a floor."""
    found = parts(prices, launches)
    drawn = list(_resampled(prices, launches, found))
    stretch = max((f.stretch() for f in prices.model.fits), default=1.96)
    return [_pair(found, drawn, stretch, base, policy) for base, policy in pairs]


def _resampled(prices: Prices, launches: pl.DataFrame, found: pl.DataFrame) -> Iterator[Array]:
    """us of every row of `found` under each resample of the model's shapes."""
    count = min((len(f.draws) for f in prices.model.fits if len(f.draws)), default=0)
    for i in range(min(count, MOST)):
        model = replace(prices.model, fits=[f.drawn(i) for f in prices.model.fits])
        yield parts(replace(prices, model=model), launches)["us"].fill_null(0.0).to_numpy()


def _pair(found: pl.DataFrame, drawn: list[Array], stretch: float, base: int, policy: int) -> dict[str, Any]:
    rows = found.select("step", "class", "us", "low_us", "high_us", "grade", "by").with_row_index("row")
    sides = [rows.filter(step=s) for s in (base, policy)]
    us = [side["us"].fill_null(0.0).to_numpy() for side in sides]
    point = float(us[0].sum() / us[1].sum()) if us[1].sum() else float("nan")
    if any(side["high_us"].null_count() for side in sides):
        return {"speedup": point, "low": None, "high": None}
    logs = [np.log(t[sides[0]["row"].to_numpy()].sum() / t[sides[1]["row"].to_numpy()].sum()) for t in drawn]
    errors = [stretch * float(np.std(logs)) if logs else 0.0] + [_own_error(side, drawn=bool(logs)) for side in sides]
    width = float(np.sqrt(np.square(errors).sum()))
    low, high = _corners(sides, us)
    return {"speedup": point, "low": low * math.exp(-width), "high": high * math.exp(width)}


def _own_error(side: pl.DataFrame, drawn: bool) -> float:
    """95 % half-width of log(step) from what the fits miss at its shapes, each by itself; what was drawn of the rest is not counted twice."""
    own = side.filter((pl.col("grade") != "transferred") & (pl.col("us") > 0) & ~(pl.lit(drawn) & pl.col("class").eq("rest")))
    share, missed = own["us"].to_numpy() / side["us"].sum(), np.log(own["high_us"].to_numpy() / own["us"].to_numpy())
    return float(np.sqrt(np.square(share * missed).sum()))


def _corners(sides: list[pl.DataFrame], us: list[Array]) -> tuple[float, float]:
    """The least and the largest ratio when each fit that was taken over is off by up to 40 %, wherever it is used."""
    taken = [[n if g == "transferred" else "" for n, g in side.select("by", "grade").iter_rows()] for side in sides]
    names = sorted({n for t in taken for n in t if n})
    together = {n: min(i, CORNERS - 1) for i, n in enumerate(names)}
    found = []
    for signs in product((1 - TRANSFER, 1 + TRANSFER), repeat=min(len(names), CORNERS)):
        off = [np.array([signs[together[n]] if n else 1.0 for n in t]) for t in taken]
        found.append(float((us[0] * off[0]).sum() / (us[1] * off[1]).sum()))
    return min(found), max(found)
