"""diagnostics.parquet: what became of attention mass, and why, per policy, request and layer; one number a row.

Names are those of docs/definitions.md. Means are over the steps written and the query heads."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from kvsim.metrics import keeping
from kvsim.metrics.overlap import across_layers

UNIT = ("policy", "request", "layer")
WINDOWS = ("windows_promoted", "windows_demoted", "windows_evicted", "windows_aged_in")
CERTIFICATES = (
    *("exact_pages_r1", "exact_pages_r10", "exact_pages_r64"),
    *("mass_pages_001", "mass_pages_005", "mass_pages_01", "mass_pages_02"),
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
    """heads of a run, and explain, evidence, plans and events where they were written -> policy, request, layer, metric, value, sorted.

    fmm_prefill, fmm_running: mass missed on tokens evicted at the cut after prefill, and on all evicted so far (card D7).
    churn_read: consecutive steps' reads in tokens (D9). loss_budget, loss_evict, loss_index: 1 - L1, L1 - L2, L2 - L3, where L1 is the
    oracle's recall with as many pages of all tokens, L2 of held ones, L3 the policy's own (D11). From explain: the score's gap at the
    budget (mean), k_needed and the depths of certificates in pages (mean, p95, max). From evidence: all_spans_read and any_span_read, the
    share of (step, head) in which something of every, of any span was read (D13). From plans: jaccard_1, _2, _4, _8 with the layer that
    far above, and jaccard_chance_... (metrics.overlap, D12). From events of keeps that rank windows: windows_promoted, _demoted, _evicted and
    _aged_in, totals over the steps, and churn_full, the mean over cuts, each a mean over kv heads (D9). From lags,
    recurrence and by_tier: see metrics.keeping."""
    means = {
        "fmm_prefill": pl.col("mass_evicted_prefill"),
        "fmm_running": pl.col("mass_evicted"),
        "churn_read": pl.col("read_churn"),
        "loss_budget": 1 - pl.col("oracle_recall"),  # what learned sinks take is in it
        "loss_evict": pl.col("oracle_recall") - pl.col("oracle_held_recall"),
        "loss_index": pl.col("oracle_held_recall") - pl.col("mass_recall"),
    }
    found = [_tall(heads, [x.cast(pl.Float64).mean().alias(name) for name, x in means.items()])]
    if explain is not None:
        wanted = [pl.col("score_gap").cast(pl.Float64).mean()]
        for name in ("k_needed", *CERTIFICATES):
            pages = pl.col(name).cast(pl.Float64)
            wanted += [
                pages.mean().alias(f"{name}_mean"),
                pages.quantile(0.95).alias(f"{name}_p95"),
                pages.max().alias(f"{name}_max"),
            ]
        found.append(_tall(explain, wanted))
    if evidence is not None:
        row = evidence.group_by(*UNIT, "q_head", "step").agg(all=(pl.col("read") > 0).all(), any=(pl.col("read") > 0).any())
        found.append(_tall(row, [pl.col(x).mean().alias(f"{x}_{y}_read") for x, y in (("all", "spans"), ("any", "span"))]))
    if plans is not None:
        alike = across_layers(plans).lazy()
        for column, name in (("jaccard", "jaccard_"), ("chance", "jaccard_chance_")):
            metric = pl.concat_str(pl.lit(name), pl.col("distance").cast(pl.String)).alias("metric")
            found.append(alike.select("policy", "request", pl.col("layer").cast(pl.Int16), metric, pl.col(column).alias("value")))
    if events is not None and set(WINDOWS) <= {*events.collect_schema().names()}:
        here = events.filter(pl.col("windows_aged_in").is_not_null())
        totals = [pl.col(name).sum().cast(pl.Float64) for name in WINDOWS]
        by_head = here.group_by(*UNIT, "kv_head").agg(*totals, pl.col("churn_full").mean())
        found.append(_tall(by_head, [pl.col(name).mean() for name in (*WINDOWS, "churn_full")]))
    found += [keeping.error_metrics(heads)] if "oracle_rel_l2" in heads.collect_schema() else []
    found += [] if lags is None else [keeping.lag_metrics(lags)]
    found += [] if recurrence is None else [keeping.recurrence_metrics(recurrence)]
    found += [] if by_tier is None else [keeping.tier_metrics(by_tier, heads)]
    return pl.concat(found).sort(*UNIT, "metric").collect()


def write(run: Path) -> None:
    """Adds diagnostics.parquet to the folder of a run whose tables are written."""
    names = ("heads", "explain", "evidence", "plans", "events", "lags", "recurrence", "by_tier")
    frames = {name: _frame(run / f"{name}.parquet") for name in names if (run / f"{name}.parquet").is_file()}
    diagnostics(**frames).write_parquet(run / "diagnostics.parquet", compression="zstd")


def _tall(frame: pl.LazyFrame, wanted: list[pl.Expr]) -> pl.LazyFrame:
    wide = frame.group_by(UNIT).agg(wanted)
    return wide.unpivot(index=UNIT, variable_name="metric", value_name="value").drop_nulls("value")


def _frame(file: Path) -> pl.LazyFrame:
    return pl.scan_parquet(file).with_columns(pl.col("policy").cast(pl.String))
