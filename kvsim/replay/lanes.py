"""What the trace holds of one (request, layer), as the engine takes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.source import Source
from kvsim.geometry import BEFORE, Layer, Request
from kvsim.policies.protocol import Chain
from kvsim.trace.bits import Raw, widen
from kvsim.trace.open import Lane, Trace


def source_of(lane: Lane, before: Raw | None = None) -> Source:
    """The arrays of a trace as the engine takes them. before: raw queries of the attention layer before."""
    indexer = lane.indexer and replace(lane.indexer, q=_single(lane.indexer.q), k=_single(lane.indexer.k))
    return Source(
        layer=lane.layer,
        request=lane.request,
        k=lane.k,
        v=lane.v,
        steps=lane.steps,
        t=lane.t,
        q=_single(lane.q),
        window_q=_single(lane.window_q),
        k_pre=lane.k_pre,
        mass=lane.mass,
        wo_norm=lane.wo_norm,
        q_stats=lane.q_stats,
        indexer=indexer,
        before=None if before is None else _single(before),
    )


def source_for(trace: Trace, request: Request, layer: Layer, chains: Iterable[Chain]) -> tuple[Lane, Source]:
    """One (request, layer) with all that these chains need, which replay.needs has found to be there."""
    lane = trace.lane(request, layer)
    if any(BEFORE in part.needs for chain in chains for part in chain.parts) and (before := layer_before(trace, layer)):
        return lane, source_of(lane, trace.decode_queries(request, before)[1])
    return lane, source_of(lane)


def layer_before(trace: Trace, layer: Layer) -> Layer | None:
    """The attention layer before, captured or not; None before the first."""
    below = [i for i in layer.among if i < layer.id]
    return next((x for x in trace.layers if below and x.id == below[-1]), None)


def _single(x: Raw) -> NDArray[np.float32]:
    return widen(x).astype(np.float32)
