"""How sure a number is: resampling whole contexts, because the steps of one context are not independent."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

FEWEST = 8  # contexts below which no interval is given
DRAWS = 2_000

# Measures of a policy, each one sum over another; a row without a value on either side counts on neither.
RATIOS = {
    "mass_recall": (pl.col("mass_recall"), pl.col("mass_recall").is_not_null()),
    "far_recall": (pl.col("far_recall") * pl.col("far_mass"), pl.when(pl.col("far_recall").is_not_null()).then("far_mass")),
    "evidence_recall": (pl.col("evidence_read"), pl.when(pl.col("evidence_read").is_not_null()).then("evidence_dense")),
    "rel_l2": (pl.col("rel_l2"), pl.col("rel_l2").is_not_null()),
}


def contexts(heads: pl.LazyFrame) -> int:
    """The number of contexts (requests) in the run."""
    return int(heads.select(pl.col("request").n_unique()).collect().item())


def sums(heads: pl.LazyFrame) -> pl.DataFrame:
    """heads -> policy, request, and of each of RATIOS its two sums over the rows of a context, NAME_0 over NAME_1; sorted."""
    parts = [x.cast(pl.Float64).sum().alias(f"{name}_{i}") for name, pair in RATIOS.items() for i, x in enumerate(pair)]
    return heads.group_by("policy", "request").agg(parts).sort("policy", "request").collect()


def picks(contexts: int, seed: int) -> NDArray[np.int64]:
    """i64[DRAWS, contexts]: how often each context is drawn."""
    return np.random.default_rng(seed).multinomial(contexts, np.full(contexts, 1 / contexts), DRAWS)


def intervals(heads: pl.LazyFrame, seed: int = 0) -> pl.DataFrame:
    """heads -> policy, measure, low, high: 95 % percentile bootstrap over contexts of each ratio of sums; empty below 8 contexts.

    The same contexts are drawn for every policy, so intervals of two policies may be read side by side."""
    rows = []
    for (policy,), group in sums(heads).group_by("policy", maintain_order=True):
        if group.height >= FEWEST:
            drawn = picks(group.height, seed)
            for measure in ("far_recall", "evidence_recall", "rel_l2"):
                low, high = _percentiles(drawn @ group[f"{measure}_0"].to_numpy(), drawn @ group[f"{measure}_1"].to_numpy())
                rows.append((policy, measure, low, high))
    return pl.DataFrame(rows, {"policy": pl.String, "measure": pl.String, "low": pl.Float64, "high": pl.Float64}, orient="row")


def _percentiles(top: NDArray[np.float64], below: NDArray[np.float64]) -> tuple[float | None, float | None]:
    told = below >= 1e-3
    if not told.any():
        return None, None
    low, high = np.percentile(top[told] / below[told], [2.5, 97.5])
    return float(low), float(high)
