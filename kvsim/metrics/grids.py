"""What every head read under every policy, as text short enough for one page to hold; and what each pair of policies read alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.metrics.raster import CODED, KEPT, READ, Place, states

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"  # two cells a letter
LEVELS = 3  # how full a cell that is read may be
PAIRS: dict[str, Any] = {
    "first": pl.String, "second": pl.String, "layer": pl.Int16, "both": pl.Float64, "only_first": pl.Float64, "only_second": pl.Float64,
    "evidence_first": pl.Float64, "evidence_second": pl.Float64,
}  # fmt: skip
CELLS = {"policy": pl.String, "layer": pl.Int16, "q_head": pl.Int16, "cells": pl.String}


class Grid(NamedTuple):
    """Steps down, `across` cells of `width` positions each."""

    steps: Sequence[int]
    width: int
    across: int


def grids(
    tables: dict[str, pl.LazyFrame],
    selective: Mapping[str, bool],
    places: Sequence[Place],
    grid: Grid,
    evidence: NDArray[np.bool_],
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """tables of a run, {policy: whether it reads a part of what it holds}, heads of one context, bool[total] -> (CELLS, PAIRS).

    A cell is 0 where nothing is left, 1 kept and not read, 2 to 4 read, 5 to 7 read and mostly coded, by thirds of its tokens that are
    read; row by row, ALPHABET[first + 8 * second] for two cells. Pairs: tokens a head reads in one of `steps`, means over the heads
    of a layer, of all ordered pairs of policies; what is read is what metrics.difference calls so."""
    loaded = {n: tables[n].filter(pl.col("request") == places[0].request).collect() for n in ("ledger", "plans", "tiers")}
    parts = {n: t.partition_by("policy", "layer", "kv_head", as_dict=True) for n, t in loaded.items()}
    rows, shared = [], dict[int, list[NDArray[np.float64]]]()
    for place in places:
        seen = []
        for policy, part in selective.items():
            key = (policy, place.layer, place.kv_head)
            mine = {n: parts[n].get(key, loaded[n].clear()).lazy() for n in parts}
            seen.append(dict(states(mine, policy, place, part, grid.steps)))
            rows.append((policy, place.layer, place.q_head, text(seen[-1], grid)))
        shared.setdefault(place.layer, []).append(_alike(seen, grid.steps, evidence))
    means = {layer: np.mean(found, axis=0) for layer, found in shared.items()}
    return pl.DataFrame(rows, CELLS, orient="row"), pl.DataFrame(_pairs(list(selective), means), PAIRS, orient="row")


def text(seen: Mapping[int, NDArray[np.int8]], grid: Grid) -> str:
    """{step: i8[tokens]} of metrics.raster -> the cells of a head."""
    codes = np.zeros(len(grid.steps) * grid.across + 1, np.int64)  # one more, or an odd last cell has no second
    for i, step in enumerate(grid.steps):
        if step in seen:
            row = _cells(seen[step], grid.width)
            codes[i * grid.across : i * grid.across + len(row)] = row
    return "".join(ALPHABET[a + 8 * b] for a, b in zip(codes[:-1:2], codes[1::2], strict=True))


def _cells(state: NDArray[np.int8], width: int) -> NDArray[np.int64]:
    cuts = np.arange(0, len(state), width)
    size = np.diff(np.append(cuts, len(state)))
    kept, read, coded = (np.add.reduceat(state == s, cuts, dtype=np.int64) for s in (KEPT, READ, CODED))
    level = np.ceil(LEVELS * (read + coded) / size).astype(np.int64)
    return np.where(level > 0, 1 + level + LEVELS * (coded > read), np.minimum(kept, 1))


def _alike(
    seen: Sequence[Mapping[int, NDArray[np.int8]]], steps: Sequence[int], evidence: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """f64[P, P + 1]: tokens that two policies both read in a step, those of evidence that one reads; means over steps."""
    there = [s for s in steps if all(s in one for one in seen)]
    out = np.zeros((len(seen), len(seen) + 1))
    for step in there:
        read = np.stack([one[step] >= READ for one in seen]).astype(np.float32)  # counts below 2**24 are exact
        out[:, :-1] += read @ read.T
        out[:, -1] += read[:, evidence[: read.shape[1]]].sum(1)
    return out / max(1, len(there))


def _pairs(policies: Sequence[str], means: Mapping[int, NDArray[np.float64]]) -> Iterable[tuple[Any, ...]]:
    for layer, m in sorted(means.items()):
        for i, first in enumerate(policies):
            for j, second in enumerate(policies):
                yield first, second, layer, m[i, j], m[i, i] - m[i, j], m[j, j] - m[i, j], m[i, -1], m[j, -1]
