"""Evicted, and needed again (cards D7, D10, N40): where dense attention looks for tokens that are gone, by how long they have been gone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense
from kvsim.engine.bank import Record
from kvsim.engine.source import Source
from kvsim.kernels.lags import mass_by_lag
from kvsim.kernels.sparse import ALIVE

NEVER = np.iinfo(np.int64).max // 2
NEEDED = 10  # tokens of highest dense logit that a step is said to need


def died(source: Source, record: Record, head: int) -> NDArray[np.int64]:
    """i64[T]: the step at whose cut each token of a kv head was evicted (-1: after prefill), NEVER for the others. Tokens that a sliding
    window left behind were not evicted."""
    prompt, out = source.request.prompt, np.full(source.request.total, NEVER)
    start = record.start[head, :prompt]
    out[:prompt][(start & ALIVE) == 0] = -1
    for step, changes in zip(source.steps.tolist(), record.changes, strict=True):
        for h, pos, flags in changes:
            if h == head:
                out[pos[(flags & ALIVE) == 0]] = step
    return out


def lags(block: Dense, died: NDArray[np.int64]) -> dict[str, Any]:
    """Columns [N * G] of the lags table. lag: steps since the cut that evicted a token, 1 at the next step.

    mass: dense probability on evicted tokens by lag in [1, 2), [2, 4), [4, 8) ...; needed: how many tokens of highest logit are looked
    for; again, again_lag: those of them that are gone, in order of logit; evicted_tokens: how many were evicted before the step."""
    src, steps = block.source, block.source.steps[block.index]
    mass = np.zeros((block.rows, int(steps[-1] + 1).bit_length()))
    unit, cap = np.float32(src.unit), np.float32(src.cap)
    mass_by_lag(block.dots, block.first, block.t, block.group, died, steps, unit, cap, block.lse, mass)
    best, many = block.top
    step = np.repeat(steps, block.group)
    best, many = best[:, :NEEDED], np.minimum(many, NEEDED)
    lag = step[:, None] - died[np.where(np.arange(best.shape[1]) < many[:, None], best, 0)]
    gone = (lag > 0) & (np.arange(best.shape[1]) < many[:, None])
    evicted = (died < steps[:, None]).sum(1)
    return {
        "mass": [row[: int(s + 1).bit_length()] for row, s in zip(mass.astype(np.float32), step, strict=True)],
        "needed": many,
        "again": [row[hit] for row, hit in zip(best, gone, strict=True)],
        "again_lag": [row[hit] for row, hit in zip(lag, gone, strict=True)],
        "evicted_tokens": np.repeat(evicted, block.group),
    }
