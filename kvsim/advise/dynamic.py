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

WITHIN = 0.03  # half the width of an interval that is asked for


@dataclass(frozen=True)
class Dynamic:
    """Means over contexts of what each one has over its layers, query heads and steps.

    recall_p5: 5th percentile of mass_recall; fixed_p5: of fixed depths, linear between them, at the context's own mean pages; gain: their
    difference. Intervals are 95 % bootstraps over contexts, None for fewer than 8; needed: contexts for gain within 0.03, None for one."""

    contexts: int
    pages: float
    pages_p99: float
    recall_p5: float
    fixed_p5: float
    gain: float
    interval: tuple[float, float] | None
    p99_interval: tuple[float, float] | None
    needed: int | None


def against_fixed(runs: Sequence[RunTables], dynamic: str, fixed: Mapping[int, str]) -> Dynamic:
    """dynamic: the id of a policy; fixed: pages -> ids. Raises KeyError when a run has not got one of them."""
    rows = np.array([row for run in runs for row in _contexts(run, dynamic, fixed)])
    mean, p99, p5, same = rows.T
    gain = p5 - same
    sure = len(rows) >= FEWEST
    return Dynamic(
        len(rows),
        *(float(x.mean()) for x in (mean, p99, p5, same, gain)),
        _interval(gain) if sure else None,
        _interval(p99) if sure else None,
        int(np.ceil((1.96 * gain.std(ddof=1) / WITHIN) ** 2)) if len(rows) > 1 else None,
    )


def _contexts(run: RunTables, dynamic: str, fixed: Mapping[int, str]) -> list[tuple[float, ...]]:
    found = (
        run.heads.group_by("request", "policy")
        .agg(
            mean=pl.col("read_pages").mean(),
            p99=pl.col("read_pages").cast(pl.Float64).quantile(0.99, "linear"),
            p5=pl.col("mass_recall").cast(pl.Float64).quantile(0.05, "linear"),
        )
        .collect()
    )
    told = {(r["request"], r["policy"]): r for r in found.iter_rows(named=True)}
    out = []
    for request in sorted(found["request"].unique()):
        mine = told[request, dynamic]
        steps = sorted((told[request, name]["mean"], told[request, name]["p5"]) for name in fixed.values())
        same = np.interp(mine["mean"], [x for x, _ in steps], [y for _, y in steps])
        out.append((mine["mean"], mine["p99"], mine["p5"], float(same)))
    return out


def _interval(x: Floats) -> tuple[float, float]:
    picks = np.random.default_rng(0).integers(0, len(x), (DRAWS, len(x)))
    low, high = np.percentile(x[picks].mean(1), [2.5, 97.5])
    return float(low), float(high)
