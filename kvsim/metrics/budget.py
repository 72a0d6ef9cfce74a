"""Quality at every read budget, from `curves`: one line per read policy and statistic."""

from __future__ import annotations

import polars as pl

from kvsim.metrics.quality import FLOOR, ratio
from kvsim.metrics.roles import ALL_STEPS
from kvsim.metrics.spread import SUFFIX, TELLING, tails
from kvsim.metrics.traffic import side_bytes

STEPS, LOWEST = "p5 of a head's steps (error: p95)", "worst step of any head"
UNIT = ("policy", "request", "layer", "q_head", "role")
MEASURES = ("mass_recall", "far_recall", "evidence_recall", "rel_l2")
COLUMNS = ("policy", "role", "pages", "tokens", "read_tokens", "bytes", "union_pages", "statistic", *MEASURES)


def by_budget(curves: pl.LazyFrame, heads: pl.LazyFrame, ledger: pl.LazyFrame, most: int = 40) -> pl.DataFrame:
    """-> COLUMNS, sorted by policy, role, pages: each budget that every layer, head and context of the policy has, at most about
    `most`, once per statistic.

    Over heads (MEAN, TAIL, WORST): mass_recall and rel_l2 of a head are means over its steps; far_recall and evidence_recall of MEAN
    ratios of sums, each curve weighed by its dense mass (from heads), of TAIL and WORST only over heads with enough of it. STEPS: the
    mean over heads of p5 over steps, LOWEST the least of all. bytes: K and V rows per kv head and step, plus what the policy read
    beside them at its own budget (index, scales). union_pages: pages read by all query heads of a kv head together. read_tokens: what a
    query head reads, in whole pages: more than asked where heads read each other's pages, or forced ones fill the budget."""
    side = ledger.group_by("policy").agg(side_bytes().cast(pl.Float64).mean().alias("side"))
    read = pl.col("read_pages_mean").fill_null(pl.col("pages")) * pl.col("tokens") / pl.col("pages")
    error = pl.col("rel_l2_mean").cast(pl.Float64)
    found = (
        curves.join(_weights(heads), on=UNIT, how="left", maintain_order="left")
        .join(side, on="policy", how="left", maintain_order="left")
        .group_by("policy", "role", "pages")
        .agg(
            pl.len().alias("n"),
            pl.col("tokens").first(),
            read.mean().alias("read_tokens"),
            (pl.col("read_bytes_mean") + pl.col("side").fill_null(0)).mean().alias("bytes"),
            pl.col("union_pages_mean").mean().alias("union_pages"),
            pl.col("mass_recall_mean").cast(pl.Float64).mean().alias("mass_recall"),
            _weighed("far_recall", "far"),
            _weighed("evidence_recall", "evidence"),
            pl.when(error.is_not_null().all()).then(error.mean()).alias("rel_l2"),
            *tails(
                {
                    "mass_recall": pl.col("mass_recall_mean"),
                    "rel_l2": pl.when(error.is_not_null().all()).then(error),
                    "far_recall": pl.when(pl.col("far_each") >= TELLING).then("far_recall"),
                    "evidence_recall": pl.when(pl.col("evidence_each") >= TELLING).then("evidence_recall"),
                }
            ),
            pl.col("mass_recall_p5").cast(pl.Float64).mean().alias("mass_recall_steps"),
            pl.col("rel_l2_p95").cast(pl.Float64).mean().alias("rel_l2_steps"),
            pl.col("mass_recall_min").cast(pl.Float64).min().alias("mass_recall_lowest"),
        )
        .filter(pl.col("n") == pl.col("n").max().over("policy", "role"))
        .filter(_shown(most))
        .sort("policy", "role", "pages")
        .collect()
    )
    return _by_statistic(found).select(COLUMNS)


def _by_statistic(found: pl.DataFrame) -> pl.DataFrame:
    """Every budget once per statistic; a measure that a statistic does not have is null."""
    suffixes = SUFFIX | {STEPS: "_steps", LOWEST: "_lowest"}
    keys = ("policy", "role", "pages", "tokens", "read_tokens", "bytes", "union_pages")
    named = [
        found.select(
            *keys,
            *((pl.col(m + s) if m + s in found.columns else pl.lit(None, pl.Float64)).alias(m) for m in MEASURES),
            statistic=pl.lit(name),
        )
        for name, s in suffixes.items()
    ]
    return pl.concat(named).sort("policy", "role", "pages", maintain_order=True)


def _weights(heads: pl.LazyFrame) -> pl.LazyFrame:
    """Dense far and evidence mass of each curve's steps, for role rows and for all steps; null where a ratio of them says nothing."""
    both = pl.concat([heads, heads.with_columns(role=pl.lit(ALL_STEPS, pl.Int8))])
    mass = {n: pl.col(c).cast(pl.Float64) for n, c in (("far", "far_mass"), ("evidence", "evidence_dense"))}
    sums = [pl.when(x.sum() >= FLOOR).then(x.sum()).alias(n) for n, x in mass.items()]
    return both.group_by(UNIT).agg(*sums, *(x.mean().alias(f"{n}_each") for n, x in mass.items()))


def _weighed(measure: str, weight: str) -> pl.Expr:
    told = pl.when(pl.col(measure).is_not_null()).then(weight)
    return ratio(pl.col(measure) * told, told).alias(measure)


def _shown(most: int) -> pl.Expr:
    """Budgets to show: those with an output error, thinned evenly in the logarithm of pages to about `most`, the ends among them."""
    told = pl.col("rel_l2").is_not_null() | pl.col("rel_l2").is_null().all().over("policy", "role")
    last = pl.col("pages").max().over("policy", "role")
    bucket = (pl.col("pages").log() / last.log().clip(1e-9, None) * (most - 1)).floor()
    first = pl.col("pages").filter(told).min().over("policy", "role", bucket)
    return told & ((pl.col("pages") == first) | (pl.col("pages") == last))
