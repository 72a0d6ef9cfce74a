"""Which parts of a context are read: the share of query heads and steps that read a position, from `plans`, `tiers` and `ledger`."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.metrics.raster import GONE

COLUMNS = {"start": pl.Int64, "stop": pl.Int64, "share": pl.Float64}


def profile(tables: dict[str, pl.LazyFrame], policy: str, request: int, width: int, selective: bool) -> pl.DataFrame:
    """-> start, stop (positions, `width` of them), share: of (query head, step) pairs that could see a position, those that read it;
    a cell is the mean of its positions.

    selective: the policy reads a part of what it keeps, so what its plans name is read; else whatever it still holds is."""
    mine = [pl.col("policy") == policy, pl.col("request") == request]
    ledger = tables["ledger"].filter(*mine).select("layer", "kv_head", "step", "pos", "visible_tokens").collect()
    if ledger.is_empty():
        return pl.DataFrame(schema=COLUMNS)
    total = int(ledger["pos"].max()) + 1  # type: ignore[arg-type]
    seen = _spans(total, ledger["pos"] - ledger["visible_tokens"] + 1, ledger["pos"] + 1)
    if selective:
        read = _planned(tables["plans"].filter(*mine), _group(tables["heads"].filter(*mine), ledger), total)
    else:
        read = _held(ledger, tables["tiers"].filter(*mine).collect(), total)
    cuts = np.arange(0, total, width)
    below = np.add.reduceat(seen, cuts)
    share = np.divide(np.add.reduceat(read, cuts), below, out=np.zeros(len(cuts)), where=below > 0)
    return pl.DataFrame({"start": cuts, "stop": np.minimum(cuts + width, total), "share": share.clip(0, 1)}, schema=COLUMNS)


def _spans(total: int, start: Any, stop: Any, weight: Any = 1.0) -> NDArray[np.float64]:
    """f64[total]: how many of the spans [start, stop) cover each position."""
    edge = np.zeros(total + 1)
    np.add.at(edge, np.clip(np.asarray(start), 0, total), weight)
    np.subtract.at(edge, np.clip(np.asarray(stop), 0, total), weight)
    return edge.cumsum()[:total]


def _group(heads: pl.LazyFrame, ledger: pl.DataFrame) -> float:
    """Query heads per kv head."""
    return heads.select(pl.struct("layer", "q_head").n_unique()).collect().item() / ledger.select("layer", "kv_head").n_unique()


def _planned(plans: pl.LazyFrame, group: float, total: int) -> NDArray[np.float64]:
    """f64[total]: reads of each position, in kv heads: a query head's own page is a part of one."""
    weight = pl.when(pl.col("q_head") < 0).then(1.0).otherwise(1 / group)
    pages = (
        plans.select("page_size", weight.alias("weight"), pl.col("pages").alias("page"))
        .explode("page")
        .drop_nulls("page")
        .group_by("page_size", "page")
        .agg(pl.col("weight").sum())
        .collect()
    )
    size = pages["page_size"].cast(pl.Int64)
    return _spans(total, pages["page"] * size, (pages["page"] + 1) * size, pages["weight"].to_numpy())


def _held(ledger: pl.DataFrame, tiers: pl.DataFrame, total: int) -> NDArray[np.float64]:
    """f64[total]: steps of kv heads at which each position was there to be read."""
    read = _spans(total, ledger["pos"] - ledger["visible_tokens"] + 1, ledger["pos"] + 1)
    keys = ["layer", "kv_head"]
    changes = tiers.sort("step").partition_by(keys, as_dict=True)
    for key, steps in ledger.sort("step").partition_by(keys, as_dict=True).items():
        if key not in changes:
            continue
        gone, waiting = np.zeros(total, bool), list(changes[key].select("step", "runs").iter_rows())
        for step, pos in steps.select("step", "pos").iter_rows():
            while waiting and waiting[0][0] < step:  # a cut comes after its step's attention
                for run in waiting.pop(0)[1]:
                    gone[run["start"] : run["stop"]] = run["tier"] & 3 == GONE
            read[: pos + 1] -= gone[: pos + 1]
    return np.maximum(read, 0)
