"""Launches -> microseconds: each group by the fit that is closest to it, summed to a step with its interval and its worst grade.

The rest of a step is what a step fit leaves at no bytes, a `rest` fit, or the weights over the peak."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from kvsim.cost.classfit import ClassFit
from kvsim.cost.launches import FETCHES, MOVES
from kvsim.cost.model import GRADES, TRANSFER, floored, measured, transferred, unknown
from kvsim.cost.overlap import next_layer
from kvsim.cost.prices import BANDWIDTH, NONE, OWN, TAKEN, WHOLE, Prices

US = ("us", "low_us", "high_us")
PARTS: dict[str, Any] = {"step": pl.Int64, "class": pl.String, "bytes": pl.Int64, "n": pl.Int64} | dict.fromkeys(US, pl.Float64)
PARTS |= {"grade": pl.String, "by": pl.String}


def parts(prices: Prices, launches: pl.DataFrame) -> pl.DataFrame:
    """Launches (launches.table) -> one row a step and group, and one for the rest of the step: bytes, n, us, low_us, high_us, grade, by.

    us is null where nothing is known of the time, high_us where only a floor is. by: what priced it."""
    found = []
    for (cls, bits, page, alone), rows in grouped(launches):
        how, fit = prices.source(cls, bits, page, alone)
        answers = _answers(prices, how, fit, rows)
        table = rows.select("step", "class", "bytes", "n").with_columns(
            *(a.alias(name) for a, name in zip(answers, (*US, "grade"), strict=True)), by=pl.lit(named(how, fit, answers[0]))
        )
        found.append(table.select(list(PARTS)))
    found.append(_rest(prices, launches))
    return pl.concat(found).sort("step", maintain_order=True)


def grouped(launches: pl.DataFrame) -> list[tuple[tuple[str, int, int | None, bool], pl.DataFrame]]:
    """((class, kv_bits, page, alone), rows): what one fit prices. alone: dense attention, and nothing else of the step is about the cache."""
    alone = pl.col("class").eq("dense_attn").all().over("step") & (pl.len().over("step") == 1)
    moves = pl.col("class").is_in(MOVES)
    sized = (pl.when(~moves).then(pl.col(c)).alias(c) for c in ("batch", "context", "pages"))
    groups = launches.with_columns(*sized, alone=alone).group_by("class", "kv_bits", "page", "alone", maintain_order=True)
    return [((str(k[0]), int(k[1]), k[2], bool(k[3])), rows) for k, rows in groups]


def named(how: str, fit: ClassFit | None, us: pl.Series | None = None) -> str:
    """What priced a group, in words."""
    if fit is None:
        return "nothing" if us is not None and us.null_count() == len(us) else "peak of the link"
    name = f"{fit.key['class']} {fit.key['variant']}".strip()
    return name if how == OWN else f"{how} {name}"


def _answers(prices: Prices, how: str, fit: ClassFit | None, rows: pl.DataFrame) -> list[pl.Series]:
    if fit is None or how == NONE:
        return floored(unknown(rows), rows, prices.model.gpu)
    if how in (OWN, TAKEN):
        return floored(measured(fit, rows) if how == OWN else transferred(fit, rows), rows, prices.model.gpu)
    assert how in (WHOLE, BANDWIDTH)
    return _without_rest(fit, rows) if how == WHOLE else _at_bandwidth(fit, rows)


def _without_rest(whole: ClassFit, rows: pl.DataFrame) -> list[pl.Series]:
    """What attention takes of a measured step: the step minus its rest; outside of what was measured the form, as of another kernel."""
    as_step = rows.with_columns(n=pl.lit(1, pl.Int64))
    t, low, high, grade = (np.array(x.to_list()) for x in measured(whole, as_step))
    rest, (low_rest, high_rest) = whole.coefficients["launch"], whole.ci95["launch"]
    far = grade == "spec"
    t = np.where(far, whole.formed(as_step), t) - rest
    low = np.where(far, t * (1 - TRANSFER), low - low_rest)
    high = np.where(far, t * (1 + TRANSFER), high - high_rest)
    grades = pl.Series(np.where(far, "transferred", grade).tolist())
    return [*(pl.Series(np.maximum(x, 0)) for x in (t, np.minimum(low, t), np.maximum(high, t))), grades]


def _at_bandwidth(whole: ClassFit, rows: pl.DataFrame) -> list[pl.Series]:
    t = rows["bytes"] * (whole.coefficients["bytes"] / 1e6)
    return [t, t * (1 - TRANSFER), t * (1 + TRANSFER), pl.Series(["transferred"] * rows.height)]


# ------------------------------------------------------------------------------------------------ the rest of a step
def _rest(prices: Prices, launches: pl.DataFrame) -> pl.DataFrame:
    """One row a step: everything that is not about the KV cache."""
    steps = launches.group_by("step", maintain_order=True).agg(pl.col("batch").max())
    if whole := prices.one("step"):
        t, (low, high) = max(whole.coefficients["launch"], 1e-3), whole.ci95["launch"]
        told, by = _by_batch(whole, steps, np.full(steps.height, t), low / t, high / t), f"rest of {named(OWN, whole)}"
    elif rest := prices.one("rest"):
        width = float(np.exp(rest.spread)) if np.isfinite(rest.spread) else 1 + TRANSFER
        told, by = _by_batch(rest, steps, _of_batches(rest, steps), 1 / width, width), named(OWN, rest)
    else:
        gpu, weights = prices.model.gpu, prices.weights_bytes
        floor = weights / (gpu.bandwidth_gbps * 1e3) if weights and gpu else None
        told = steps.with_columns(
            us=pl.lit(floor, pl.Float64), low_us=pl.lit(floor, pl.Float64), high_us=None, grade=pl.lit("spec")
        )
        by = "weights over the peak" if floor else "nothing"
    row = {"class": "rest", "bytes": prices.weights_bytes, "n": 1, "by": by}
    return told.with_columns(pl.lit(x, PARTS[k]).alias(k) for k, x in row.items()).select(
        pl.col(k).cast(t) for k, t in PARTS.items()
    )


def _by_batch(fit: ClassFit, steps: pl.DataFrame, t: Any, low: float, high: float) -> pl.DataFrame:
    """Calibrated at batches within the measured ones, taken over from the nearest otherwise."""
    batches, asked = fit.grid.places[:, 0], np.log2(steps["batch"].to_numpy())
    inside = (asked >= batches.min() - 1e-6) & (asked <= batches.max() + 1e-6)
    return steps.with_columns(
        us=pl.Series(t),
        low_us=pl.Series(t * np.where(inside, low, 1 - TRANSFER)),
        high_us=pl.Series(t * np.where(inside, high, 1 + TRANSFER)),
        grade=pl.Series(np.where(inside, "calibrated", "transferred").tolist()),
    )


def _of_batches(rest: ClassFit, steps: pl.DataFrame) -> Any:
    """What a rest fit says of batches: its form, and between measured batches what it missed there."""
    rows = steps.select("batch", n=1, layers=1, bytes=None, kv_heads=1, pages=None, cache=pl.lit("cold"))
    at, missed = rest.grid.places[:, 0], rest.grid.residuals
    known = np.unique(at)
    mean = np.array([missed[at == a].mean() for a in known])
    return rest.formed(rows) * np.exp(np.interp(np.log2(steps["batch"].to_numpy()), known, mean))


# ------------------------------------------------------------------------------------------------ steps
def steps(found: pl.DataFrame, layers: pl.DataFrame | None = None) -> pl.DataFrame:
    """parts -> one row a step: step_us, low_us, high_us, overlap_us, grade, binding (the class that takes most), unknown.

    step_us takes fetches one after the other with the rest; overlap_us hides them behind it: max(0, fetch - window), the window being
    everything else. low_us is of the overlapped step. unknown: classes without a time, so that step_us is a floor. layers (overlap.layers_of):
    step_us hides fetches behind the layer before, all layers taken to be alike."""
    fetch = pl.col("class").is_in(FETCHES)
    rank = pl.col("grade").replace_strict({g: i for i, g in enumerate(GRADES)}, return_dtype=pl.Int64)

    def hidden(column: str) -> pl.Expr:
        others, fetched = pl.col(column).filter(~fetch).sum(), pl.col(column).filter(fetch).sum()
        return others + (fetched - others).clip(0)

    out = found.group_by("step", maintain_order=True).agg(
        step_us=pl.col("us").sum(),
        overlap_us=hidden("us"),
        low_us=hidden("low_us"),
        high_us=pl.when(pl.col("high_us").null_count() == 0).then(pl.col("high_us").sum()),
        rank=rank.max(),
        binding=pl.col("class").sort_by(pl.col("us").fill_null(-1.0), descending=True, maintain_order=True).first(),
        unknown=pl.col("class").filter(pl.col("us").is_null()).unique(maintain_order=True),
    )
    if layers is not None:
        fetched = found.filter(fetch).group_by("step").agg(fetch_us=pl.col("us").sum())
        both = out.join(layers, on="step", how="left", maintain_order="left").join(
            fetched, on="step", how="left", maintain_order="left"
        )
        spent = pl.col("fetch_us").fill_null(0.0)
        out = both.with_columns(step_us=next_layer(spent, pl.col("step_us") - spent, pl.col("layers"))).drop("layers", "fetch_us")
    return out.with_columns(grade=pl.col("rank").replace_strict(dict(enumerate(GRADES)), return_dtype=pl.String)).drop("rank")
