"""The evidence table (`--plans`): of every evidence span, the dense mass and the part of it that was read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, Held
from kvsim.engine.reads import Picked
from kvsim.kernels.sparse import ALIVE


def evidence(block: Dense, held: Held, picked: Picked | None, wanted: NDArray[np.bool_]) -> dict[str, Any]:
    """Columns of one kv head's query heads: a row per evidence span and written step. Tokens not yet visible count as nothing."""
    n, group = len(block.t), block.group
    steps, rows = block.source.steps[block.index], np.repeat(wanted, group)
    page = None if picked is None else picked.pages.of_slots()
    parts: list[dict[str, Any]] = []
    for span in block.source.request.evidence:
        dense = block.mass_between(np.full(n, span.start), np.full(n, span.stop))
        slots = np.flatnonzero((held.pos >= span.start) & (held.pos < span.stop))
        read = np.repeat((held.flags[:, slots] & ALIVE).astype(bool)[:, None], group, 1)
        if picked is not None and page is not None:
            read &= picked.chosen[..., page[slots]]
        p = np.exp2(np.minimum(block.source.bend(held.dots[slots].astype(np.float64)) - block.lse, 0)).T[: block.rows]
        taken = np.minimum((p * read.reshape(block.rows, -1)).sum(1), dense)
        parts.append({"span": span.label, "dense": dense[rows], "read": taken[rows]})
    q_head = block.head * group + np.tile(np.arange(group), n)
    many = int(rows.sum())
    return {
        "q_head": np.tile(q_head[rows], len(parts)),
        "step": np.tile(np.repeat(steps, group)[rows], len(parts)),
        "span": [p["span"] for p in parts for _ in range(many)],
        "dense": np.concatenate([p["dense"] for p in parts]),
        "read": np.concatenate([p["read"] for p in parts]),
    }
