"""How sure a number is: resampling whole contexts, because the steps of one context are not independent."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

FEWEST = 8  # contexts below which no interval is given
DRAWS = 2_000


def contexts(heads: pl.LazyFrame) -> int:
    """The number of contexts (requests) in the run."""
    return int(heads.select(pl.col("request").n_unique()).collect().item())


def intervals(heads: pl.LazyFrame, seed: int = 0) -> pl.DataFrame:
    """heads -> policy, measure, low, high: 95 % percentile bootstrap over contexts of each ratio of sums; empty below 8 contexts.

    The same contexts are drawn for every policy, so intervals of two policies may be read side by side."""
    far = pl.col("far_recall").is_not_null()
    sides = {
        "far_recall": ((pl.col("far_recall") * pl.col("far_mass")), pl.when(far).then("far_mass")),
        "evidence_recall": (pl.col("evidence_read"), pl.when(pl.col("evidence_read").is_not_null()).then("evidence_dense")),
        "rel_l2": (pl.col("rel_l2"), pl.col("rel_l2").is_not_null()),
    }
    sums = (
        heads.group_by("policy", "request")
        .agg(x.cast(pl.Float64).sum().alias(f"{m}_{i}") for m, pair in sides.items() for i, x in enumerate(pair))
        .sort("policy", "request")
        .collect()
    )
    rows = []
    for (policy,), group in sums.group_by("policy", maintain_order=True):
        if group.height >= FEWEST:
            picks = np.random.default_rng(seed).multinomial(group.height, np.full(group.height, 1 / group.height), DRAWS)
            for measure in sides:
                low, high = _percentiles(picks @ group[f"{measure}_0"].to_numpy(), picks @ group[f"{measure}_1"].to_numpy())
                rows.append((policy, measure, low, high))
    return pl.DataFrame(rows, {"policy": pl.String, "measure": pl.String, "low": pl.Float64, "high": pl.Float64}, orient="row")


def _percentiles(top: NDArray[np.float64], below: NDArray[np.float64]) -> tuple[float | None, float | None]:
    told = below >= 1e-3
    if not told.any():
        return None, None
    low, high = np.percentile(top[told] / below[told], [2.5, 97.5])
    return float(low), float(high)
