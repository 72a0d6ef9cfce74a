"""What a policy lost, from `heads`: every number a ratio of sums over the rows of one group, so groups of any size compare."""

from __future__ import annotations

import polars as pl

FLOOR = 1e-3  # a ratio whose denominator sums below it says nothing

MEASURES = ("mass_recall", "far_recall", "evidence_recall", "rel_l2")


def ratio(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    """Sum over sum of a group, null where the sum of `whole` is below 1e-3; a row with a null on either side counts on neither."""
    both = part.is_not_null() & whole.is_not_null()
    top, below = (x.cast(pl.Float64).filter(both).sum() for x in (part, whole))
    return pl.when(below >= FLOOR).then(top / below)


def measures(heads: pl.LazyFrame, *by: str | pl.Expr) -> pl.LazyFrame:
    """heads -> one row per policy and `by`: rows, the four measures, and means of what was lost and read.

    mass_recall, rel_l2: means. far_recall, evidence_recall: ratios of sums. missed_mass = mass evicted + mass unread.
    far_mass, evidence_dense: dense mass there. read_tokens: per query head. With no `by`, all decode steps, layers and heads together."""
    means = ("mass_recall", "rel_l2", "mass_evicted", "mass_unread", "far_mass", "evidence_dense", "read_tokens")
    return heads.group_by("policy", *by).agg(
        pl.len().alias("rows"),
        *(pl.col(n).cast(pl.Float64).mean() for n in means),
        ratio(pl.col("far_recall") * pl.col("far_mass"), pl.col("far_mass")).alias("far_recall"),
        ratio(pl.col("evidence_read"), pl.col("evidence_dense")).alias("evidence_recall"),
        (pl.col("mass_evicted") + pl.col("mass_unread")).cast(pl.Float64).mean().alias("missed_mass"),
    )


def quality(heads: pl.LazyFrame, *by: str | pl.Expr) -> pl.DataFrame:
    """`measures`, sorted by policy and `by`."""
    return measures(heads, *by).sort("policy", *by).collect()


FATES = ("read, full precision", "read, coded", "read from the host", "kept, not read", "gone for good", "learned sink")


def fates(heads: pl.LazyFrame, *by: str | pl.Expr) -> pl.DataFrame:
    """heads -> one row per policy and `by`, sorted: each of FATES, the mean dense attention mass with that fate; a row's six sum to 1."""
    parts = (
        pl.col("mass_recall") - pl.col("mass_quant") - pl.col("mass_host"),
        pl.col("mass_quant"),
        pl.col("mass_host"),
        pl.col("mass_unread"),
        pl.col("mass_evicted"),
        pl.col("learned_sink_mass"),
    )
    means = (x.cast(pl.Float64).mean().alias(name) for name, x in zip(FATES, parts, strict=True))
    return heads.group_by("policy", *by).agg(means).sort("policy", *by).collect()


def fate(heads: pl.LazyFrame) -> pl.DataFrame:
    """heads -> policy, part (one of FATES), order, mass: `fates` of whole policies, a row a part."""
    return (
        fates(heads)
        .unpivot(index="policy", variable_name="part", value_name="mass")
        .with_columns(order=pl.col("part").replace_strict({n: i for i, n in enumerate(FATES)}, return_dtype=pl.Int8))
        .sort("policy", "order")
    )


def roles(heads: pl.LazyFrame) -> pl.DataFrame:
    """heads -> role, first, last (decode steps), steps: which kinds of token the decode steps hold, per role ascending."""
    return (
        heads.group_by("role")
        .agg(pl.col("step").min().alias("first"), pl.col("step").max().alias("last"), pl.col("step").n_unique().alias("steps"))
        .sort("role")
        .collect()
    )


def dense_layers(heads: pl.LazyFrame) -> pl.DataFrame:
    """heads -> policy, layer: the layers of which a policy reads every head whole by rule."""
    whole = heads.group_by("policy", "layer").agg(pl.col("dense").all()).filter("dense")
    return whole.select("policy", "layer").sort("policy", "layer").collect()
