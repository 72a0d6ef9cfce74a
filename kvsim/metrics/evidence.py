"""Through which layers evidence is seen: the first that reads some of it, and how many do (card D13)."""

from __future__ import annotations

import polars as pl

ONE, ANY, EVERY = "one span", "any span", "every span"
STEP = ("policy", "request", "step", "role", "dense")


def through_layers(evidence: pl.LazyFrame, heads: pl.LazyFrame) -> pl.LazyFrame:
    """evidence and heads of a run -> policy, request, step, role, dense, scope, span, layers, first, count; sorted.

    A layer hits a span where any of its query heads read a token of it (with mass above 0). count: of `layers` captured layers, those that
    hit; first: the lowest of them, null without one. scope: ONE for each span, and for all spans together ANY and EVERY, the layers that hit
    at least one and each of them (span null). dense: layers that are read whole by rule hit every span and stand apart."""
    rows = heads.group_by("policy", "request", "layer", "step").agg(pl.col("role").first(), pl.col("dense").all())
    hits = (
        evidence.group_by("policy", "request", "layer", "step", "span")
        .agg(hit=(pl.col("read") > 0).any())
        .join(rows, on=["policy", "request", "layer", "step"])
    )
    together = hits.group_by(*STEP, "layer")
    scopes = {
        ONE: hits,
        ANY: together.agg(pl.col("hit").any(), span=pl.lit(None, pl.String)),
        EVERY: together.agg(pl.col("hit").all(), span=pl.lit(None, pl.String)),
    }
    columns = (*STEP, "span", "layer", "hit")
    every = pl.concat(frame.select(*columns, scope=pl.lit(scope)) for scope, frame in scopes.items())
    return (
        every.group_by(*STEP, "scope", "span")
        .agg(
            layers=pl.len().cast(pl.Int32),
            first=pl.col("layer").filter("hit").min().cast(pl.Int32),
            count=pl.col("hit").sum().cast(pl.Int32),
        )
        .sort(*STEP, "scope", "span")
    )


def hits(evidence: pl.LazyFrame, heads: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, role, scope (ANY, EVERY), layers, first, count: means over contexts and steps of `through_layers`, layers read whole by rule
    left out; never: the share of steps at which no layer hit (first has none of these); sorted."""
    return (
        through_layers(evidence, heads)
        .filter(pl.col("scope") != ONE, ~pl.col("dense"))
        .group_by("policy", "role", "scope")
        .agg(pl.col("layers", "first", "count").cast(pl.Float64).mean(), never=(pl.col("count") == 0).mean())
        .sort("policy", "role", "scope")
        .collect()
    )
