"""AdaKV: SnapKV's scores, but the kv heads of a layer share its budget; each is sure of a part `alpha` of an equal share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.policies.keep.snapkv import snapkv
from kvsim.policies.protocol import expect
from kvsim.units import tokens


@dataclass(frozen=True, kw_only=True)
class adakv(snapkv):
    act = "as snapkv, with the layer's budget spent where its kv heads need it"
    paper = "Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550"
    presets: ClassVar = {
        "ffy0": {
            "source": "FFY0/AdaKV efe4e2e, adaptive_snapkv: floor 0.2, window 32, kernel 7, max pooling",
            "hold": tokens(1024), "alpha": 0.2, "window": 32, "kernel": 7, "pool": "max",
        },
    }  # fmt: skip
    joint = True

    alpha: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "alpha", 0 <= self.alpha <= 1, "a part of an equal share, 0 to 1")

    @property
    def own(self) -> float:
        return self.alpha
