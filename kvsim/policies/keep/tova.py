"""TOVA: one set for the whole layer, by the attention that the newest query pays, averaged over all query heads.

The newest token itself is not exempt. After prefill the last prompt query makes the first cut."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.geometry import Need
from kvsim.policies.protocol import ATTENTION, Hold, Keep, Prefix, Ranking, Seen, State, Window


@dataclass(frozen=True, kw_only=True)
class tova(Keep):
    act = "drops the token that the newest query attends to least, over all heads of the layer"
    paper = "Oren et al., Transformers are Multi-State RNNs, arXiv 2401.06104"
    joint = True

    hold: Hold

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({ATTENTION, Window(1)})

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        return State(), Ranking(prefix.window(1)[0].mean(axis=0)[None])

    def step(self, state: State, seen: Seen) -> Ranking | None:
        assert seen.a is not None
        return Ranking(seen.a.mean(axis=(0, 1))[None])
