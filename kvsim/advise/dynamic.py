"""A depth that every query chooses against one that is fixed, at equal mean pages: what the worst steps get, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.metrics.interval import DRAWS, FEWEST
from kvsim.metrics.run import RunTables

Floats = NDArray[np.float64]
Interval = tuple[float, float]

WITHIN = 0.03  # half the width of an interval that is asked for


@dataclass(frozen=True)
class Dynamic:
    """Means over contexts of what each one has over its layers, query heads and steps.

    recall_p5: 5th percentile of mass_recall; fixed_p5: of fixed depths, linear between them, at the context's own mean pages; gain: their
    difference. gain_by_head: the same difference taken in every (layer, query head) at its own mean pages, then averaged: what is left when
    fixed depths may differ by head. Intervals are 95 % bootstraps over contexts, None for fewer than 8; needed: contexts for gain within
    0.03, None for one."""

    contexts: int
    pages: float
    pages_p99: float
    recall_p5: float
    fixed_p5: float
    gain: float
    gain_by_head: float
    interval: Interval | None
    by_head_interval: Interval | None
    p99_interval: Interval | None
    needed: int | None


def against_fixed(runs: Sequence[RunTables], dynamic: str, fixed: Mapping[int, str]) -> Dynamic:
    """dynamic: the id of a policy; fixed: pages -> ids. Raises KeyError when a run has not got one of them."""
    whole, by_head = (
        pl.concat([_compared(run, dynamic, fixed, by) for run in runs]) for by in (["request"], ["request", "layer", "q_head"])
    )
    own = by_head.group_by("context", maintain_order=True).agg(pl.col("gain").mean())["gain"].to_numpy()
    gain, p99 = whole["gain"].to_numpy(), whole["p99"].to_numpy()
    sure = len(gain) >= FEWEST
    return Dynamic(
        contexts=len(gain),
        pages=float(whole["mean"].to_numpy().mean()),
        pages_p99=float(p99.mean()),
        recall_p5=float(whole["p5"].to_numpy().mean()),
        fixed_p5=float((whole["p5"] - whole["gain"]).to_numpy().mean()),
        gain=float(gain.mean()),
        gain_by_head=float(own.mean()),
        interval=_interval(gain) if sure else None,
        by_head_interval=_interval(own) if sure else None,
        p99_interval=_interval(p99) if sure else None,
        needed=int(np.ceil((1.96 * gain.std(ddof=1) / WITHIN) ** 2)) if len(gain) > 1 else None,
    )


def _compared(run: RunTables, dynamic: str, fixed: Mapping[int, str], by: list[str]) -> pl.DataFrame:
    """context, mean, p99, p5, gain of every part of the run: contexts, or heads of contexts."""
    found = (
        run.heads.group_by(*by, "policy")
        .agg(
            mean=pl.col("read_pages").mean(),
            p99=pl.col("read_pages").cast(pl.Float64).quantile(0.99, "linear"),
            p5=pl.col("mass_recall").cast(pl.Float64).quantile(0.05, "linear"),
        )
        .sort(*by)
        .collect()
    )
    rows = []
    for at, part in found.group_by(by, maintain_order=True):
        told = {r["policy"]: r for r in part.iter_rows(named=True)}
        mine, steps = told[dynamic], sorted((told[name]["mean"], told[name]["p5"]) for name in fixed.values())
        same = np.interp(mine["mean"], [x for x, _ in steps], [y for _, y in steps])
        rows.append((f"{run.path}/{at[0]}", mine["mean"], mine["p99"], mine["p5"], mine["p5"] - float(same)))
    return pl.DataFrame(rows, ["context", "mean", "p99", "p5", "gain"], orient="row")


def _interval(x: Floats) -> Interval:
    picks = np.random.default_rng(0).integers(0, len(x), (DRAWS, len(x)))
    low, high = np.percentile(x[picks].mean(1), [2.5, 97.5])
    return float(low), float(high)
