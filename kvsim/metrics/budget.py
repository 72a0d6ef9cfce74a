"""Quality at every read budget, from `curves`: one line per read policy."""

from __future__ import annotations

import polars as pl

from kvsim.metrics.quality import FLOOR, ratio
from kvsim.metrics.traffic import side_bytes

ALL_STEPS = -1  # the role that stands for every decode step
UNIT = ("policy", "request", "layer", "q_head", "role")
COLUMNS = ("policy", "role", "pages", "tokens", "bytes", "mass_recall", "far_recall", "evidence_recall", "rel_l2")


def by_budget(curves: pl.LazyFrame, heads: pl.LazyFrame, ledger: pl.LazyFrame, most: int = 40) -> pl.DataFrame:
    """-> COLUMNS, sorted by policy, role, pages: each budget that every layer, head and context of the policy has, at most about `most`.

    mass_recall, rel_l2: means over layers, heads, contexts. far_recall, evidence_recall: ratios of sums, each curve weighed by its
    dense mass (from heads). bytes: K and V rows per kv head and step, plus what the policy read beside them at its own budget (index,
    scales)."""
    side = ledger.group_by("policy").agg(side_bytes().cast(pl.Float64).mean().alias("side"))
    return (
        curves.join(_weights(heads), on=UNIT, how="left", maintain_order="left")
        .join(side, on="policy", how="left", maintain_order="left")
        .group_by("policy", "role", "pages")
        .agg(
            pl.len().alias("n"),
            pl.col("tokens").first(),
            (pl.col("read_bytes_mean") + pl.col("side").fill_null(0)).mean().alias("bytes"),
            pl.col("mass_recall_mean").cast(pl.Float64).mean().alias("mass_recall"),
            _weighed("far_recall", "far"),
            _weighed("evidence_recall", "evidence"),
            pl.when(pl.col("rel_l2_mean").is_not_null().all())
            .then(pl.col("rel_l2_mean").cast(pl.Float64).mean())
            .alias("rel_l2"),
        )
        .filter(pl.col("n") == pl.col("n").max().over("policy", "role"))
        .filter(_shown(most))
        .select(COLUMNS)
        .sort("policy", "role", "pages")
        .collect()
    )


def _weights(heads: pl.LazyFrame) -> pl.LazyFrame:
    """Dense far and evidence mass of each curve's steps, for role rows and for all steps; null where a ratio of them says nothing."""
    both = pl.concat([heads, heads.with_columns(role=pl.lit(ALL_STEPS, pl.Int8))])
    sums = {n: pl.col(c).cast(pl.Float64).sum() for n, c in (("far", "far_mass"), ("evidence", "evidence_dense"))}
    return both.group_by(UNIT).agg(pl.when(x >= FLOOR).then(x).alias(n) for n, x in sums.items())


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
