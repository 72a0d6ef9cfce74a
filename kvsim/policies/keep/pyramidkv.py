"""PyramidKV: SnapKV's cut with more budget in the lower layers and less in the upper ones; the total stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.policies.keep.snapkv import snapkv
from kvsim.policies.protocol import Floats, expect
from kvsim.units import tokens


@dataclass(frozen=True, kw_only=True)
class pyramidkv(snapkv):
    act = "as snapkv, with budgets that fall from the first layer to the last"
    paper = "Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv 2406.02069"
    presets: ClassVar = {
        "kvcache-factory": {
            "source": "Zefan-Cai/KVCache-Factory c97f9d7, pyramidkv_utils.py: beta 20, window 8, kernel 7, average pooling",
            "hold": tokens(512), "beta": 20, "window": 8, "kernel": 7, "pool": "avg",
        },
    }  # fmt: skip

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "beta", self.beta >= 1, "1 or more: the last layer keeps a beta-th of the budget beside its window")

    def layers(self, hold: int, prompt: int, count: int) -> Floats | None:
        base = hold - self.window
        low, high = base // self.beta, 2 * base - base // self.beta
        if high >= prompt - self.window:
            high, low = prompt - self.window, 2 * base - prompt + self.window
        if prompt < 2 * base or count == 1:
            low = high = base
        return self.window + np.linspace(high, low, count)
