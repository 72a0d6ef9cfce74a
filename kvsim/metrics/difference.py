"""Which tokens two policies of one run read differently, head by head and step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.errors import BadTrace, WrongUse
from kvsim.metrics.raster import READ, Place, states
from kvsim.metrics.run import RunTables

RUN = pl.Struct({"start": pl.Int32, "stop": pl.Int32})  # half-open positions
SCHEMA: dict[str, Any] = {
    "request": pl.Int32, "layer": pl.Int16, "q_head": pl.Int16, "step": pl.Int32, "both": pl.Int32, "only_first": pl.Int32,
    "only_second": pl.Int32, "evidence_first": pl.Int32, "evidence_second": pl.Int32, "first_runs": pl.List(RUN), "second_runs": pl.List(RUN),
}  # fmt: skip


def difference(
    run: RunTables, first: str, second: str, *, layers: Sequence[int] | None = None, requests: Sequence[int] | None = None
) -> pl.DataFrame:
    """-> one row a context, layer, query head and step (SCHEMA): tokens that both policies read, that one alone read, how many tokens of
    evidence each read, and the runs of positions that one alone read.

    What is read is what is held (coded or not) and, where a policy reads a part of it, on the pages that it read. Raises WrongUse: the
    pages of such a policy were not written down."""
    unread = dict(run.heads.group_by("policy").agg(pl.col("mass_unread").max() > 0).collect().rows())
    paged = set(run.tables["plans"].select(pl.col("policy").unique()).collect()["policy"])
    for policy in (first, second):
        if unread[policy] and policy not in paged:
            raise WrongUse(f"{run.path}: which pages {policy} read was not written down; replay with --plans")
    rows = []
    for place in _places(run, layers, requests):
        evidence = _evidence(run, place.request)
        sides = [states(run.tables, policy, place, unread[policy]) for policy in (first, second)]
        for (step, a), (_, b) in zip(*sides, strict=True):
            x, y = a >= READ, b >= READ
            seen = evidence[: len(x)]
            numbers = [int(m.sum()) for m in (x & y, x & ~y, y & ~x, x & seen, y & seen)]
            rows.append((place.request, place.layer, place.q_head, step, *numbers, _runs(x & ~y), _runs(y & ~x)))
    return pl.DataFrame(rows, SCHEMA, orient="row")


def by_layer(found: pl.DataFrame) -> pl.DataFrame:
    """The differences -> one row a layer: mean tokens per head and step, alike = both / (both + only one), a ratio of sums."""
    whole = pl.sum_horizontal(pl.col("both", "only_first", "only_second").sum())
    means = [
        pl.col(n).cast(pl.Float64).mean() for n in ("both", "only_first", "only_second", "evidence_first", "evidence_second")
    ]
    return found.group_by("layer").agg((pl.col("both").sum() / whole).alias("alike"), *means).sort("layer")


def _places(run: RunTables, layers: Sequence[int] | None, requests: Sequence[int] | None) -> Iterator[Place]:
    """Every query head of the layers and contexts asked for, with its kv head. Raises WrongUse: there is none."""
    kept = [pl.col(n).is_in(list(x)) for n, x in (("layer", layers), ("request", requests)) if x is not None]
    heads = (
        run.heads.filter(kept or True).select("request", "layer", "q_head").unique().sort("request", "layer", "q_head").collect()
    )
    kv = dict(run.ledger.group_by("layer").agg(pl.col("kv_head").n_unique()).collect().rows())
    if heads.is_empty():
        raise WrongUse(f"{run.path}: no such layers or requests in this run")
    for (request, layer), rows in groupby(heads.iter_rows(), key=lambda row: row[:2]):
        q_heads = [row[2] for row in rows]
        for i, q_head in enumerate(q_heads):
            yield Place(request, layer, i * kv[layer] // len(q_heads), q_head)


def _evidence(run: RunTables, request: int) -> NDArray[np.bool_]:
    """bool[total]: positions of evidence."""
    told = next((r for r in run.requests if r["request"] == request), None)
    if told is None or told.get("total_tokens") is None:
        raise BadTrace(f"{run.path / 'run.json'}: nothing of the tokens of request {request}; replay again")
    out = np.zeros(told["total_tokens"], bool)
    for span in told.get("spans") or []:
        if span.get("kind") == "evidence":
            out[span["start"] : span["stop"]] = True
    return out


def _runs(mask: NDArray[np.bool_]) -> list[dict[str, int]]:
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return [{"start": int(a), "stop": int(b)} for a, b in edges]
