"""H2O: heavy hitters by accumulated attention, and the most recent tokens.

acc, per kv head, is the attention that each token held received, summed over the query heads of the group and over time; norm="queries"
ranks by acc divided by the number of queries that paid it, so that a token's age does not count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvsim.geometry import Need
from kvsim.policies.protocol import ATTENTION, PREFILL_MASS, Floats, Hold, Keep, Prefix, Ranking, Seen, State, expect
from kvsim.units import share, tokens, whole


@dataclass(frozen=True, kw_only=True)
class h2o(Keep):
    act = "holds the tokens that received the most attention so far, and the most recent ones"
    paper = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048"
    presets: ClassVar = {
        "hf": {
            "source": "FMInference/H2O ac75c2a, h2o_hf: heavy and recent ratio 0.1 each, of the prompt",
            "hold": share(0.2, of="prompt"),
            "recent": 0.5,
        },
        "summarization": {
            "source": "FMInference/H2O ac75c2a, h2o_hf, summarization script: 1024 heavy and 1024 recent",
            "hold": tokens(2048),
            "recent": 0.5,
        },
    }

    hold: Hold
    recent: float = 0.5
    sinks: int = 0
    decay: float = 1.0
    norm: Literal["none", "queries"] = "none"
    prefill: Literal["captured", "zeros"] = "captured"

    def __post_init__(self) -> None:
        expect(self, "recent", 0 <= self.recent <= 1, "a part of the hold budget, 0 to 1")
        expect(self, "sinks", self.sinks >= 0, "0 tokens or more")
        expect(self, "decay", 0 < self.decay <= 1, "a factor per step, above 0 and at most 1")
        super().__post_init__()

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({ATTENTION, PREFILL_MASS} if self.prefill == "captured" else {ATTENTION})

    def protected(self, limit: int) -> int:
        return self.sinks + self._window(limit)

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        captured = self.prefill == "captured"
        acc = prefix.by_kv_head(prefix.mass()) if captured else np.zeros(seen.pos.shape)
        state = State({"acc": acc})
        if self.norm == "queries":
            state.slots["queries"] = prefix.queries() if captured else np.zeros(acc.shape)
        return state, self._rank(state, seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        assert seen.a is not None
        acc = state.slots["acc"]
        acc *= self.decay
        acc += seen.a.sum(axis=1)
        if self.norm == "queries":
            state.slots["queries"] = self.decay * state.slots["queries"] + 1  # a weighted mean, when sums fade
        return self._rank(state, seen)

    def _window(self, limit: int) -> int:
        """The most recent tokens that are protected; the newest always is."""
        return max(1, whole(self.recent * limit))

    def _rank(self, state: State, seen: Seen) -> Ranking:
        score: Floats = state.slots["acc"]
        if self.norm == "queries":
            score = score / np.maximum(state.slots["queries"], 1)
        recent = np.array([self._window(limit) for limit in seen.limit.tolist()])[:, None]
        kept = (seen.pos < self.sinks) | (seen.pos > seen.t - recent)
        return Ranking(score, protect=kept & seen.valid)
