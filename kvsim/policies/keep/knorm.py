"""knorm: the tokens whose keys are shortest, and the newest; short keys tend to receive much attention.

The norm is that of the key as attention sees it. The paper leaves the first two layers whole; a policy file does that here. Its code does
not protect the newest token."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.geometry import Need
from kvsim.policies.protocol import KEY_NORM, Hold, Keep, Prefix, Ranking, Seen, State


@dataclass(frozen=True, kw_only=True)
class knorm(Keep):
    act = "holds the tokens whose keys have the smallest L2 norm, and the newest"
    paper = "Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430"

    hold: Hold

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({KEY_NORM})

    def protected(self, limit: int) -> int:
        return 1

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        return State(), Ranking(-prefix.key_norm(), protect=seen.pos == seen.t)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        assert seen.key_norm is not None
        return Ranking(-seen.key_norm, protect=seen.pos == seen.t)
