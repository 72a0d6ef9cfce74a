"""A policy in a file of its own: the newest tokens, and at one step, if asked, an error or the end of the process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from kvsim.policies.protocol import Hold, Keep, Prefix, Ranking, Seen, State


@dataclass(frozen=True, kw_only=True)
class last_few(Keep):
    act = "holds the newest tokens"

    hold: Hold
    trouble: Literal["none", "error", "death"] = "none"

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        return State(), self.step(State(), seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        if seen.step == 3 and self.trouble == "death":
            os._exit(9)
        if seen.step == 3 and self.trouble == "error":
            raise ValueError("no\nmore")
        return Ranking(seen.pos.astype(float))
