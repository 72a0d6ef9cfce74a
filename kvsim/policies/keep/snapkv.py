"""SnapKV: one cut after prefill, by the pooled attention of the last prompt queries, which stay themselves; decode tokens are all kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvsim.geometry import Need
from kvsim.policies.protocol import Floats, Hold, Keep, Prefix, Ranking, Seen, State, Window, expect
from kvsim.policies.scores import expect_kernel
from kvsim.units import tokens


@dataclass(frozen=True, kw_only=True)
class snapkv(Keep):
    act = "after prefill keeps the tokens that the last prompt queries attend to, and those queries' own"
    paper = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469"
    presets: ClassVar = {
        "fasterdecoding": {
            "source": "FasterDecoding/SnapKV e216ddc, snapkv_utils.py: defaults of SnapKVCluster",
            "hold": tokens(320), "window": 64, "kernel": 5, "pool": "avg",
        },
    }  # fmt: skip

    hold: Hold
    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "window", self.window >= 1, "1 prompt query or more")
        expect_kernel(self, self.kernel)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Window(self.window)})

    def protected(self, limit: int) -> int:
        return self.window

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        return State(), Ranking(self._score(prefix, seen), seen.pos > seen.t - self.window, own=self.own)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        return None

    @property
    def own(self) -> float:
        """The part of an equal share that each kv head is sure of."""
        return 1.0

    def _score(self, prefix: Prefix, seen: Seen) -> Floats:
        """[Hkv, n]: the pooled attention to what lies before the window, summed over its queries, the mean of the group."""
        mass = prefix.window(self.window).sum(axis=0)  # [Hq, n]
        past = seen.pos[0] <= seen.t - self.window
        mass[:, past] = pooled(mass[:, past], self.kernel, self.pool)
        return prefix.by_kv_head(mass) / prefix.layer.group


def pooled(mass: Floats, kernel: int, pool: str) -> Floats:
    """[..., n] smoothed over `kernel` neighbours: an average counts zeros beyond the ends, a maximum nothing."""
    if not mass.shape[-1]:
        return mass
    edge, half = (0.0 if pool == "avg" else -np.inf), kernel // 2
    beyond = [(0, 0)] * (mass.ndim - 1) + [(half, half)]
    near = sliding_window_view(np.pad(mass, beyond, constant_values=edge), kernel, axis=-1)
    smooth: Floats = near.mean(axis=-1) if pool == "avg" else near.max(axis=-1)
    return smooth
