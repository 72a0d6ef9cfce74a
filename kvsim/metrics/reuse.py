"""What layers would miss with the pages of a layer below them, beside what they missed with their own (card D12)."""

from __future__ import annotations

import polars as pl

from kvsim.metrics.quality import ratio

KEYS = ("policy", "request", "layer", "q_head", "step")
WHOSE = {"head": "of the query head of the same number", "layer": "of all query heads together"}


def reused(reuse: pl.LazyFrame, heads: pl.LazyFrame) -> pl.DataFrame:
    """reuse and heads of a run -> policy, distance, whose (a value of WHOSE), pages, missed, missed_own, evidence_missed,
    evidence_missed_own, sorted.

    missed: the mean of dense attention mass that is on no page chosen by the layer `distance` below; missed_own: on no page chosen by
    the layer itself, over the same rows. evidence_...: of the dense mass on evidence, a ratio of sums."""
    own = reuse.filter(pl.col("distance") == 0).drop("distance")
    below = reuse.filter(pl.col("distance") > 0).join(own, on=KEYS, suffix="_own")
    rows = below.join(heads.select(*KEYS, "evidence_dense", "learned_sink_mass"), on=KEYS)
    found = []
    for prefix, whose in (("", WHOSE["head"]), ("layer_", WHOSE["layer"])):
        told: dict[str, pl.Expr] = {}
        for end in ("", "_own"):
            told |= {f"missed{end}": _missed(f"{prefix}mass_recall{end}").mean()}
            told |= {f"evidence_missed{end}": 1 - ratio(pl.col(f"{prefix}evidence_read{end}"), pl.col("evidence_dense"))}
        pages = pl.col(f"{prefix}pages").cast(pl.Float64).mean()
        found.append(rows.group_by("policy", "distance").agg(pages.alias("pages"), **told).with_columns(whose=pl.lit(whose)))
    return pl.concat(found).sort("policy", "distance", "whose").collect()


def _missed(recall: str) -> pl.Expr:
    return 1 - pl.col(recall).cast(pl.Float64) - pl.col("learned_sink_mass").cast(pl.Float64)
