"""QEvict: windows of tokens ranked by attention every `period` steps; the best stay full, the next are coded, the rest go.

A window is scored by the attention it received, averaged over the layer's query heads; the first demotion codes it from the original
values, later ones reuse the codes. Prompt windows start from the attention of the last `period` prompt queries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvsim.codecs.minmax import minmax
from kvsim.geometry import Need
from kvsim.policies.protocol import (
    ATTENTION,
    CODED,
    FULL,
    K_PRE,
    Codecs,
    Hold,
    Ints,
    Keep,
    Mask,
    Prefix,
    Ranking,
    Seen,
    Stage,
    State,
    Window,
    expect,
)  # fmt: skip
from kvsim.units import share


@dataclass(frozen=True, kw_only=True)
class qevict(Keep):
    act = "every few steps keeps the most attended windows full, codes the next and evicts the rest"
    paper = "QEvict, arXiv 2608.05326, known from notes on it only"
    joint = True

    hold: Hold = field(default=share(0.2))
    quant_share: float = 0.7  # of the budget beside sinks and recent tokens, in bytes
    window: int = 8
    period: int = 8
    bits: int = 2
    sinks: int = 5
    recent: int = 32
    promotion: Literal["ledger", "shadow"] = "ledger"
    decay: float = 1.0

    def __post_init__(self) -> None:
        expect(self, "quant_share", 0 <= self.quant_share <= 1, "a part of the budget, 0 to 1")
        expect(self, "window", self.window >= 1, "1 token or more")
        expect(self, "period", self.period >= 1, "1 step or more")
        expect(self, "bits", 1 <= self.bits <= 8, "1 to 8 bits")
        expect(self, "sinks", self.sinks >= 0, "0 tokens or more")
        expect(self, "recent", self.recent >= 0, "0 tokens or more")
        expect(self, "decay", 0 < self.decay <= 1, "a factor per event, above 0 and at most 1")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({ATTENTION, K_PRE, Window(self.period)})

    @property
    def codecs(self) -> Codecs:  # type: ignore[override]  # a field of its base, here derived from bits and window
        keys, values = minmax(self.bits, "tokens", self.window), minmax(self.bits, "channels")
        return Codecs(keys, values, keys="pre", ledger=True, shadow=self.promotion == "shadow")

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        unit, stop = self._windows(seen)
        born = prefix.window(self.period).sum(axis=0).mean(axis=0)[None]
        state = State({"score": np.where(stop <= seen.t + 1, born, 0.0), "fresh": np.zeros(unit.shape)})
        return state, self._rank(state, seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        assert seen.a is not None
        eligible = self._eligible(seen)
        score, fresh = state.slots["score"], state.slots["fresh"]
        fresh += np.where(eligible, seen.a.mean(axis=(0, 1)), 0.0)
        if (seen.step + 1) % self.period:
            return None
        score[:] = np.where(eligible, self.decay * score + fresh, score)
        fresh[:] = 0
        return self._rank(state, seen)

    def _rank(self, state: State, seen: Seen) -> Ranking:
        unit, _ = self._windows(seen)
        stages = (Stage(1 - self.quant_share, FULL), Stage(self.quant_share, CODED))
        return Ranking(state.slots["score"], protect=~self._eligible(seen), unit=unit, stages=stages)

    def _windows(self, seen: Seen) -> tuple[Ints, Ints]:
        """Window of every slot and where it ends; -1 for the sinks."""
        unit = (seen.pos[:1] - self.sinks) // self.window
        return unit, self.sinks + (unit + 1) * self.window

    def _eligible(self, seen: Seen) -> Mask:
        """Windows all of whose tokens are older than the recent ones."""
        unit, stop = self._windows(seen)
        return (unit >= 0) & (stop <= seen.t + 1 - self.recent)
