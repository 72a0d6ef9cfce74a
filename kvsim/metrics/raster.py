"""What one head kept and read, position by position and step by step, as few rectangles as its history has changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

KEPT, READ, CODED = 1, 2, 3
STATES = {KEPT: "kept, not read", READ: "read, full precision", CODED: "read, coded"}
GONE, FULL = 0, 2  # of the tiers table
LEVELS = 4  # shares are rounded up to quarters
COLUMNS = {"start": pl.Int64, "stop": pl.Int64, "first": pl.Int64, "last": pl.Int64, "state": pl.String, "share": pl.Float64}


class Place(NamedTuple):
    """One head of one context."""

    request: int
    layer: int
    kv_head: int
    q_head: int


REASONS = {  # why a head tells something -> what is largest there
    "looks at the evidence most": "looked",
    "misses most of the evidence": "lost",
    "has the largest output error": "error",
    "misses most attention mass": "missed",
}


def telling_places(heads: pl.LazyFrame, ledger: pl.LazyFrame) -> dict[str, Place]:
    """{why: head}: up to one head for each of REASONS, none twice, all in the context of the first. What policies lose is their mean.

    Without evidence in the context the first two are left out. Ties go to the lower context, layer and head."""
    where = ["request", "layer", "q_head"]
    sizes = {
        "looked": pl.col("evidence_dense"),
        "lost": pl.col("evidence_dense") - pl.col("evidence_read"),
        "error": pl.col("rel_l2"),
        "missed": pl.col("mass_evicted") + pl.col("mass_unread"),
    }
    table = (
        heads.group_by(where).agg(x.cast(pl.Float64).mean().fill_null(0).alias(n) for n, x in sizes.items()).sort(where).collect()
    )
    found: dict[str, Place] = {}
    for why, size in REASONS.items():
        if found:
            table = table.filter(pl.col("request") == next(iter(found.values())).request)
        best = table.sort(size, descending=True, maintain_order=True).row(0, named=True)
        place = Place(best["request"], best["layer"], best["q_head"] // _group(heads, ledger, best["layer"]), best["q_head"])
        if place not in found.values() and (best[size] > 0 or size == "error"):
            found[why] = place
    return found


def _group(heads: pl.LazyFrame, ledger: pl.LazyFrame, layer: int) -> int:
    """Query heads per kv head of a layer."""
    q, kv = (
        table.filter(pl.col("layer") == layer).select(pl.col(name).n_unique()).collect().item()
        for table, name in ((heads, "q_head"), (ledger, "kv_head"))
    )
    return max(1, q // kv)


def pages_recorded(plans: pl.LazyFrame, place: Place) -> dict[str, int]:
    """-> {policy: page size} of the policies whose read pages are in `plans` at this place."""
    rows = _plans(plans, place).group_by("policy").agg(pl.col("page_size").max()).sort("policy").collect()
    return dict(rows.select("policy", "page_size").iter_rows())


def raster(
    tables: dict[str, pl.LazyFrame], policy: str, place: Place, steps: Sequence[int], width: int, selective: bool
) -> pl.DataFrame:
    """-> rectangles start, stop (positions), first, last (steps, half-open), state (one of STATES), share, sorted.

    A cell is `width` positions at one of `steps`. It is "read" when any of its tokens is; share is the part of its tokens in that
    state, rounded up to quarters. Shown is what the step could read (before its own cut) and what it read; selective: the policy reads
    a part of what it keeps, so only what its plans name is read. Equal neighbours along the steps are one rectangle, and a step that
    was not sampled looks like the sampled one before it."""
    cells, shown = [], []
    for step, state in states(tables, policy, place, selective, steps):
        cells.append(_cells(state, width))
        shown.append(step)
    return _rectangles(cells, shown, width)


def states(
    tables: dict[str, pl.LazyFrame], policy: str, place: Place, selective: bool, steps: Sequence[int] | None = None
) -> Iterator[tuple[int, NDArray[np.int8]]]:
    """(step, i8[t + 1]: 0 where gone or out of the window, else KEPT, READ or CODED), of the steps asked for, ascending (None: all)."""
    mine = {n: tables[n].filter(pl.col("policy") == policy) for n in ("ledger", "plans", "tiers")}
    ledger = mine["ledger"].filter(at(place, kv_head=True), pl.lit(True) if steps is None else pl.col("step").is_in(list(steps)))
    rows = ledger.sort("step").collect()
    tiers = mine["tiers"].filter(at(place, kv_head=True)).select("step", "runs").sort("step").collect()
    plans = dict(
        _plans(mine["plans"], place).select("step", "pages", "page_size").collect().rows_by_key("step", named=True, unique=True)
    )
    changes = list(tiers.iter_rows(named=True))
    tier = np.full(1 + max(rows["pos"].to_list(), default=-1), FULL, np.int8)  # until a change says otherwise
    for row in rows.iter_rows(named=True):
        while changes and changes[0]["step"] < row["step"]:  # a cut comes after its step's attention
            for run in changes.pop(0)["runs"]:
                tier[run["start"] : run["stop"]] = run["tier"] & 3
        yield row["step"], _states(row, tier, plans.get(row["step"]), selective)


def at(place: Place, kv_head: bool = False) -> pl.Expr:
    """The rows of this place, by query head or by kv head."""
    head = pl.col("kv_head") == place.kv_head if kv_head else pl.col("q_head") == place.q_head
    return (pl.col("request") == place.request) & (pl.col("layer") == place.layer) & head


def _plans(plans: pl.LazyFrame, place: Place) -> pl.LazyFrame:
    """The pages this query head read, its own or its group's."""
    return plans.filter(at(place, kv_head=True), pl.col("q_head").is_in([-1, place.q_head]))


