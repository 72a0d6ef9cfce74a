"""How unequal heads are: beside a mean over heads, the 5th percentile and the worst of them (of what is lost: the 95th).

A head is one query head of one layer in one context, over the steps of its group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from kvsim.metrics.quality import measures

HEAD = ("request", "layer", "q_head")
MEAN, TAIL, WORST = "mean of heads", "p5 of heads (of what is lost: p95)", "worst head"
SUFFIX = {MEAN: "", TAIL: "_tail", WORST: "_worst"}
LOSSES = frozenset({"rel_l2", "missed_mass", "mass_evicted", "mass_unread", "read_churn"})  # more is worse
SPREAD = ("mass_recall", "far_recall", "evidence_recall", "rel_l2", "missed_mass", "mass_evicted", "mass_unread")
TELLING = 0.01  # a head with less of its dense mass far away, or on evidence, has no recall there


def spread(heads: pl.LazyFrame, *by: str | pl.Expr) -> pl.DataFrame:
    """heads -> `measures` by policy and `by`, sorted, with NAME_tail and NAME_worst of each of SPREAD: over the heads of the group."""
    names = [x if isinstance(x, str) else x.meta.output_name() for x in by]
    told = {"far_recall": "far_mass", "evidence_recall": "evidence_dense"}
    each = measures(heads, *by, *(n for n in HEAD if n not in names))
    each = each.with_columns(pl.when(pl.col(w) >= TELLING).then(m).alias(m) for m, w in told.items())
    ends = each.group_by("policy", *names).agg(tails({n: pl.col(n) for n in SPREAD}))
    return measures(heads, *by).join(ends, on=["policy", *names], nulls_equal=True).sort("policy", *names).collect()


def spread_of(heads: pl.LazyFrame, columns: Sequence[str], *by: str) -> pl.DataFrame:
    """heads -> policy, `by`, and mean, _tail and _worst over heads of each column's mean over steps, sorted."""
    each = heads.group_by("policy", *by, *(n for n in HEAD if n not in by)).agg(
        pl.col(n).cast(pl.Float64).mean() for n in columns
    )
    means = [pl.col(n).mean() for n in columns]
    return each.group_by("policy", *by).agg(*means, *tails({n: pl.col(n) for n in columns})).sort("policy", *by).collect()


def tails(columns: Mapping[str, pl.Expr]) -> list[pl.Expr]:
    """Of each column, one value a head: NAME_tail and NAME_worst."""
    found = []
    for name, column in columns.items():
        x = column.cast(pl.Float64)
        lost = name in LOSSES
        found += [
            x.quantile(0.95 if lost else 0.05, "linear").alias(f"{name}_tail"),
            (x.max() if lost else x.min()).alias(f"{name}_worst"),
        ]
    return found


def by_statistic(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The frame three times, with `statistic` (MEAN, TAIL, WORST) and the columns as that statistic has them."""
    rest = [n for n in frame.columns if n not in {c + s for c in columns for s in SUFFIX.values()}]
    return pl.concat(
        frame.select(*rest, *(pl.col(c + suffix).alias(c) for c in columns)).with_columns(statistic=pl.lit(name))
        for name, suffix in SUFFIX.items()
    )
