"""Measures that several questions share: what was lost, what it cost, and both at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from analyses.contexts import ROLES, Tables
from analyses.figures import mean, rows, share
from kvsim.metrics.traffic import RESIDENT, ROWS, side_bytes

LOST = {"mass recall": mean("mass_recall"), "output error": mean("rel_l2")}
EVIDENCE = {"evidence recall": share("evidence_read", "evidence_dense")}
ANSWER = ROLES[3]
UNIT = ("role", "policy", "layer")


def lost(heads: pl.DataFrame, line: str | pl.Expr = "policy", at: str | pl.Expr = "at") -> pl.DataFrame:
    """heads -> rows of mass recall and output error, and of answers (where a context has evidence) of evidence recall."""
    seen = heads.filter(pl.col("role") == ANSWER, pl.col("evidence_dense").is_not_null())
    return pl.concat([rows(heads, LOST, line, at), rows(seen, EVIDENCE, line, at)])


def billed(run: Tables, line: str | pl.Expr = "policy", at: str | pl.Expr = "at") -> pl.DataFrame:
    """-> rows of bytes read and bytes resident, index and metadata included, as shares of what full attention reads and holds."""
    ledger = run("ledger").with_columns(whole=whole(run))
    read, held = pl.col(ROWS) + side_bytes(), pl.sum_horizontal(RESIDENT)
    return rows(ledger, {"bytes read": share(read, "whole"), "bytes resident": share(held, "whole")}, line, at)


def at_bytes(run: Tables, shares: Sequence[float]) -> pl.DataFrame:
    """-> role, policy, layer, q_head, share, mass_recall, rel_l2: of every query head where the rows of the pages that its group reads together,
    and the index scanned for it, are this share of the bytes that full attention reads; straight between a policy's own budgets. Shares that
    some layer of the policy does not reach are left out."""
    cost = run("ledger").with_columns(whole=whole(run)).group_by(UNIT)
    each = cost.agg(side_bytes().cast(pl.Float64).mean().alias("side"), pl.col("whole").cast(pl.Float64).mean())
    curves = run("curves").join(each, on=UNIT).with_columns(share=(pl.col("read_bytes_mean") + pl.col("side")) / pl.col("whole"))
    found = []
    for key, curve in curves.sort("pages").group_by(*UNIT, "q_head", maintain_order=True):
        values = {m: _at(curve.drop_nulls(f"{m}_mean"), f"{m}_mean", shares) for m in ("mass_recall", "rel_l2")}
        frame = pl.DataFrame({"share": shares, **values})
        found.append(frame.with_columns(**{n: pl.lit(v) for n, v in zip((*UNIT, "q_head"), key, strict=True)}))
    every = pl.concat(found)
    short = every.filter(pl.col("mass_recall").is_nan() | pl.col("rel_l2").is_nan()).select("role", "policy", "share").unique()
    return every.join(short, on=["role", "policy", "share"], how="anti").with_columns(
        at=pl.format("{}%", (pl.col("share") * 100).round(0).cast(pl.Int64))
    )


def bytes_for(run: Tables, mass: float) -> pl.DataFrame:
    """-> role, policy, layer, rows, index, whole: the fewest bytes of rows that the group's heads read together until their mean recall is
    `mass`, and of summaries scanned, as shares of what full attention reads; all rows where no budget is enough. whole: bytes of that, of
    one kv head."""
    cost = run("ledger").with_columns(whole=whole(run)).group_by(UNIT)
    each = cost.agg(side_bytes().cast(pl.Float64).mean().alias("side"), pl.col("whole").cast(pl.Float64).mean())
    budgets = run("curves").group_by(*UNIT, "pages").agg(pl.col("mass_recall_mean", "read_bytes_mean").cast(pl.Float64).mean())
    first = pl.col("read_bytes_mean").filter(pl.col("mass_recall_mean") >= mass).min()
    needed = budgets.group_by(UNIT).agg(first.alias("rows")).join(each, on=UNIT)
    parts = needed.select(*UNIT, (pl.col("rows") / pl.col("whole")).fill_null(1), "whole", index=pl.col("side") / pl.col("whole"))
    return parts.sort(UNIT)


def doubling(age: pl.Expr) -> pl.Expr:
    """0, 1, 2 to 3, 4 to 7, … -> 0, 1, 2, 4, …"""
    return pl.when(age < 1).then(0).otherwise(2 ** (age.log(2) + 1e-9).floor()).cast(pl.Int64)


def _at(curve: pl.DataFrame, column: str, shares: Sequence[float]) -> list[float]:
    if curve.is_empty():
        return [float("nan")] * len(shares)
    return np.interp(shares, curve["share"], curve[column].cast(pl.Float64), left=np.nan, right=np.nan).tolist()


def whole(run: Tables) -> pl.Expr:
    row = pl.col("layer").replace_strict(run.row_bytes(), return_dtype=pl.Int64)
    return pl.col("visible_tokens").cast(pl.Int64) * row
