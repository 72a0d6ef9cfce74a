"""oracle_keep(): the tokens that later steps will attend to most, and the newest. It sees the future; what eviction could have kept.

At every step the token with the least dense attention still to come leaves: greedy, so what it keeps is a goal and not a proven bound."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.geometry import Need
from kvsim.policies.protocol import FUTURE, Hold, Keep, Prefix, Ranking, Seen, State


@dataclass(frozen=True, kw_only=True)
class oracle_keep(Keep):
    act = "holds the tokens that later steps will attend to most (sees the future)"

    hold: Hold

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({FUTURE})

    def protected(self, limit: int) -> int:
        return 1

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        return State(), Ranking(prefix.future(), protect=seen.pos == seen.t)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        assert seen.future is not None
        return Ranking(seen.future, protect=seen.pos == seen.t)
