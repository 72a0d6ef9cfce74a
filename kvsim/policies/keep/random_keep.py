"""random_keep(): tokens drawn by lot, and the newest; the floor that a score has to beat.

A lot is a hash of (seed, request, layer, kv head, position) and of nothing else, so a larger budget holds all that a smaller one does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsim.policies.protocol import Hold, Keep, Prefix, Ranking, Seen, State, expect
from kvsim.policies.read.random_read import mixed


@dataclass(frozen=True, kw_only=True)
class random_keep(Keep):
    act = "holds tokens drawn at random, and the newest"

    hold: Hold
    seed: int = 0

    def __post_init__(self) -> None:
        expect(self, "seed", self.seed >= 0, "0 or more")
        super().__post_init__()

    def protected(self, limit: int) -> int:
        return 1

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        stream = np.zeros(1, np.uint64)
        for number in (self.seed, *prefix.where):
            stream = mixed(stream ^ np.uint64(number))
        state = State(other={"heads": mixed(stream ^ np.arange(len(seen.pos), dtype=np.uint64))})
        return state, self.step(state, seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        words = mixed(state.other["heads"][:, None] ^ mixed(np.maximum(seen.pos, 0).astype(np.uint64)))
        return Ranking((words >> np.uint64(11)).astype(np.float64), protect=seen.pos == seen.t)
