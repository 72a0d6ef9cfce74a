"""CAOTE: evict the token without which the attention output changes least.

Without token j the other weights grow by 1 / (1 - a_j), so the output o moves by exactly a_j / (1 - a_j) · |v_j - o|. The weights a are the
base's score, normalised over the tokens held. One eviction is exact; a cut that takes several takes those of least error each alone.

Per kv head: with base="tova" the newest query's attention, summed over the group (TOVA itself has one set for the layer). Known from the
abstract and the formula, not from the authors' code, which is not public."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from kvsim.geometry import Need
from kvsim.policies.keep.h2o import h2o
from kvsim.policies.keep.snapkv import snapkv
from kvsim.policies.protocol import ATTENTION, VALUES, Floats, Hold, Keep, Mask, Prefix, Ranking, Seen, State, Window


@dataclass(frozen=True, kw_only=True)
class caote(Keep):
    act = "drops the token without which the attention output, by the base's weights, changes least"
    paper = (
        "Goel et al., CAOTE: KV Cache Selection for LLMs via Attention Output Error-Based Token Eviction, arXiv 2504.14051, known from its"
        " abstract"
    )

    hold: Hold
    base: Literal["h2o", "tova", "snapkv"] = "h2o"

    @cached_property
    def _base(self) -> Keep | None:
        return {"h2o": h2o, "snapkv": snapkv}[self.base](hold=self.hold) if self.base != "tova" else None

    @property
    def needs(self) -> frozenset[Need]:
        return (self._base.needs if self._base else frozenset({ATTENTION, Window(1)})) | {VALUES}

    def protected(self, limit: int) -> int:
        return self._base.protected(limit) if self._base else 0

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        state, ranking = (
            self._base.start(prefix, seen) if self._base else (State(), Ranking(prefix.by_kv_head(prefix.window(1)[0])))
        )
        return state, ranking and _weighed(ranking, prefix.values(), seen.valid)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        if self._base:
            ranking = self._base.step(state, seen)
        else:
            assert seen.a is not None
            ranking = Ranking(seen.a.sum(axis=1))
        assert seen.values is not None
        return ranking and _weighed(ranking, seen.values, seen.valid)


def _weighed(ranking: Ranking, values: Floats, valid: Mask) -> Ranking:
    return replace(ranking, score=error_without(np.where(valid, ranking.score, 0.0), values))


def error_without(score: Floats, values: Floats) -> Floats:
    """score [H, n], 0 or more, values [H, n, d] -> [H, n]: how far the output under weights in proportion to the scores moves when a
    token is left out; infinite for one that has all the weight.

    As a_j · |v_j - the output without j|, which is the same and loses no digits where a_j is nearly 1."""
    total, left = score.sum(axis=1, keepdims=True), _others(score)
    without = _others(score[..., None] * values) / np.where(left > 0, left, 1.0)[..., None]
    far = np.sqrt(((values - without) ** 2).sum(axis=2))
    return np.where((left > 0) | (score == 0), score / np.where(total > 0, total, 1.0) * far, np.inf)


def _others(x: Floats) -> Floats:
    """[H, n, ...] -> at each j the sum over all others: what lies before it and what lies after."""
    zero = np.zeros_like(x[:, :1])
    before = np.concatenate([zero, x[:, :-1].cumsum(axis=1)], axis=1)
    after = np.concatenate([x[:, :0:-1].cumsum(axis=1)[:, ::-1], zero], axis=1)
    return before + after
