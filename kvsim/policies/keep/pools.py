"""pools(): slots set aside for sinks, for recent tokens and for spans that a task names; heavy hitters have what is left.

The total is the hold budget, whatever the pools: a token in two of them is counted once, and the slot this frees goes to heavy hitters,
by accumulated attention as in h2o. To be held against one pool: h2o(recent=0), streaming_llm and random_keep of the same hold budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.errors import WrongUse
from kvsim.geometry import Need
from kvsim.policies.protocol import ATTENTION, PREFILL_MASS, Floats, Hold, Keep, Prefix, Ranking, Seen, Span, State, expect


@dataclass(frozen=True, kw_only=True)
class pools(Keep):
    act = "holds sinks, recent tokens and named spans in slots of their own, heavy hitters in the others"

    hold: Hold
    sinks: int = 4
    recent: int = 32
    heavy: int = 0  # at least so many slots for heavy hitters
    pinned: str = ""  # labels or kinds of spans, with commas between

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("recent", 1), ("heavy", 0)):
            expect(self, name, getattr(self, name) >= least, f"{least} tokens or more")
        super().__post_init__()

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({ATTENTION, PREFILL_MASS})

    def protected(self, limit: int) -> int:
        return self.sinks + self.recent + self.heavy

    def pinned_positions(self, spans: Sequence[Span]) -> list[int]:
        held: set[int] = set()
        for name in filter(None, map(str.strip, self.pinned.split(","))):
            named = [s for s in spans if name in (s.label, s.kind)]
            if not named:
                there = ", ".join(dict.fromkeys(s.label for s in spans)) or "none"
                raise WrongUse(f"pools(pinned={self.pinned!r}): no span is called {name!r}; the spans of the request are {there}")
            held.update(p for s in named for p in range(s.start, s.stop))
        return sorted(p for p in held if p >= self.sinks)

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        acc = prefix.by_kv_head(prefix.mass())
        state = State({"acc": acc}, {"pinned": np.array(self.pinned_positions(prefix.spans), np.int64)})
        return state, self._rank(state, acc, seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        assert seen.a is not None
        acc = state.slots["acc"]
        acc += seen.a.sum(axis=1)
        return self._rank(state, acc, seen)

    def _rank(self, state: State, acc: Floats, seen: Seen) -> Ranking:
        kept = (seen.pos < self.sinks) | (seen.pos > seen.t - self.recent) | np.isin(seen.pos, state.other["pinned"])
        return Ranking(acc, protect=kept & seen.valid)
