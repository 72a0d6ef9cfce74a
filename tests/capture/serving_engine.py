"""A serving engine of random numbers: layers whose queries, keys and values are drawn for every (request, layer, position), so that
they are the same in whatever forwards they come; outputs are attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvsim.capture.serving import Engine, Part
from kvsim.geometry import Layer
from kvsim.trace.reference import attend
from kvsim.trace.shapes import layers_of

TOTAL, DIM = 64, 8
PLAIN: dict[str, Any] = {
    "kind": "full",
    "q_heads": 4,
    "kv_heads": 2,
    "key_dim": DIM,
    "value_dim": DIM,
    "scale": DIM**-0.5,
    "row_bytes": 64,
}
ROWS: list[dict[str, Any]] = [
    PLAIN | {"layer": 0, "captured": True},
    PLAIN | {"layer": 1, "kind": "sliding", "window": 12, "softcap": 3.0, "sinks": [0.0, 0.5, 1.0, 1.5], "captured": True},
]
LAYERS = layers_of(ROWS, "float32", "layers")
ENGINE = Engine(ROWS, "float32", {"model": "random"}, {"tool": "test"})


@cache
def drawn(request: str, layer: int) -> tuple[np.ndarray, ...]:
    """q [TOTAL, Hq, d], k and v [TOTAL, Hkv, d], out [TOTAL, Hq, d] of a whole request."""
    spec = LAYERS[layer]
    rng = np.random.default_rng([layer, *request.encode()])
    q, k, v = (rng.standard_normal((TOTAL, h, DIM)).astype(np.float32) for h in (spec.q_heads, spec.kv_heads, spec.kv_heads))
    return q, k, v, attended(spec, q, k, v)


def attended(spec: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    out = np.empty_like(q)
    for h in range(spec.kv_heads):
        heads = slice(h * spec.group, (h + 1) * spec.group)
        p, _ = attend(q[:, heads].astype(float), np.arange(len(q)), k[:, h].astype(float), spec, h)
        out[:, heads] = p @ v[:, h].astype(float)
    return out


def rows(parts: Sequence[Part], layer: int, padding: int = 0) -> list[torch.Tensor]:
    """q, k, v, out of a forward, packed over its requests, with rows of padding behind."""
    found = [[x[p.start : p.start + p.count] for x in drawn(p.request, layer)] for p in parts]
    packed = [np.concatenate(x) for x in zip(*found, strict=True)]
    return [torch.from_numpy(np.concatenate([x, np.full((padding, *x.shape[1:]), np.nan, np.float32)])) for x in packed]


def tokens(request: str) -> list[int]:
    """The ids of a request, all TOTAL of them."""
    return np.random.default_rng([7, *request.encode()]).integers(0, 97, TOTAL).tolist()


def ids(parts: Sequence[Part]) -> list[int]:
    return [i for p in parts for i in tokens(p.request)[p.start : p.start + p.count]]
