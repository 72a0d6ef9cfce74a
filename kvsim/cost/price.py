"""Launches -> microseconds: each group by the fit that is closest to it, summed to a step with its interval and its worst grade.

A class without a fit of its own is priced as attention (start cost and bandwidth), else by the bandwidth of whole steps: transferred. The
rest of a step is what a step fit leaves at no bytes, a `rest` fit, or the weights over the peak."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from kvsim.cost.classfit import ClassFit
from kvsim.cost.launches import ON_HOST
from kvsim.cost.model import GRADES, TRANSFER, CostModel, floored, measured, transferred, unknown
from kvsim.errors import WrongUse

HEADS = ("q_heads", "kv_heads", "head_dim")
FROM_MEMORY = ("page_scan", "topk", "gather_attn", "summary_update", "dequant", "scores", "prefill_extra")  # priced as attention
GRADE = pl.Enum(GRADES)  # ordered, the worst last
US = ("us", "low_us", "high_us")


@dataclass(frozen=True)
class Prices:
    """A model and what to take from it. rest: the variant of `step` or `rest` (weight format, engine), None when there is but one;
    kernels: the variant of any other class; weights_bytes: what a step reads of the model itself, where no fit knows its rest."""

    model: CostModel
    heads: tuple[int, int, int]  # query heads, kv heads, head_dim
    rest: str | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    weights_bytes: int | None = None
    graph: str | None = None

    def fits(self, cls: str) -> list[ClassFit]:
        """Of a class, for these heads and this way to launch."""
        return [
            f
            for f in self.model.fits
            if f.key["class"] == cls
            and tuple(f.key[k] for k in HEADS) == self.heads
            and (self.graph is None or f.key["graph"] in (None, self.graph))
        ]

    def step_fit(self) -> ClassFit | None:
        """The fit of whole steps of the wanted variant."""
        return _one("step", [f for f in self.fits("step") if self.rest in (None, f.key["variant"])], "--variant")

    def fit_of(self, cls: str, kv_bits: int, page: int | None) -> tuple[ClassFit | None, bool]:
        """The fit that prices a class, and whether it is its own: same kernel class, dtype and page."""
        there = [f for f in self.fits(cls) if self.kernels.get(cls) in (None, f.key["variant"])]
        own = [f for f in there if f.key["kv_bits"] in (None, kv_bits) and f.key["page"] in (None, page)]
        if own or there:
            return _one(cls, own or there[:1], f"--kernel {cls}="), bool(own)
        if cls not in FROM_MEMORY:
            return None, False
        for other in ("gather_attn", "dense_attn"):
            if stand_in := [f for f in self.fits(other) if self.kernels.get(other) in (None, f.key["variant"])]:
                return max(stand_in, key=lambda f: f.key["kv_bits"] == kv_bits), False
        return None, False


def _one(cls: str, fits: list[ClassFit], option: str) -> ClassFit | None:
    names = sorted({f.key["variant"] for f in fits})
    if len(names) > 1:
        raise WrongUse(f"the model holds {len(names)} kinds of {cls} ({'; '.join(names)}): choose one with {option}{names[0]!r}")
    return fits[0] if fits else None


# ------------------------------------------------------------------------------------------------ parts
PARTS: dict[str, Any] = {"step": pl.Int64, "class": pl.String, "bytes": pl.Int64, "n": pl.Int64} | dict.fromkeys(US, pl.Float64)
PARTS |= {"grade": pl.String, "by": pl.String}


def parts(prices: Prices, launches: pl.DataFrame) -> pl.DataFrame:
    """Launches (launches.table) -> one row a step and class: bytes, n, us, low_us, high_us, grade, by (what priced it).

    us is null where nothing is known of the time, high_us where only a floor is."""
    whole = prices.step_fit()
    alone = pl.col("class").eq("dense_attn").all().over("step") & (pl.len().over("step") == 1)
    own_attention = prices.fits("dense_attn") != []
    groups = launches.with_columns(alone=alone if whole and not own_attention else pl.lit(False))
    found = []
    for (cls, bits, page, lone), rows in groups.group_by("class", "kv_bits", "page", "alone", maintain_order=True):
        answers, by = _priced(prices, whole, str(cls), int(bits or 16), page, bool(lone), rows)  # type: ignore[call-overload]
        table = rows.select("step", "class", "bytes", "n").with_columns(
            *(a.alias(name) for a, name in zip(answers, (*US, "grade"), strict=True)), by=pl.lit(by)
        )
        found.append(table.select(list(PARTS)))
    found.append(_rest(prices, whole, launches))
    return pl.concat(found).sort("step", maintain_order=True)


def _priced(
    prices: Prices, whole: ClassFit | None, cls: str, bits: int, page: Any, alone: bool, rows: pl.DataFrame
) -> tuple[list[pl.Series], str]:
    gpu = prices.model.gpu
    if alone and whole is not None:
        return _without_rest(whole, rows), _name(whole)
    fit, own = prices.fit_of(cls, bits, page)
    if fit is not None:
        answers = measured(fit, rows) if own else transferred(fit, rows)
        return floored(answers, rows, gpu), _name(fit)
    if whole is not None and cls in (*FROM_MEMORY, "dense_attn"):
        return _at_bandwidth(whole, rows), f"bandwidth of {_name(whole)}"
    answers = floored(unknown(rows), rows, gpu)
    return answers, "peak of the link" if answers[0].null_count() < rows.height else "nothing"


def _name(fit: ClassFit) -> str:
    return f"{fit.key['class']} {fit.key['variant']}".strip()


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


def _rest(prices: Prices, whole: ClassFit | None, launches: pl.DataFrame) -> pl.DataFrame:
    """One row a step: everything that is not about the KV cache."""
    steps = launches.group_by("step", maintain_order=True).agg(pl.col("batch").max())
    row: dict[str, Any] = {
        "class": "rest",
        "bytes": None,
        "n": 1,
        "us": None,
        "low_us": None,
        "high_us": None,
        "grade": "spec",
        "by": "nothing",
    }
    if whole is not None:
        us, (low, high) = whole.coefficients["launch"], whole.ci95["launch"]
        batches = 2 ** whole.grid.places[:, 0]
        inside = pl.col("batch").is_between(batches.min() - 0.5, batches.max() + 0.5)
        told = steps.with_columns(
            us=pl.lit(us),
            low_us=pl.when(inside).then(low).otherwise(us * (1 - TRANSFER)),
            high_us=pl.when(inside).then(high).otherwise(us * (1 + TRANSFER)),
            grade=pl.when(inside).then(pl.lit("calibrated")).otherwise(pl.lit("transferred")),
        )
        row = {k: row[k] for k in ("class", "bytes", "n")} | {"by": f"rest of {_name(whole)}"}
        return _columns(told, row)
    if found := _one("rest", [f for f in prices.fits("rest") if prices.rest in (None, f.key["variant"])], "--variant"):
        rows = steps.with_columns(
            n=pl.lit(1), layers=pl.lit(1), bytes=pl.lit(prices.weights_bytes), context=None, pages=None, cache=pl.lit("cold")
        )
        answers = measured(found, rows.with_columns(kv_heads=pl.lit(prices.heads[1])))
        return _columns(
            steps.with_columns(a.alias(n) for a, n in zip(answers, (*US, "grade"), strict=True)), row | {"by": _name(found)}
        )
    if prices.weights_bytes and prices.model.gpu:
        us = prices.weights_bytes / (prices.model.gpu.bandwidth_gbps * 1e3)
        row |= {"bytes": prices.weights_bytes, "us": us, "low_us": us, "by": "weights over the peak"}
    return _columns(steps, row)


def _columns(steps: pl.DataFrame, row: Mapping[str, Any]) -> pl.DataFrame:
    return (
        steps.with_columns(pl.lit(x, PARTS[k]).alias(k) for k, x in row.items() if k not in steps.columns)
        .select(list(PARTS))
        .cast(PARTS)
    )


# ------------------------------------------------------------------------------------------------ steps
def steps(found: pl.DataFrame) -> pl.DataFrame:
    """parts -> one row a step: step_us, low_us, high_us, overlap_us, grade, binding (the class that takes most), unknown.

    step_us takes fetches one after the other with the rest; overlap_us hides them behind it: max(0, fetch - window), the window being
    everything else. low_us is of the overlapped step. unknown: classes without a time, so that step_us is a floor."""
    fetch = pl.col("class").is_in(ON_HOST)
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
    return out.with_columns(grade=pl.col("rank").replace_strict(dict(enumerate(GRADES)), return_dtype=pl.String)).drop("rank")


def seconds(us: float) -> str:
    """1234.5 -> "1.23 ms": three digits."""
    if not us or not math.isfinite(us):
        return "0 µs" if us == 0 else "?"
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"
