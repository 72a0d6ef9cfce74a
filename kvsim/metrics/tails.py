"""How often: the distribution of a measure over all steps and query heads, as few points of its quantile function."""

from __future__ import annotations

import numpy as np
import polars as pl

from kvsim.metrics.spread import TELLING

GRID = np.unique(np.concatenate([np.linspace(0, 0.9, 19), np.linspace(0.9, 0.99, 10), [0.995, 0.999, 1.0]])).round(4)


def tails(heads: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, part (of the (head, step) pairs, from GRID), rel_l2, evidence_recall, sorted: `part` of the pairs have an output error
    of at most rel_l2; `part` of those with at least 1 % of their dense mass on evidence have a recall of it of at most evidence_recall."""
    recall = pl.when(pl.col("evidence_dense") >= TELLING).then(pl.col("evidence_read") / pl.col("evidence_dense"))
    told = {"rel_l2": pl.col("rel_l2").cast(pl.Float64), "evidence_recall": recall.cast(pl.Float64)}
    lists = [pl.concat_list(x.quantile(float(q), "linear") for q in GRID).alias(n) for n, x in told.items()]
    wide = heads.group_by("policy").agg(lists).with_columns(part=pl.lit(GRID.tolist()))
    return wide.explode("part", *told).sort("policy", "part").select("policy", "part", *told).collect()
