"""CriticalKV: one half of the budget by attention, the other by attention times how far a value moves the layer's output.

A token's weight is the L1 norm of W_O v, the mean over the query heads of its group. The window's own tokens stay, outside both parts.

compat: as the authors' code does it, the window is not protected: its tokens have the largest score plus one, take places of the first
part, and those left over compete by their weight (card B6, trap); with base="adakv" a kv head is sure of its best rows, and no blend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvsim.geometry import Need
from kvsim.policies import scores
from kvsim.policies.keep.snapkv import snapkv
from kvsim.policies.protocol import WO_NORM, Prefix, Ranking, Seen, Stage, State, expect


@dataclass(frozen=True, kw_only=True)
class criticalkv(snapkv):
    act = "as snapkv or adakv for a first part of the budget; the rest goes to attention times the norm of the projected value"
    paper = "Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, arXiv 2502.03805"
    presets: ClassVar = {
        "kvpress": {
            "source": "NVIDIA/kvpress 8bb29b9, CriticalKVPress around SnapKVPress: epsilon 1e-4, first stage 0.5, window 64, kernel 5",
            "base": "snapkv", "window": 64, "kernel": 5, "pool": "avg", "first": 0.5, "epsilon": 1e-4, "compat": True,
        },
        "kvpress-ada": {
            "source": "NVIDIA/kvpress 8bb29b9, CriticalAdaKVPress around SnapKVPress: safeguard 0.2, and as kvpress",
            "base": "adakv", "alpha": 0.2, "window": 64, "kernel": 5, "pool": "avg", "first": 0.5, "epsilon": 1e-4, "compat": True,
        },
    }  # fmt: skip

    base: Literal["snapkv", "adakv"] = "snapkv"
    alpha: float = 0.2
    first: float = 0.5
    epsilon: float = 1e-4
    compat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "alpha", 0 <= self.alpha <= 1, "a part of an equal share, 0 to 1")
        expect(self, "first", 0 <= self.first <= 1, "the part of the budget given by attention alone, 0 to 1")
        expect(self, "epsilon", self.epsilon >= 0, "0 or more, added to the attention that a window query pays on average")

    @property
    def joint(self) -> bool:  # type: ignore[override]  # an attribute of its base, here of the base policy chosen
        return self.base == "adakv"

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {WO_NORM}

    def protected(self, limit: int) -> int:
        return 0 if self.compat else super().protected(limit)

    @property
    def own(self) -> float:
        return 1.0 if self.base == "snapkv" else 0.0 if self.compat else self.alpha

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        score = self._score(prefix, seen) / min(self.window, seen.t + 1)  # of one query, so that epsilon has a scale
        weight = prefix.by_kv_head(prefix.wo_norm()) / prefix.layer.group
        recent = seen.pos > seen.t - self.window
        if self.compat:
            score = np.where(recent, score[~recent].max(initial=0) + 1, score)
        critical = (score + self.epsilon) * weight
        if self.compat and self.base == "adakv":
            safe = scores.best(score, self.alpha, seen.limit)  # in the place of the blend of adakv
            score, critical = score + safe * (score.max() + 1), critical + safe * (critical.max() + 1)
        stages = (Stage(self.first), Stage(1 - self.first, score=critical))
        return State(), Ranking(score, None if self.compat else recent, stages=stages, own=self.own)
