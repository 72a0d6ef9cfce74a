"""Two replays of one trace beside each other: what changed, policy by policy, paired by context."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from kvsim.errors import WrongUse
from kvsim.metrics.interval import FEWEST, picks, sums
from kvsim.metrics.run import RunTables
from kvsim.metrics.traffic import RESIDENT, ROWS, SIDE

# What a policy is judged by -> which way is worse.
MEASURES = {
    "mass_recall": -1, "far_recall": -1, "evidence_recall": -1, "rel_l2": 1, "read_bytes": 1, "resident_bytes": 1,
}  # fmt: skip
KIB = {"read_bytes": ("read KiB", 1024, ".1f", "+.2f"), "resident_bytes": ("held KiB", 1024, ".1f", "+.2f")}
SCHEMA = {
    "first": pl.String, "second": pl.String, "measure": pl.String, "contexts": pl.Int64, "before": pl.Float64, "after": pl.Float64,
    "difference": pl.Float64, "low": pl.Float64, "high": pl.Float64, "worse": pl.Boolean,
}  # fmt: skip
LEAST = 1e-3  # a ratio over less says nothing


def compare(
    before: RunTables, after: RunTables, pair: tuple[str, str] | None = None, tolerance: float = 1e-3, seed: int = 0
) -> pl.DataFrame:
    """-> one row a pair of policies and measure (SCHEMA): both values, difference = after - before with its 95 % bootstrap interval over
    contexts (null below 8 of them), and whether it got worse.

    The same contexts are drawn for both sides, so what they share cancels. Policies are paired by their id; `pair` names one policy of
    each run instead. worse: beyond `tolerance` of the earlier value to the worse side, and the interval, where there is one, leaves zero
    out. Raises WrongUse: runs of different traces, layers or steps, or nothing to pair."""
    _same_rows(before, after)
    pairs = [pair] if pair else _shared(before, after)
    sides = [_sums(run, [p[i] for p in pairs]) for i, run in enumerate((before, after))]
    rows = [row for first, second in pairs for row in _rows(first, second, sides, tolerance, seed)]
    return pl.DataFrame(rows, SCHEMA, orient="row")


def _same_rows(before: RunTables, after: RunTables) -> None:
    sides = []
    for run in (before, after):
        trace, options = run.about.get("trace") or {}, run.about.get("options") or {}
        sides.append((trace.get("sha256"), options.get("layers"), options.get("steps")))
    for what, a, b in zip(("trace", "--layers", "--steps"), *sides, strict=True):
        if a != b:
            raise WrongUse(
                f"{before.path} and {after.path}: not of the same {what}, so their rows cannot be paired; replay both on the same"
            )


def _shared(before: RunTables, after: RunTables) -> list[tuple[str, str]]:
    there = {p.id for p in after.policies if p.rows}
    found = [(p.id, p.id) for p in before.policies if p.rows and p.id in there]
    if not found:
        raise WrongUse(f"{before.path} and {after.path}: no policy in both; name one of each with --policies FIRST SECOND")
    return found


def _sums(run: RunTables, policies: list[str]) -> pl.DataFrame:
    """policy, request, and of each measure its two sums, NAME_0 over NAME_1; sorted."""
    mine = pl.col("policy").is_in(policies)
    billed = {"read_bytes": pl.sum_horizontal(ROWS, *SIDE), "resident_bytes": pl.sum_horizontal(RESIDENT)}
    parts = [
        x
        for m, b in billed.items()
        for x in (b.cast(pl.Float64).sum().alias(f"{m}_0"), pl.len().cast(pl.Float64).alias(f"{m}_1"))
    ]
    bytes_ = run.ledger.filter(mine).group_by("policy", "request").agg(parts).collect()
    return sums(run.heads.filter(mine)).join(bytes_, on=["policy", "request"]).sort("policy", "request")


def _rows(first: str, second: str, sides: list[pl.DataFrame], tolerance: float, seed: int) -> list[tuple[Any, ...]]:
    a, b = (s.filter(pl.col("policy") == p) for s, p in zip(sides, (first, second), strict=True))
    a, b = a.join(b, on="request", how="semi"), b.join(a, on="request", how="semi")
    n = a.height
    drawn = picks(n, seed) if n >= FEWEST else None
    out = []
    for measure, worse_side in MEASURES.items():
        x, y = ((s[f"{measure}_0"].to_numpy(), s[f"{measure}_1"].to_numpy()) for s in (a, b))
        if min(x[1].sum(), y[1].sum()) < LEAST:  # no far tokens, no evidence
            continue
        before, after = x[0].sum() / x[1].sum(), y[0].sum() / y[1].sum()
        low = high = None
        if drawn is not None:
            with np.errstate(invalid="ignore", divide="ignore"):  # draws in which no context has far tokens
                changes = (drawn @ y[0]) / (drawn @ y[1]) - (drawn @ x[0]) / (drawn @ x[1])
            low, high = (float(q) for q in np.nanpercentile(changes, [2.5, 97.5]))
        change = float(after - before) * worse_side
        sure = low is None or high is None or low > 0 or high < 0
        out.append(
            (first, second, measure, n, before, after, after - before, low, high, bool(change > tolerance * abs(before) and sure))
        )
    return out


def lines(found: pl.DataFrame, label: dict[str, str]) -> list[str]:
    """What `kvsim compare` prints: a block a pair, a line a measure."""
    out = []
    for (first, second), rows in found.group_by("first", "second", maintain_order=True):
        name = label[str(first)] if first == second else f"{label[str(first)]} -> {label[str(second)]}"
        many = rows["contexts"][0]
        out.append(f"{name}  ({many} context{'s' * (many != 1)})")
        out += [_line(r) for r in rows.iter_rows(named=True)]
    return out


def _line(row: dict[str, Any]) -> str:
    """Bytes in KiB, as `kvsim show` has them."""
    said, unit, level, change = KIB.get(row["measure"], (row["measure"], 1, ".5g", "+.4g"))
    before, after = (f"{row[side] / unit:{level}}" for side in ("before", "after"))
    ends = [f"{row[end] / unit:{change}}" for end in ("low", "high") if row[end] is not None]
    interval, mark = f" [{', '.join(ends)}]" if ends else "", "  WORSE" if row["worse"] else ""
    return f"  {said:16} {before} -> {after}  {row['difference'] / unit:{change}}{interval}{mark}"
