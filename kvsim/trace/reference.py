"""Dense attention of one kv head in float64 numpy, from its definition: what traces are made with and checked against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsim.geometry import Layer

Doubles = NDArray[np.float64]


def attend(
    q: Doubles, t: NDArray[np.int64], k: Doubles, layer: Layer, kv_head: int, read: NDArray[np.bool_] | None = None
) -> tuple[Doubles, Doubles]:
    """Queries [n, G, dk] at positions t [n] over keys [T, dk] -> probabilities [n, G, T], log of the softmax denominator [n, G].

    The query at t sees the keys up to t, in a sliding layer the last `window` of them, and of those what it may read [n, T]; learned sinks
    join the denominator only."""
    logit = layer.scale * (q @ k.T)
    if layer.softcap is not None:
        logit = layer.softcap * np.tanh(logit / layer.softcap)
    pos, first = np.arange(len(k)), layer.first_of_each(t)
    visible = (pos <= t[:, None]) & (pos >= first[:, None])
    visible = visible if read is None else visible & read
    logit = np.where(visible[:, None, :], logit, -np.inf)
    heads = slice(kv_head * layer.group, (kv_head + 1) * layer.group)
    sink = np.full(layer.group, -np.inf) if layer.sinks is None else np.array(layer.sinks[heads])
    top = np.maximum(logit.max(axis=2), sink)
    weight = np.exp(logit - top[:, :, None])
    denominator = weight.sum(axis=2) + np.exp(sink - top)
    return weight / denominator[:, :, None], top + np.log(denominator)
