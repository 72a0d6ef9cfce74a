"""A stage before any grid: every channel divided by a number of its own, and multiplied by it again after decoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.coded import Coded
from kvsim.codecs.minmax import fp16, minmax

Floats = NDArray[np.float64]
CHANNEL_BYTES = 2  # fp16


@dataclass(frozen=True)
class channel_scaled:
    """Channel j of all rows coded at once is divided by sqrt(max |x_j|) before `inner` codes every row by itself (ZipCache's channel-separable
    token-wise quantisation, arXiv 2405.14256, eq. 5). The divisors are kept in fp16 and used as they were rounded."""

    inner: minmax
    tokens = 0

    @property
    def bits(self) -> int:
        return self.inner.bits

    def encode(self, x: Floats) -> Coded:
        """[m, rows, d] -> what is stored of it; the divisors are the group's, zeros and steps each row's."""
        scale = fp16(np.sqrt(np.abs(x).max(axis=1, keepdims=True)))
        scale = np.where(scale > 0, scale, 1.0)
        bits, row_meta = self.inner.layout(x.shape[-1])
        return Coded.even(self.inner.roundtrip(x / scale) * scale, bits, row_meta, CHANNEL_BYTES * x.shape[-1])
