"""Which layers bear sparsity: what the likelihood loses when a policy acts in a few layers and all others attend to everything."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import numpy as np
import polars as pl

from kvsim.metrics.interval import FEWEST, picks
from kvsim.metrics.live_study import FULL, Study

LIMIT = 0.01  # nats a token: below it a layer bears what was done to it
SCHEMA = {
    "policy": pl.String, "layers": pl.String, "first_layer": pl.Int64, "contexts": pl.Int64, "d_nll": pl.Float64, "low": pl.Float64,
    "high": pl.Float64, "reduction": pl.Float64,
}  # fmt: skip


def tried(study: Study) -> dict[str, tuple[str, list[int]]]:
    """By the id of a row: the policy and the layers that it acts in, of rows that attend to everything elsewhere."""
    found = {}
    for told in study.about["policies"]:
        try:
            book = tomllib.loads(told["form"])
        except tomllib.TOMLDecodeError:  # an expression: the same in every layer
            continue
        layers, rest = book.get("layers", {}), book.get("default")
        if rest == FULL and len(set(layers.values())) == 1 and not book.get("heads"):
            found[told["id"]] = next(iter(layers.values())), sorted(map(int, layers))
    return found


def sensitivity(study: Study, seed: int = 0) -> pl.DataFrame:
    """-> SCHEMA, sorted: of every policy in every group of layers, the NLL that it adds a token of the forced run's answer or text, mean over
    contexts, with its 95 % bootstrap interval over them (null below 8); reduction: how many times fewer tokens these layers read."""
    acts = tried(study)
    answers = study.table("answers").filter(pl.col("mode") == "forced").with_columns(lost=pl.col("nll") - pl.col("full_nll"))
    lost = answers.group_by("policy", "context").agg(pl.col("lost").cast(pl.Float64).mean()).sort("policy", "context").collect()
    reads = study.table("layers").group_by("policy", "layer").agg(pl.col("read_tokens").cast(pl.Float64).mean()).collect()
    rows = []
    for name, (policy, layers) in acts.items():
        mine = lost.filter(pl.col("policy") == name)["lost"].to_numpy()
        here = pl.col("layer").is_in(layers)
        full, own = (float(reads.filter(pl.col("policy") == p, here)["read_tokens"].to_numpy().sum()) for p in (FULL, name))
        low = high = None
        if len(mine) >= FEWEST:
            drawn = picks(len(mine), seed) @ mine / len(mine)
            low, high = np.percentile(drawn, [2.5, 97.5]).tolist()
        label = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
        rows.append((policy, label, layers[0], len(mine), float(mine.mean()), low, high, full / own if own else None))
    return pl.DataFrame(rows, SCHEMA, orient="row").sort("policy", "first_layer")


def borne(frame: pl.DataFrame, limit: float = LIMIT) -> pl.DataFrame:
    """`sensitivity` -> layers, first_layer, policy, reduction, d_nll, low, high: of each group the row of the largest reduction whose upper end
    (without an interval: whose mean) is at most `limit`; null where none is."""
    fits = frame.filter(pl.col("high").fill_null(pl.col("d_nll")) <= limit)
    best = fits.sort("reduction", descending=True).group_by("layers", maintain_order=True).first()
    groups = frame.select("layers", "first_layer").unique().sort("first_layer")
    return groups.join(best.drop("first_layer", "contexts"), on="layers", how="left").sort("first_layer")


def lines(study: Study) -> Iterator[str]:
    """As text."""
    frame = sensitivity(study)
    for row in frame.iter_rows(named=True):
        between = "" if row["low"] is None else f" ({row['low']:+.4f} to {row['high']:+.4f})"
        yield f"layers {row['layers']:7} NLL {row['d_nll']:+.4f}{between}, reads {row['reduction']:.1f} times fewer: {row['policy']}"
    for row in borne(frame).iter_rows(named=True):
        best = "nothing tried" if row["policy"] is None else f"{row['reduction']:.1f} times fewer by {row['policy']}"
        yield f"layers {row['layers']:7} bear, at most {LIMIT} nats a token: {best}"
