"""full(): nothing is ever dropped."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.policies.protocol import Keep, Prefix, Ranking, Seen, State


@dataclass(frozen=True, kw_only=True)
class full(Keep):
    act = "holds every token"

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        return State(), None

    def step(self, state: State, seen: Seen) -> Ranking | None:
        return None
