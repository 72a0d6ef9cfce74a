"""diagnostics.parquet: what became of attention mass, and why, per policy, request, layer and role; one number a row.

Names are those of docs/definitions.md. Means are over the steps written and the query heads."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from kvsim.metrics import keeping
from kvsim.metrics.depth import read_depth
from kvsim.metrics.overlap import across_layers
from kvsim.metrics.roles import ALL_STEPS, by_role

UNIT = ("policy", "request", "layer", "role")
WINDOWS = ("windows_promoted", "windows_demoted", "windows_evicted", "windows_aged_in")
CERTIFICATES = (
    *("exact_pages_r1", "exact_pages_r10", "exact_pages_r64"),
    *("mass_pages_001", "mass_pages_005", "mass_pages_01", "mass_pages_02"),
)

MEANS = (
    *("score_gap", "regret", "displaced_slack", "slack_norm", "churn_summary", "churn_query"),
    *("recovered_1", "recovered_4", "recovered_16"),
)


def diagnostics(
    heads: pl.LazyFrame,
    explain: pl.LazyFrame | None = None,
    evidence: pl.LazyFrame | None = None,
    plans: pl.LazyFrame | None = None,
    events: pl.LazyFrame | None = None,
    lags: pl.LazyFrame | None = None,
    recurrence: pl.LazyFrame | None = None,
    by_tier: pl.LazyFrame | None = None,
) -> pl.DataFrame:
    """heads of a run, and explain, evidence and plans where they were written -> policy, request, layer, role (-1: all steps), metric, value,
    sorted.

    fmm_prefill, fmm_running: mass missed on tokens evicted at the cut after prefill, and on all evicted so far (card D7).
    churn_read: consecutive steps' reads in tokens (D9). loss_budget, loss_evict, loss_index: 1 - L1, L1 - L2, L2 - L3, where L1 is the
    oracle's recall with as many pages of all tokens, L2 of held ones, L3 the policy's own (D11). read_pages, rounds, certified, full_reads:
    how deep it read (metrics.depth). From explain: the score's gap at the budget, regret, displaced_slack and slack_norm (D5, D6),
    churn_summary, churn_query and recovered_1, _4, _16 (engine.turnover), all means; below_share, below_max: scores below the truth;
    sets_changed_fp16: the share of sets that half precision changes; k_needed and the depths of certificates in pages (mean, p95, max).
    From evidence: all_spans_read and any_span_read, the share of (step, head) in which something of every, of any span was read (D13).
    From plans: jaccard_1, _2, _4, _8 with the layer that far above, and jaccard_chance_... (metrics.overlap, D12). From events of keeps
    that rank windows: windows_promoted, _demoted, _evicted and _aged_in, totals over the steps, and churn_full, the mean over cuts, each a
    mean over kv heads, of all steps only (D9). From lags, by_tier and recurrence (of all steps only): see metrics.keeping."""
    means = {
        "fmm_prefill": pl.col("mass_evicted_prefill"),
        "fmm_running": pl.col("mass_evicted"),
        "churn_read": pl.col("read_churn"),
        "loss_budget": 1 - pl.col("oracle_recall"),  # what learned sinks take is in it
        "loss_evict": pl.col("oracle_recall") - pl.col("oracle_held_recall"),
        "loss_index": pl.col("oracle_held_recall") - pl.col("mass_recall"),
    }
    every = by_role(heads, heads)
    found = [
        _tall(_wide(every, [x.cast(pl.Float64).mean().alias(name) for name, x in means.items()])),
        _tall(read_depth(every, *UNIT[1:])),
    ]
    if explain is not None:
        wanted = [pl.col(name).cast(pl.Float64).mean() for name in MEANS]
        wanted += [
            (pl.col("below").sum() / pl.col("pages").sum()).alias("below_share"),
            pl.col("below_max").cast(pl.Float64).max(),
            pl.col("fp16_changed").cast(pl.Float64).mean().alias("sets_changed_fp16"),
        ]
        for name in ("k_needed", *CERTIFICATES):
            pages = pl.col(name).cast(pl.Float64)
            wanted += [
                pages.mean().alias(f"{name}_mean"),
                pages.quantile(0.95, "linear").alias(f"{name}_p95"),
                pages.max().alias(f"{name}_max"),
            ]
        found.append(_tall(_wide(by_role(explain, heads), wanted)))
    if evidence is not None:
        row = by_role(evidence, heads).group_by(*UNIT, "q_head", "step")
        read = row.agg(all=(pl.col("read") > 0).all(), any=(pl.col("read") > 0).any())
        found.append(
            _tall(_wide(read, [pl.col(x).mean().alias(f"{x}_{y}_read") for x, y in (("all", "spans"), ("any", "span"))]))
        )
    if plans is not None:
        alike = by_role(across_layers(plans, heads), heads).with_columns(pl.col("layer").cast(pl.Int16))
        for column, name in (("jaccard", "jaccard_"), ("chance", "jaccard_chance_")):
            metric = pl.concat_str(pl.lit(name), pl.col("distance").cast(pl.String)).alias("metric")
            found.append(alike.group_by(*UNIT, metric).agg(pl.col(column).mean().alias("value")))
    if events is not None and set(WINDOWS) <= {*events.collect_schema().names()}:
        here = events.filter(pl.col("windows_aged_in").is_not_null()).with_columns(role=pl.lit(ALL_STEPS, pl.Int8))
        totals = [pl.col(name).sum().cast(pl.Float64) for name in WINDOWS]
        by_head = here.group_by(*UNIT, "kv_head").agg(*totals, pl.col("churn_full").mean())
        found.append(_tall(_wide(by_head, [pl.col(name).mean() for name in (*WINDOWS, "churn_full")])))
    found += [keeping.error_metrics(every)] if "oracle_rel_l2" in heads.collect_schema() else []
    found += [] if lags is None else [keeping.lag_metrics(by_role(lags, heads))]
    found += [] if by_tier is None else [keeping.tier_metrics(by_role(by_tier, heads), every)]
    if recurrence is not None:
        found.append(keeping.recurrence_metrics(recurrence.with_columns(role=pl.lit(ALL_STEPS, pl.Int8))))
    return pl.concat(found).sort(*UNIT, "metric").collect()


def write(run: Path) -> None:
    """Adds diagnostics.parquet (all steps) and diagnostics_by_role.parquet to the folder of a run whose tables are written.

    As one chunk each: a large frame comes in as many as there were threads free, and Parquet pages end where chunks do."""
    names = ("heads", "explain", "evidence", "plans", "events", "lags", "recurrence", "by_tier")
    frames = {name: _frame(run / f"{name}.parquet") for name in names if (run / f"{name}.parquet").is_file()}
    found = diagnostics(**frames)
    whole = found.filter(pl.col("role") == ALL_STEPS).drop("role")
    whole.rechunk().write_parquet(run / "diagnostics.parquet", compression="zstd")
    found.filter(pl.col("role") != ALL_STEPS).rechunk().write_parquet(run / "diagnostics_by_role.parquet", compression="zstd")


def _wide(frame: pl.LazyFrame, wanted: list[pl.Expr]) -> pl.LazyFrame:
    return frame.group_by(UNIT).agg(wanted)


def _tall(wide: pl.LazyFrame) -> pl.LazyFrame:
    return wide.unpivot(index=UNIT, variable_name="metric", value_name="value").drop_nulls("value")


def _frame(file: Path) -> pl.LazyFrame:
    return pl.scan_parquet(file).with_columns(pl.col("policy").cast(pl.String))
