"""A policy in a file of its own: the newest tokens, and at one step, if asked, an error."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.policies.protocol import Hold, Keep, Prefix, Ranking, Seen, State


@dataclass(frozen=True, kw_only=True)
class last_few(Keep):
    act = "holds the newest tokens"

    hold: Hold
    fails: bool = False

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        return State(), self.step(State(), seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        if self.fails and seen.step == 3:
            raise ValueError("no\nmore")
        return Ranking(seen.pos.astype(float))
