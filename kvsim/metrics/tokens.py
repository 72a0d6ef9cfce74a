"""Tokens along the steps: what is held and how, what was asked and what became of it, what changes from step to step."""

from __future__ import annotations

import polars as pl

TIERS = ("held, full precision", "held, coded", "only on the host", "gone for good")


def held_by_step(ledger: pl.LazyFrame, together: int = 1, *by: str) -> pl.DataFrame:
    """-> policy, `by`, step, part (one of TIERS), order, tokens: means per kv head, after the step; a step's parts sum to what is visible."""
    sizes = {
        TIERS[0]: pl.col("full_tokens"),
        TIERS[1]: pl.col("quant_tokens"),
        TIERS[2]: pl.col("visible_tokens") - pl.col("held_tokens") - pl.col("evicted_tokens"),
        TIERS[3]: pl.col("evicted_tokens"),
    }
    return (
        ledger.group_by("policy", *by, (pl.col("step") // together * together).alias("step"))
        .agg(x.cast(pl.Float64).mean().alias(name) for name, x in sizes.items())
        .unpivot(index=["policy", *by, "step"], variable_name="part", value_name="tokens")
        .with_columns(order=pl.col("part").replace_strict({n: i for i, n in enumerate(TIERS)}, return_dtype=pl.Int8))
        .sort("policy", *by, "step", "order")
        .collect()
    )


CHANGES = {"evicted": "evicted", "demoted": "coded", "promoted": "promoted", "requantised": "coded again"}


def changes_by_step(events: pl.LazyFrame, together: int = 1, *by: str) -> pl.DataFrame:
    """-> policy, `by`, step, change (one of the values of CHANGES), tokens: means per kv head; step -1 is the cut after the prompt; sorted.

    Steps taken together are added up."""
    start = pl.when(pl.col("step") < 0).then(-1).otherwise(pl.col("step") // together * together)
    per_step = events.group_by("policy", *by, "step").agg(
        pl.col(n).cast(pl.Float64).mean().alias(said) for n, said in CHANGES.items()
    )
    return (
        per_step.group_by("policy", *by, start.alias("step"))
        .agg(pl.col(*CHANGES.values()).sum())
        .unpivot(index=["policy", *by, "step"], variable_name="change", value_name="tokens")
        .filter(pl.col("tokens") > 0)
        .sort("policy", *by, "step", "change")
        .collect()
    )


def asked_and_got(ledger: pl.LazyFrame, heads: pl.LazyFrame, events: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, side ("read" | "hold"), asked, got, union: tokens, means over steps; only policies with a budget in tokens, pages or a
    share; sorted.

    Read: got is per query head, union per kv head. Hold: got is what a kv head holds after the step, union null. asked is the budget
    before it is rounded to whole pages."""
    page = pl.col("page_bytes") / pl.col("read_pages") / (pl.col("read_bytes") / pl.col("read_tokens"))  # tokens a page
    in_tokens = {
        "tokens": pl.col("asked"),
        "share": pl.col("asked") * pl.col("visible_tokens"),
        "pages": pl.col("asked") * page.round(),
    }
    unit = pl.col("asked_unit")
    asked = pl.coalesce(pl.when(unit == name).then(x) for name, x in in_tokens.items())
    read = ledger.filter(pl.col("asked").is_not_null()).group_by("policy").agg(
        asked.cast(pl.Float64).mean().alias("asked"), pl.col("read_tokens").cast(pl.Float64).mean().alias("union")
    )  # fmt: skip
    each = heads.filter(~pl.col("dense")).group_by("policy").agg(pl.col("read_tokens").cast(pl.Float64).mean().alias("got"))
    at = ["policy", "request", "layer", "kv_head", "step"]
    held = (
        events.filter(pl.col("asked").is_not_null())
        .join(ledger, on=at, how="inner")
        .group_by("policy")
        .agg(pl.col(n).cast(pl.Float64).mean().alias(name) for n, name in (("hold_tokens", "asked"), ("held_tokens", "got")))
    )
    columns = ("policy", "side", "asked", "got", "union")
    sides = [
        read.join(each, on="policy", how="left").with_columns(side=pl.lit("read")).select(columns),
        held.with_columns(side=pl.lit("hold"), union=pl.lit(None, pl.Float64)).select(columns),
    ]
    return pl.concat(sides).drop_nulls("asked").sort("policy", "side", descending=[False, True]).collect()
