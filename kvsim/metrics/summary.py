"""A run in a few lines: what each policy kept of attention and what it moved, the budget that reaches a target, when evidence is reached."""

from __future__ import annotations

import polars as pl

from kvsim.metrics.budget import by_budget
from kvsim.metrics.quality import measures, ratio
from kvsim.metrics.roles import ALL_STEPS
from kvsim.metrics.run import RunTables
from kvsim.metrics.spread import MEAN
from kvsim.metrics.traffic import RESIDENT, ROWS

BY = ("layer", "role", "request")
BESIDE = ("index_bytes", "meta_bytes", "score_bytes")
AWAY = ("host_read_bytes", "ssd_read_bytes")


def summary(run: RunTables, by: str | None = None) -> pl.DataFrame:
    """-> one row per policy (and per layer, role or request), policies in the order of the run.

    mass_recall, far_recall, evidence_recall, rel_l2 as `measures` has them; mass_recall_p5, read_tokens_p99: over (query head, step).
    Bytes are means per kv head and step: read_bytes of K and V rows and of index, scales and scores beside them, away_bytes from host
    and disk, resident_bytes on the device with index and scales."""
    over = [by] if by else []
    ledger = run.ledger
    if by == "role":
        ledger = ledger.join(run.heads.select("request", "step", "role").unique(), on=["request", "step"])
    extremes = run.heads.group_by("policy", *over).agg(
        pl.col("mass_recall").cast(pl.Float64).quantile(0.05, "linear").alias("mass_recall_p5"),
        pl.col("read_tokens").cast(pl.Float64).quantile(0.99, "linear").alias("read_tokens_p99"),
    )
    moved = ledger.group_by("policy", *over).agg(
        pl.sum_horizontal(names).cast(pl.Float64).mean().alias(column)
        for column, names in (("read_bytes", (ROWS, *BESIDE)), ("away_bytes", AWAY), ("resident_bytes", RESIDENT))
    )
    found = measures(run.heads, *over).join(extremes, on=["policy", *over]).join(moved, on=["policy", *over])
    return _in_order(run, found.collect(), *over)


def reached(run: RunTables, measure: str, x: float) -> pl.DataFrame:
    """-> policy, layer, pages, tokens, bytes, value: the smallest read budget from which on the layer keeps `measure` at x or better (rel_l2:
    at most x), all its heads, steps and contexts together; pages is null where no budget does. Policies without curves have no rows."""
    better = pl.col("value") <= x if measure == "rel_l2" else pl.col("value") >= x
    every_budget = (
        [] if measure == "rel_l2" else [pl.lit(None, pl.Float32).alias("rel_l2_mean")]
    )  # errors are known on a grid of budgets
    whole, found = run.tables["curves"].with_columns(every_budget), []
    for layer in run.heads.select(pl.col("layer").unique().sort()).collect()["layer"]:
        of = pl.col("layer") == layer
        curves = by_budget(whole.filter(of), run.heads.filter(of), run.ledger.filter(of), most=1_000_000)
        curves = curves.filter(pl.col("statistic") == MEAN, pl.col("role") == ALL_STEPS).with_columns(value=measure)
        last_short = pl.col("pages").filter(~better.fill_null(value=False)).max().fill_null(0)
        first = (
            curves.filter(pl.col("pages") > last_short.over("policy")).group_by("policy").agg(pl.all().sort_by("pages").first())
        )
        every = curves.select("policy").unique().join(first, on="policy", how="left")
        found.append(every.select("policy", pl.lit(layer).alias("layer"), "pages", "tokens", "bytes", "value"))
    return _in_order(run, pl.concat(found), "layer") if found else pl.DataFrame()


def arrivals(run: RunTables) -> pl.DataFrame:
    """evidence and heads -> policy, layer, span, step, steps, dense, recall: the first decode step at which a query head of the layer reads
    a token of the span (null: none does), the share of steps at which one does, the mean dense mass on it, and the share of that which
    was read (a ratio of sums). Only of policies replayed with plans."""
    seen = (
        run.tables["evidence"]
        .group_by("policy", "request", "layer", "span", "step")
        .agg(
            hit=(pl.col("read") > 0).any(),
            dense=pl.col("dense").cast(pl.Float64).sum(),
            read=pl.col("read").cast(pl.Float64).sum(),
            n=pl.len(),
        )
    )
    found = seen.group_by("policy", "layer", "span").agg(
        pl.col("step").filter("hit").min().alias("step"),
        pl.col("hit").mean().alias("steps"),
        (pl.col("dense").sum() / pl.col("n").sum()).alias("dense"),
        ratio(pl.col("read"), pl.col("dense")).alias("recall"),
    )
    return _in_order(run, found.collect(), "layer", "span")


def _in_order(run: RunTables, frame: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Policies as they were asked for, then by the rest."""
    place = {p.id: i for i, p in enumerate(run.policies)}
    order = pl.col("policy").replace_strict(place, return_dtype=pl.Int32)
    return frame.sort(order, *by)
