"""What a decode step launches: groups of one kernel class with their shape and bytes, rows of samples whose time is not known yet.

The joint between what was counted (a ledger, or a fixed budget and lengths) and what it costs (kvsim.cost.price)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from kvsim.cost.heads import Geometry
from kvsim.cost.samples import SCHEMA

ON_HOST = ("host_fetch", "ssd_fetch")  # what can run beside the rest of the step


@dataclass(frozen=True)
class Launch:
    """One group: `n` launches of one class over `layers` layers alike. bytes are of all of them; batch, context and pages of one layer.

    context: tokens that a request's kv head reads, the mean of the batch; pages: of one kv head, all requests together."""

    cls: str
    bytes: int | None
    layers: int
    n: int
    batch: int
    context: int | None = None
    pages: int | None = None
    page: int | None = None
    kv_bits: int | None = None


TABLE: dict[str, Any] = {"step": pl.Int64} | SCHEMA


def table(steps: Sequence[Sequence[Launch]], heads: Geometry, graph: str | None = None) -> pl.DataFrame:
    """Launches of each step -> one table, `step` the place in `steps`; otherwise the columns of samples, cache "cold".

    In a model the layers displace each other from the cache, and the weights pass between them. graph: eager, piecewise or full."""
    same = {"q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim, "cache": "cold", "graph": graph}
    rows = [{"step": i} | _row(launch, heads) | same for i, launches in enumerate(steps) for launch in launches]
    return pl.DataFrame([{name: row.get(name) for name in TABLE} for row in rows], schema=TABLE, orient="row")


def _row(launch: Launch, heads: Geometry) -> dict[str, Any]:
    row = {name: x for name, x in vars(launch).items() if name != "cls"}
    return row | {"class": launch.cls, "kv_bits": launch.kv_bits or heads.kv_bits, "variant": "", "status": "ok"}
