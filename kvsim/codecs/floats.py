"""8-bit floats: one sign, four bits of exponent, three of mantissa (e4m3, without infinity), under a scale or none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.pipeline import grouped
from kvsim.kernels.rounding import E4M3, rounded

Floats = NDArray[np.float64]
LARGEST = float(E4M3[-1])  # 448
SCALE_BYTES = 4  # float32


@dataclass(frozen=True)
class e4m3:
    """scaled: the largest number of a group is stored as 448; else numbers are stored as they are, and those past 448 become it
    (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433)."""

    scaled: bool = True
    bits = 8

    @property
    def scale_bytes(self) -> int:
        return SCALE_BYTES if self.scaled else 0

    def code(self, x: Floats, group: grouped) -> tuple[Floats, int]:
        """[m, rows, d] -> what a reader decodes, same shape."""
        return group.each(self._coded, x), 0

    def _coded(self, x: Floats) -> Floats:
        scale = np.float32(np.abs(x).max(axis=1, keepdims=True) / LARGEST).astype(np.float64) if self.scaled else np.ones(1)
        scale = np.where(scale > 0, scale, 1.0)
        return rounded(np.clip(x / scale, -LARGEST, LARGEST), "fp8") * scale
