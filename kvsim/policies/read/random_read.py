"""random_read(): pages drawn anew for every query; the floor that a ranking has to beat.

A score is a hash of (seed, request, layer, position, query head, page) and of nothing else, so no batching can change it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.policies.protocol import Floats, Read, View, expect

Words = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class random_read(Read):
    act = "reads pages drawn at random"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "seed", self.seed >= 0, "0 or more")

    def score(self, view: View) -> Floats:
        kv_heads, group = view.q.shape[1:3]
        request, layer, first = view.where
        heads = (first * group + np.arange(kv_heads * group)).reshape(kv_heads, group)
        stream = np.zeros(1, np.uint64)
        for number in (self.seed, request, layer):
            stream = mixed(stream ^ np.uint64(number))
        query = mixed(mixed(stream ^ view.t.astype(np.uint64))[:, None, None] ^ heads.astype(np.uint64))
        words = mixed(query[..., None] ^ mixed(view.page.astype(np.uint64))[:, None])
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mixed(x: Words) -> Words:
    """Every bit of the result depends on every bit of x: one step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
