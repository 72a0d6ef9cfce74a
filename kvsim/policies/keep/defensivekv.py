"""DefensiveKV: what any query of the window looked at may be asked for again, so the worst case over queries ranks, not the mean.

A row's score is the largest attention that a window query and head of the group paid it, never below the mean over the rows, times its
value's part of the kv heads' projected norms. Rows that hold `cover` of the mean attention come first. Kv heads, and with scope="model"
layers, share the budget (cards B7, B8).

compat: as the authors' code does it: the mass of the window is taken from the columns just before it, the row that reaches `cover` is
left out, rows that come first and the window all have the layer's largest score, so that nothing is protected when these tie, and a
budget below the window lets almost all rows come first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvsim.geometry import Need
from kvsim.policies.keep.snapkv import pooled
from kvsim.policies.protocol import ALL_LAYERS, WO_NORM, Floats, Hold, Keep, Mask, Prefix, Ranking, Seen, State, Window, expect
from kvsim.policies.scores import expect_kernel


@dataclass(frozen=True, kw_only=True)
class defensivekv(Keep):
    act = "after prefill keeps what any of the last prompt queries attended to most, weighed by what its value does to the output"
    paper = "Feng et al., Taming the Fragility of KV Cache Eviction in LLM Inference, arXiv 2510.13334"
    presets: ClassVar = {
        "ffy0": {
            "source": "FFY0/DefensiveKV 9251b95, EfficientDefensiveKVPress: window 32, kernel 5, 0.9 of the attention first",
            "scope": "layer", "window": 32, "kernel": 5, "cover": 0.9, "compat": True,
        },
        "ffy0-layer": {
            "source": "FFY0/DefensiveKV 9251b95, EfficientLayerDefensiveKVPress: as ffy0, one budget for all layers",
            "scope": "model", "window": 32, "kernel": 5, "cover": 0.9, "compat": True,
        },
    }  # fmt: skip
    joint = True

    hold: Hold
    scope: Literal["layer", "model"] = "layer"
    window: int = 32
    kernel: int = 5
    cover: float = 0.9
    compat: bool = False

    def __post_init__(self) -> None:
        expect(self, "window", self.window >= 1, "1 prompt query or more")
        expect_kernel(self, self.kernel)
        expect(self, "cover", 0 <= self.cover <= 1, "a part of the attention, 0 to 1")
        super().__post_init__()

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Window(self.window), WO_NORM} | ({ALL_LAYERS} if self.scope == "model" else set()))

    def protected(self, limit: int) -> int:
        return 0 if self.compat else self.window

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        recent = seen.pos > seen.t - self.window
        past = ~recent[0]
        a = prefix.window(self.window)
        a = a.reshape(len(a), len(recent), -1, a.shape[-1])  # [rows, Hkv, G, n]
        worth = np.stack([worst(a[:, h][..., past], self.kernel) for h in range(a.shape[1])]) * _part_of_heads(prefix)[:, past]
        first = self._first(a, past, seen)
        score = np.zeros(recent.shape)
        most = worth.max(initial=0.0)
        score[:, past] = np.where(first, most, worth) if self.compat else first + worth  # worth is at most 1
        score[recent] = most
        own = 1.0 if self.scope == "model" else 0.0
        return State(), Ranking(score, None if self.compat else recent, own=own)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        return None

    def _first(self, a: Floats, past: Mask, seen: Seen) -> Mask:
        """bool[Hkv, past]: the fewest rows of most mean attention that hold `cover` less the window's mass, within the budget."""
        mean, n = a[..., past].mean(axis=(0, 2)), int(past.sum())
        beside = np.flatnonzero(past)[-self.window :] if self.compat else ~past
        target = self.cover - a[..., beside].sum(-1).mean()
        first: Mask = np.zeros(mean.shape, bool)
        for h, row in enumerate(mean):
            order = np.argsort(-row, kind="stable")
            mass = np.cumsum(row[order]) / max(row.sum(), np.finfo(float).tiny)
            limit = int(seen.limit[h])
            if self.compat:
                many = min(int(np.argmax(mass >= target)) if n else 0, int(n * limit / len(past) - self.window))
            else:
                many = min(int((mass < target).sum()) + (target > 0), max(0, limit - self.window))
            first[h, order[:many]] = True
        return first


def worst(a: Floats, kernel: int) -> Floats:
    """Attention [rows, G, n] of a kv head -> [n]: pooled, its sum unchanged; the largest over queries and group, at least their mean."""
    smooth = pooled(a, kernel, "avg")
    total = smooth.sum(-1, keepdims=True)
    smooth = np.divide(smooth * a.sum(-1, keepdims=True), total, out=np.zeros_like(smooth), where=total > 0)
    most: Floats = smooth.max(axis=(0, 1))
    return np.maximum(most, most.mean()) if len(most) else most


def _part_of_heads(prefix: Prefix) -> Floats:
    """[Hkv, n]: the L1 norm of W_O v, as a part of its sum over the kv heads at the same token."""
    weight = prefix.by_kv_head(prefix.wo_norm())
    total = weight.sum(0)
    return np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
