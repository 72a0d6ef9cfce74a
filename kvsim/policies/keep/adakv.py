"""AdaKV: SnapKV's scores, but the kv heads of a layer share its budget; each is sure of a part `alpha` of an equal share.

ada_mode: "mix", as the authors' code: a head's rows are (1 - alpha) of what it would win in a ranking of all heads' rows, and alpha of an
equal share; "safeguard", as kvpress: its best rows, alpha of an equal share, are sure, and all other places go to the best of the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvsim.policies import scores
from kvsim.policies.keep.snapkv import snapkv
from kvsim.policies.protocol import Prefix, Ranking, Seen, State, expect
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
        "kvpress": {
            "source": "NVIDIA/kvpress 8bb29b9, AdaKVPress around SnapKVPress: safeguard 0.2, window 64, kernel 5",
            "ada_mode": "safeguard", "alpha": 0.2, "window": 64, "kernel": 5, "pool": "avg",
        },
    }  # fmt: skip
    joint = True

    alpha: float = 0.2
    ada_mode: Literal["mix", "safeguard"] = "mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "alpha", 0 <= self.alpha <= 1, "a part of an equal share, 0 to 1")

    @property
    def own(self) -> float:
        return self.alpha if self.ada_mode == "mix" else 0.0

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        score, recent = self._score(prefix, seen), seen.pos > seen.t - self.window
        safe = recent
        if self.ada_mode == "safeguard":
            safe = recent | scores.best(np.where(recent, np.inf, score), self.alpha, seen.limit)  # the window's rows count first
        return State(), Ranking(score, safe, own=self.own)
