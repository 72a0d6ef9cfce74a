"""The noise floor: how far the attention output that a capture recorded lies from dense attention over its own q, k and v.

That is the rounding of the model itself: an output error below it says nothing about a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvsim.trace.bits import widen
from kvsim.trace.open import Lane
from kvsim.truth.dense import dense

SAMPLE = 64  # decode steps, evenly spread


def noise_floor(lane: Lane) -> dict[str, float] | None:
    """-> median and p95 over steps and query heads of |recorded - dense| / |dense|, each an L2 norm; None without recorded outputs, or
    where the model's own indexer kept tokens out of them."""
    if lane.out is None or not len(lane.steps) or lane.sparse:
        return None
    some = np.unique(np.linspace(0, len(lane.steps) - 1, min(len(lane.steps), SAMPLE)).astype(np.int64))
    exact = dense(replace(lane, steps=lane.steps[some], t=lane.t[some], q=lane.q[some]), top=0).out
    assert exact is not None
    recorded = widen(lane.out[some]).astype(np.float64).swapaxes(0, 1)
    far, size = np.linalg.norm(recorded - exact, axis=-1), np.linalg.norm(exact, axis=-1)
    error = (far / np.where(size > 0, size, np.nan)).ravel()
    error = error[np.isfinite(error)]  # a recorded output may overflow its dtype
    if not len(error):
        return None
    return {"median": float(np.median(error)), "p95": float(np.percentile(error, 95))}
