"""What the trace holds of one (request, layer), as the engine takes it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvsim.engine.source import Source
from kvsim.trace.bits import widen
from kvsim.trace.open import Lane


def source_of(lane: Lane) -> Source:
    """The arrays of a trace as the engine takes them."""
    return Source(
        layer=lane.layer,
        request=lane.request,
        k=lane.k,
        v=lane.v,
        steps=lane.steps,
        t=lane.t,
        q=widen(lane.q).astype(np.float32),
        window_q=widen(lane.window_q).astype(np.float32),
        k_pre=lane.k_pre,
        mass=lane.mass,
        wo_norm=lane.wo_norm,
        q_stats=lane.q_stats,
        indexer=lane.indexer and replace(lane.indexer, **{x: widen(getattr(lane.indexer, x)).astype(np.float32) for x in "qk"}),
    )
