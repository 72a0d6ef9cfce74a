"""Why attention is lost: budget, eviction or index; how deep a ranking would have to be read; how loose its bounds are."""

from __future__ import annotations

import polars as pl

from kvsim.metrics.roles import ALL_STEPS, by_role

LOSSES = {  # of diagnostics -> in words, in the order they stand on a bar
    "read": "read",
    "loss_index": "lost: the index chose other pages",
    "loss_evict": "lost: evicted before",
    "loss_budget": "lost: the budget is too small",
}


def blame(diagnostics: pl.DataFrame, role: int = ALL_STEPS) -> pl.DataFrame:
    """diagnostics (policy, request, layer, role, metric, value) -> policy, part (a value of LOSSES), order, mass, sorted: means over contexts
    and layers of one role; four parts of a policy sum to 1. Policies without pages have no such losses and no rows."""
    lost = (
        diagnostics.filter(pl.col("role") == role, pl.col("metric").is_in(list(LOSSES)))
        .group_by("policy", "metric")
        .agg(pl.col("value").mean().clip(0, None).alias("mass"))  # a difference of float32 sums may be a hair below 0
    )
    read = lost.group_by("policy").agg(pl.lit("read").alias("metric"), (1 - pl.col("mass").sum()).alias("mass"))
    order = {n: i for i, n in enumerate(LOSSES)}
    return (
        pl.concat([lost, read.select(lost.columns)])
        .with_columns(
            order=pl.col("metric").replace_strict(order, return_dtype=pl.Int8),
            part=pl.col("metric").replace_strict(LOSSES, return_dtype=pl.String),
        )
        .select("policy", "part", "order", "mass")
        .sort("policy", "order")
    )


DEPTHS = {  # of explain -> in words, in the order they stand on the chart
    "k_needed": "the pages of most mass",
    "exact_pages_r1": "proof of the best token",
    "exact_pages_r10": "proof of the best 10 tokens",
    "exact_pages_r64": "proof of the best 64 tokens",
    "mass_pages_02": "proof of 80 % of the mass",
    "mass_pages_01": "proof of 90 % of the mass",
    "mass_pages_005": "proof of 95 % of the mass",
    "mass_pages_001": "proof of 99 % of the mass",
}


def depths(explain: pl.LazyFrame, heads: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, role (-1: all steps), wanted (a value of DEPTHS), order, p50, mean, p95, most: pages of the ranking, over steps and heads;
    sorted."""
    order = {said: i for i, said in enumerate(DEPTHS.values())}
    wide = by_role(explain, heads).select(
        "policy", "role", *(pl.col(n).cast(pl.Float64).alias(said) for n, said in DEPTHS.items())
    )
    pages = pl.col("pages")
    return (
        wide.unpivot(index=["policy", "role"], variable_name="wanted", value_name="pages")
        .drop_nulls("pages")
        .group_by("policy", "role", "wanted")
        .agg(
            pages.median().alias("p50"),
            pages.mean().alias("mean"),
            pages.quantile(0.95, "linear").alias("p95"),
            pages.max().alias("most"),
        )
        .with_columns(order=pl.col("wanted").replace_strict(order, return_dtype=pl.Int8))
        .sort("policy", "role", "order")
        .collect()
    )


def bounds(heads: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, layer, role (-1: all steps), slack_mean, slack_max (scaled logits), promised (eps_hat), missed (mass not read, of what is
    held): means, and the p95 over steps and heads of each as NAME_p95; only policies whose index is a bound; sorted."""
    held = 1 - pl.col("mass_evicted") - pl.col("learned_sink_mass")
    columns = {
        "slack_mean": pl.col("slack_mean"),
        "slack_max": pl.col("slack_max"),
        "promised": pl.col("eps_hat"),
        "missed": pl.col("mass_unread") / held,
    }
    means = [x.cast(pl.Float64).mean().alias(n) for n, x in columns.items()]
    ends = [x.cast(pl.Float64).quantile(0.95, "linear").alias(f"{n}_p95") for n, x in columns.items()]
    return (
        by_role(heads, heads)
        .filter(pl.col("slack_mean").is_not_null())
        .group_by("policy", "layer", "role")
        .agg(*means, *ends)
        .sort("policy", "layer", "role")
        .collect()
    )


STAGES = {  # of heads -> in words, in the order errors add up
    "err_select": "exact rows",
    "err_k": "coded keys",
    "err_v": "coded keys and values",
}


def coding(heads: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, layer, stage (a value of STAGES), order, error, p95: output error on what the policy read, over steps and heads;
    only policies that code; sorted."""
    order = {said: i for i, said in enumerate(STAGES.values())}
    wide = heads.filter(pl.col("err_v").is_not_null()).select(
        "policy", "layer", *(pl.col(n).cast(pl.Float64).alias(said) for n, said in STAGES.items())
    )
    error = pl.col("error")
    return (
        wide.unpivot(index=["policy", "layer"], variable_name="stage", value_name="error")
        .group_by("policy", "layer", "stage")
        .agg(error.mean(), error.quantile(0.95, "linear").alias("p95"))
        .with_columns(order=pl.col("stage").replace_strict(order, return_dtype=pl.Int8))
        .sort("policy", "layer", "order")
        .collect()
    )


RANKINGS = {  # columns of explain whose mean says what a ranking gave away, and how what it reads changes
    "regret": "logits given away",
    "recovered_1": "missed pages read at the next step",
    "recovered_4": "missed pages read within 4 steps",
    "recovered_16": "missed pages read within 16 steps",
    "churn_query": "change, by the query",
    "churn_summary": "change, by the summaries",
}


def rankings(explain: pl.LazyFrame, heads: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, role (-1: all steps), below_share (scores below the truth over all scores), below_max (scaled logits), fp16_changed (share
    of sets), and the means of RANKINGS, over steps and heads; null where nothing was recorded; sorted."""
    return (
        by_role(explain, heads)
        .group_by("policy", "role")
        .agg(
            below_share=pl.when(pl.col("pages").sum() > 0).then(pl.col("below").sum() / pl.col("pages").sum()),
            below_max=pl.col("below_max").cast(pl.Float64).max(),
            fp16_changed=pl.col("fp16_changed").cast(pl.Float64).mean(),
            **{name: pl.col(name).cast(pl.Float64).mean() for name in RANKINGS},
        )
        .sort("policy", "role")
        .collect()
    )
