"""What a decode step launches: groups of one kernel class with their shape and bytes, rows of samples whose time is not known yet.

The joint between what was counted (a ledger, or a fixed budget and lengths) and what it costs (kvsim.cost.price)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from kvsim.cost.heads import Geometry
from kvsim.cost.samples import SCHEMA

MOVES = ("host_fetch", "ssd_fetch", "tier_move", "collective")  # of bytes, whatever the heads, the batch and the context are
FETCHES = ("host_fetch", "ssd_fetch")  # what can run beside the rest of the step
SCORES = ("fused_lse", "second_pass", "sdpa_fallback")
SCORES_AT = ("steps", "events")
DEQUANT = ("separate", "fused")


@dataclass(frozen=True)
class Kernels:
    """How an engine does what a policy asks, where there is a choice.

    scores, where a policy looks at probabilities that a fused kernel does not give:
        fused_lse      the kernel gives log-sum-exp; keys are read once more and summed up at once
        second_pass    keys are read once more, probabilities written and read
        sdpa_fallback  attention runs unfused: logits and probabilities written and read, K and V copied out for every query head
    scores_at: every step, or only events, steps that change what is held. dequant: rows are decoded by a kernel of their own, which reads
    codes and writes 16-bit rows that attention reads, or inside attention."""

    scores: str = "second_pass"
    scores_at: str = "steps"
    dequant: str = "separate"


def score_factors(scores: str, group: int) -> tuple[float, float, float]:
    """Bytes of the `scores` class: (times the keys read, times the values read, times the probabilities as they are written and read)."""
    copies = 2.0 * group if group > 1 else 0.0
    return {"fused_lse": (1.0, 0.0, 0.0), "second_pass": (1.0, 0.0, 1.0), "sdpa_fallback": (copies, copies, 2.0)}[scores]


@dataclass(frozen=True)
class Launch:
    """One group: `n` launches of one class over `layers` layers alike. bytes are of all of them; batch, context and pages of one layer.

    context: tokens that a request's kv head holds or reads, the mean of the batch; pages: of one kv head, all requests together."""

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
