"""A run on several devices that share a layer by heads or by channels: what they exchange, and how unevenly they read (card A11).

Neither changes what is read, so it is told from any run. Devices that share the pages are a policy's own: quest(shards=...)."""

from __future__ import annotations

import polars as pl

from kvsim.errors import WrongUse
from kvsim.metrics.run import RunTables

NUMBER = 4  # bytes of a partial sum
STEP = ["policy", "request", "layer", "step"]


def by_heads(run: RunTables, ranks: int) -> pl.DataFrame:
    """kv heads dealt to `ranks` devices in runs, larger first; each ranks and attends for its own, and nothing is exchanged -> policy,
    layer, ranks, collective_bytes (0), page_imbalance, page_imbalance_max: pages that the busiest device reads over the mean of all,
    meaned over steps and the largest; null without pages.

    Raises WrongUse for more devices than a layer has kv heads."""
    heads = _least(run, "kv_heads", ranks)
    step = run.ledger.join(heads, on="layer").with_columns(rank=_dealt(pl.col("kv_head"), pl.col("kv_heads"), ranks))
    device = step.group_by(*STEP, "rank").agg(_all("read_pages"))
    found = device.group_by(STEP).agg(_all("read_pages").alias("all"), pl.col("read_pages").max().alias("most"))
    uneven = pl.when(pl.col("all") > 0).then(pl.col("most") * ranks / pl.col("all"))
    return (
        found.group_by("policy", "layer")
        .agg(uneven.mean().alias("page_imbalance"), uneven.max().alias("page_imbalance_max"))
        .select(
            "policy",
            "layer",
            pl.lit(ranks).alias("ranks"),
            pl.lit(0.0).alias("collective_bytes"),
            "page_imbalance",
            "page_imbalance_max",
        )
        .sort("policy", "layer")
        .collect()
    )


def by_channels(run: RunTables, ranks: int) -> pl.DataFrame:
    """Channels of keys and values dealt to `ranks` devices: each has a part of every dot product, and the parts are summed -> policy, layer,
    ranks, score_bytes, logit_bytes, collective_bytes: of a layer and step, meaned.

    A box's bound is a sum over channels, so every device tells its part for every page that was scanned and query head (score_bytes), and
    its part of every logit that was read (logit_bytes), 4 bytes each. Outputs need no exchange, and every device reads its channels of
    the same pages. Raises WrongUse for more devices than a key has channels."""
    _least(run, "key_dim", ranks)
    scanned = run.ledger.group_by(STEP).agg(pl.col("index_bytes").sum() > 0).rename({"index_bytes": "scanned"})
    step = run.heads.group_by(STEP).agg(pl.col("held_pages").cast(pl.Int64).sum(), pl.col("read_tokens").cast(pl.Int64).sum())
    scores = pl.when(pl.col("scanned")).then(pl.col("held_pages")).otherwise(0)
    return (
        step.join(scanned, on=STEP)
        .with_columns(score_bytes=scores * ranks * NUMBER, logit_bytes=pl.col("read_tokens") * ranks * NUMBER)
        .group_by("policy", "layer")
        .agg(pl.col("score_bytes").mean(), pl.col("logit_bytes").mean())
        .select(
            "policy",
            "layer",
            pl.lit(ranks).alias("ranks"),
            "score_bytes",
            "logit_bytes",
            (pl.col("score_bytes") + pl.col("logit_bytes")).alias("collective_bytes"),
        )
        .sort("policy", "layer")
        .collect()
    )


def _least(run: RunTables, what: str, ranks: int) -> pl.LazyFrame:
    """layer and `what` of every layer replayed. Raises WrongUse where it does not reach for all ranks."""
    there = run.ledger.select("layer").unique()
    schema = {"layer": pl.Int16, what: pl.Int64}
    layers = pl.LazyFrame([{"layer": x["layer"], what: x[what]} for x in run.about["layers"]], schema=schema).join(
        there, on="layer"
    )
    few = layers.filter(pl.col(what) < ranks).sort("layer").collect()
    if ranks < 1 or not few.is_empty():
        most = layers.select(pl.col(what).min()).collect().item()
        raise WrongUse(f"ranks={ranks}: expected 1 to {int(most)}, as many as every layer has {what}")
    return layers


def _dealt(nth: pl.Expr, many: pl.Expr, ranks: int) -> pl.Expr:
    """The device of the nth of `many`: runs of sizes that differ by at most one, larger first."""
    small, larger = many // ranks, many % ranks
    late = nth - larger * (small + 1)
    return pl.when(late < 0).then(nth // (small + 1)).otherwise(larger + late // small)


def _all(column: str) -> pl.Expr:
    """The sum, null where one is."""
    return pl.when(pl.col(column).is_not_null().all()).then(pl.col(column).cast(pl.Int64).sum()).alias(column)