def _states(row: dict[str, Any], tier: NDArray[np.int8], plan: dict[str, Any] | None, selective: bool) -> NDArray[np.int8]:
    t = row["pos"]
    there = tier[: t + 1] != GONE
    there[: t + 1 - row["visible_tokens"]] = False
    read = np.full(t + 1, not selective)
    if plan and selective:
        for page in plan["pages"]:
            read[page * plan["page_size"] : (page + 1) * plan["page_size"]] = True
    state = np.where(read, np.where(tier[: t + 1] == FULL, READ, CODED), KEPT)
    return np.where(there, state, 0).astype(np.int8)


def _cells(state: NDArray[np.int8], width: int) -> NDArray[np.int16]:
    """i16[cells]: 10 · state + level of each run of `width` positions, 0 where nothing is left."""
    cuts = np.arange(0, len(state), width)
    size = np.diff(np.append(cuts, len(state)))
    count = {s: np.add.reduceat(state == s, cuts, dtype=np.int64) for s in STATES}
    read = np.where(count[CODED] > count[READ], CODED, READ)
    shown = np.where(count[READ] + count[CODED] > 0, read, np.where(count[KEPT] > 0, KEPT, 0))
    part = np.choose(shown, [np.zeros_like(size), count[KEPT], count[READ], count[CODED]]) / size
    return (10 * shown + np.ceil(part * LEVELS)).astype(np.int16)


def _rectangles(cells: list[NDArray[np.int16]], steps: list[int], width: int) -> pl.DataFrame:
    if not cells:
        return pl.DataFrame(schema=COLUMNS)
    grid = np.zeros((len(cells), max(map(len, cells))), np.int16)
    for i, c in enumerate(cells):
        grid[i, : len(c)] = c
    ends = [*steps[1:], steps[-1] + 1]
    rows = []
    for cell, column in enumerate(grid.T):
        cut = np.flatnonzero(np.diff(column, prepend=-1))
        for a, b in zip(cut, [*cut[1:], len(column)], strict=True):
            if column[a]:
                state, level = divmod(int(column[a]), 10)
                rows.append((cell * width, (cell + 1) * width, steps[a], ends[b - 1], STATES[state], level / LEVELS))
    return pl.DataFrame(rows, COLUMNS, orient="row")
