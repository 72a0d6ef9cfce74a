"""evicted_moments: what was evicted stays in the softmax as its count, its mean key and value, and how values go with keys.

Of n rows with keys k and values v, a query sees exp(scale q·k) as its mean says: Z = n exp(scale q·μk), and the values under these weights
to first order: o = μv + scale C q, C = mean (v - μv)(k - μk)ᵀ. Z is never above the true sum (Jensen), and both are exact for rows that
are alike. Known from the abstract of the paper; the formula is worked out here, and order 0, the means alone, is its natural twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsim.policies.protocol import Estimate, Floats, Sums, expect


@dataclass(frozen=True, kw_only=True)
class evicted_moments(Estimate):
    act = "lets evicted rows stay in the softmax as their count, mean and covariance"
    paper = "MomentKV, arXiv 2606.01563 (read: its abstract)"

    order: int = 1

    def __post_init__(self) -> None:
        expect(self, "order", self.order in (0, 1), "0 (means) or 1 (and how values go with keys)")

    def empty(self, key_dim: int, value_dim: int) -> Sums:
        sums = {"n": np.zeros(()), "k": np.zeros(key_dim), "v": np.zeros(value_dim)}
        return sums | ({"vk": np.zeros((value_dim, key_dim))} if self.order else {})

    def add(self, sums: Sums, keys: Floats, values: Floats) -> Sums:
        more = {"n": np.array(float(len(keys))), "k": keys.sum(axis=0), "v": values.sum(axis=0)}
        if self.order:
            more["vk"] = values.T @ keys
        return {name: sums[name] + x for name, x in more.items()}

    def says(self, sums: Sums, q: Floats, scale: float) -> tuple[Floats, Floats]:
        n = sums["n"][:, None]
        mean = {name: sums[name] / np.maximum(n, 1) for name in ("k", "v")}
        with np.errstate(divide="ignore"):
            mass = np.log(n) + scale * (q * mean["k"][:, None]).sum(axis=-1)
        out = np.repeat(mean["v"][:, None], q.shape[1], axis=1)
        if self.order:
            together = sums["vk"] / np.maximum(n, 1)[..., None] - mean["v"][:, :, None] * mean["k"][:, None]
            out = out + scale * np.matmul(q, together.swapaxes(1, 2))
        return mass, out
