"""Scales divided out before any grid and multiplied in again after decoding: one per row, or one per channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.minmax import fp16

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class channel_divisor:
    """Channel j of all rows coded at once is divided by sqrt(max |x_j|) (ZipCache's channel-separable token-wise quantisation, arXiv
    2405.14256, eq. 5). The divisors are kept in fp16 and used as they were rounded."""

    whole = True

    def split(self, x: Floats) -> tuple[Floats, Floats]:
        scale = fp16(np.sqrt(np.abs(x).max(axis=1, keepdims=True)))
        scale = np.where(scale > 0, scale, 1.0)
        return x / scale, scale

    def join(self, y: Floats, kept: Floats) -> Floats:
        return y * kept

    def bytes(self, dim: int) -> tuple[int, int]:
        return 0, 2 * dim


@dataclass(frozen=True)
class token_norm:
    """Every row is divided by its L2 norm, and multiplied by that norm as fp16 holds it; a row of zeros stays one. renormalise: what is decoded
    is first brought to norm 1 again, so that a row's norm is right but for the rounding (vLLM's norm correction)."""

    renormalise: bool = False
    whole = False

    def split(self, x: Floats) -> tuple[Floats, Floats]:
        norm = np.sqrt((x * x).sum(axis=-1, keepdims=True))
        return x / np.where(norm > 0, norm, 1.0), fp16(norm, "token_norm: {} does not fit the fp16 norm of a row")

    def join(self, y: Floats, kept: Floats) -> Floats:
        if self.renormalise:
            norm = np.sqrt((y * y).sum(axis=-1, keepdims=True))
            y = y / np.where(norm > 0, norm, 1.0)
        return y * kept

    def bytes(self, dim: int) -> tuple[int, int]:
        return 2, 0
