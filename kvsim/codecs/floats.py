"""8-bit floats: one sign, four bits of exponent, three of mantissa (e4m3, without infinity), under a scale per token or none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.coded import Coded
from kvsim.kernels.rounding import E4M3, rounded

Floats = NDArray[np.float64]
LARGEST = float(E4M3[-1])  # 448
SCALE_BYTES = 4  # float32, one per token where there is one


@dataclass(frozen=True)
class e4m3:
    """scaled: the largest number of a token is stored as 448; else numbers are stored as they are, and those past 448 become it
    (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433)."""

    scaled: bool = True
    bits = 8
    tokens = 1

    def encode(self, x: Floats) -> Coded:
        """[m, rows, d] -> what is stored of it."""
        scale = np.float32(np.abs(x).max(axis=-1, keepdims=True) / LARGEST).astype(np.float64) if self.scaled else np.ones(1)
        scale = np.where(scale > 0, scale, 1.0)
        values = rounded(np.clip(x / scale, -LARGEST, LARGEST), "fp8") * scale
        return Coded.even(values, self.bits * x.shape[-1], row_meta=SCALE_BYTES if self.scaled else 0)
