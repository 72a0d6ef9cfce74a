"""How much faster one step is than another, with an interval in which errors they share cancel.

Coefficients are those of the same resample on both sides. A time taken over from another kernel may be 40 % off, and then is so on both sides
where both took it from the same fit. What a fit misses at a shape (its spread) is the shape's own."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from kvsim.cost.classfit import ClassFit
from kvsim.cost.form import features
from kvsim.cost.model import TRANSFER
from kvsim.cost.price import grouped, parts
from kvsim.cost.prices import BANDWIDTH, WHOLE, Prices

Array = npt.NDArray[np.float64]
CORNERS = 4  # fits that may be off together or apart


def speedups(prices: Prices, launches: pl.DataFrame, pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """(baseline, policy) steps of one launches table -> {speedup, low, high} each; low and high null where a side is a floor."""
    found = parts(prices, launches)
    drawn = found["us"].fill_null(0.0).to_numpy() * _drawn(prices, launches, found)
    stretch = max((f.stretch() for f in prices.model.fits), default=1.96)
    return [_pair(found, drawn, stretch, base, policy) for base, policy in pairs]


def _drawn(prices: Prices, launches: pl.DataFrame, found: pl.DataFrame) -> Array:
    """f64[draws, rows of `found`]: what a resample of the model's shapes makes of each row's time, as a factor."""
    count = min((len(f.draws) for f in prices.model.fits if len(f.draws)), default=0)
    at, factors = [], []
    for (cls, bits, page, alone), rows in grouped(launches):
        how, fit = prices.source(cls, bits, page, alone)
        us = found.filter(pl.col("class").eq(cls) & pl.col("step").is_in(rows["step"].implode()))["us"].to_numpy()
        at.append(rows["step"].to_numpy())
        factors.append(_factors(how, fit, rows, us, count))
    rests = found.filter(pl.col("class") == "rest")
    at.append(rests["step"].to_numpy())
    factors.append(np.repeat(_of_rest(prices, count)[:, None], rests.height, axis=1))
    return np.concatenate(factors, axis=1)[:, np.argsort(np.concatenate(at), kind="stable")]  # parts are in this order


def _factors(how: str, fit: ClassFit | None, rows: pl.DataFrame, us: Array, count: int) -> Array:
    """f64[draws, rows] of one group. us: what attention takes of steps that do nothing else with the cache, for WHOLE."""
    if fit is None or not count or len(fit.draws) < count:
        return np.ones((count, rows.height))
    coefficients, draws = np.array(list(fit.coefficients.values())), fit.draws[:count]
    names = list(fit.coefficients)
    if how == BANDWIDTH:
        i = names.index("bytes")
        return np.repeat(draws[:, i : i + 1] / coefficients[i], rows.height, axis=1)
    x = features(rows.with_columns(n=pl.lit(1, pl.Int64)) if how == WHOLE else rows, tuple(names), fit.l2_bytes)
    form, forms = np.maximum(x @ coefficients, 1e-3), np.maximum(draws @ x.T, 1e-3)
    if how != WHOLE:
        return forms / form
    rest, rests = coefficients[names.index("launch")], draws[:, [names.index("launch")]]
    missed = (us + rest) / form  # the step as it was measured, over the form
    return np.maximum(forms * missed - rests, 0) / np.maximum(us, 1e-9)


def _of_rest(prices: Prices, count: int) -> Array:
    """f64[draws] of the rest of a step; a `rest` fit is told by its launch term, the only one that all of them have."""
    fit = prices.one("step") or prices.one("rest")
    if fit is None or not count or len(fit.draws) < count or not fit.coefficients["launch"]:
        return np.ones(count)
    return fit.draws[:count, list(fit.coefficients).index("launch")] / fit.coefficients["launch"]


def _pair(found: pl.DataFrame, drawn: Array, stretch: float, base: int, policy: int) -> dict[str, Any]:
    rows = found.select("step", "class", "us", "low_us", "high_us", "grade", "by").with_row_index("row")
    sides = [rows.filter(step=s) for s in (base, policy)]
    us = [side["us"].fill_null(0.0).to_numpy() for side in sides]
    point = float(us[0].sum() / us[1].sum()) if us[1].sum() else None
    if any(side["high_us"].null_count() for side in sides):
        return {"speedup": point, "low": None, "high": None}
    logs = np.log(np.divide(*(drawn[:, side["row"].to_numpy()].sum(1) for side in sides)))
    errors = [stretch * float(np.std(logs)) if len(logs) else 0.0] + [_own_error(side, len(logs) > 0) for side in sides]
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
