"""R-KV: after every `period` steps, drop the tokens whose keys others repeat, weighed against the attention of the newest queries.

Per kv head, of the tokens before the newest `window`: score = mix · attention - (1 - mix) · redundancy. Attention is the
softmax over those tokens of the logits of the newest `window` queries, of the group's largest, averaged over the queries and smoothed by a
maximum over `kernel` neighbours. Redundancy is the softmax, over all tokens held, of a key's mean cosine to the others, where every token
leaves out the newest one that is more than `similar` to it: of a chain of repetitions the last copy is not held against itself. It is not
below 0 where keys point apart, nor a count of copies.

Traps, kept as the authors' code has them (Zefan-Cai/R-KV d15c976):
  * what the group's heads have in common is the largest *logit*, before any softmax, so a head of large logits speaks for all;
  * a token that nothing is similar to leaves out the oldest one instead;
  * both terms sum to about 1 over the n tokens, so with mix=0.07 only a token of much attention outweighs redundancy.
Here in float64, with the layer's own scale and soft cap, and at every period that finds more than the budget held; their serving code waits
until a whole period's tokens are above it. Tokens decoded between cuts are all held, so the budget is that of the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.geometry import Need
from kvsim.policies.keep.snapkv import pooled
from kvsim.policies.protocol import KEYS, QUERIES, Floats, Hold, Keep, Prefix, Ranking, Seen, State, Window, expect
from kvsim.policies.scores import expect_kernel

ROWS = 256  # of cosines at once: a prompt's n x n would not fit
TINY = 1e-8  # what the authors add to a key's norm


@dataclass(frozen=True, kw_only=True)
class r_kv(Keep):
    act = "every few steps drops the tokens whose keys others repeat, and few of the newest queries look at"
    paper = "Cai et al., R-KV: Redundancy-aware KV Cache Compression for Training-Free Reasoning Models Acceleration, arXiv 2505.24133"

    hold: Hold
    window: int = 8
    kernel: int = 7
    mix: float = 0.07
    similar: float = 0.5
    period: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "window", self.window >= 1, "1 query or more")
        expect_kernel(self, self.kernel)
        expect(self, "mix", 0 <= self.mix <= 1, "the part of attention, 0 to 1")
        expect(self, "similar", -1 <= self.similar <= 1, "a cosine, -1 to 1")
        expect(self, "period", self.period >= self.window, f"at least the {self.window} steps of its window")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({QUERIES, KEYS, Window(self.window)})

    def protected(self, limit: int) -> int:
        return self.window

    def looks(self, step: int) -> bool:
        """The steps whose queries the next cut asks."""
        return step % self.period >= self.period - self.window

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        lay = prefix.layer
        state = State(other={"queries": prefix.last_queries(self.window), "scale": lay.scale, "cap": lay.softcap})
        return state, self._rank(state.other, prefix.keys(), seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        if not self.looks(seen.step):
            return None
        assert seen.q is not None
        state.other["queries"] = np.concatenate([state.other["queries"], seen.q[None]])[-self.window :]
        if (seen.step + 1) % self.period:
            return None
        assert seen.keys is not None
        return self._rank(state.other, seen.keys, seen)

    def _rank(self, known: dict[str, Any], keys: Floats, seen: Seen) -> Ranking:
        score = np.zeros(seen.pos.shape)
        for h, valid in enumerate(seen.valid):
            live = np.flatnonzero(valid)
            past = np.flatnonzero(seen.pos[h, live] <= seen.t - self.window)
            if len(past):
                logits = known["scale"] * (known["queries"][:, h] @ keys[h, live[past]].T)
                if known["cap"]:
                    logits = known["cap"] * np.tanh(logits / known["cap"])
                score[h, live[past]] = self.score(logits, redundancy(keys[h, live], self.similar)[past])
        return Ranking(score, protect=seen.valid & (seen.pos > seen.t - self.window))

    def score(self, logits: Floats, redundant: Floats) -> Floats:
        """logits [W, G, n] of the newest queries on the tokens before them, redundant [n] -> [n]."""
        attention = pooled(_softmax(logits.max(axis=1)).mean(axis=0), self.kernel, "max")
        return self.mix * attention - (1 - self.mix) * redundant


def redundancy(keys: Floats, similar: float = 0.5) -> Floats:
    """keys [n, d], oldest first -> [n], above 0 and of sum 1: how much others repeat each of them."""
    unit = keys / (np.linalg.norm(keys, axis=1, keepdims=True) + TINY)
    total, n = np.zeros(len(keys)), len(keys)
    for first in range(0, n, ROWS):
        cosine = unit[first : first + ROWS] @ unit.T
        row = np.arange(len(cosine))
        cosine[row, first + row] = 0.0
        near = cosine > similar
        newest = n - 1 - near[:, ::-1].argmax(axis=1)
        cosine[row, np.where(near.any(axis=1), newest, 0)] = 0.0
        total += cosine.sum(axis=0)
    return _softmax(total / n)


def _softmax(x: Floats) -> Floats:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Floats = e / e.sum(axis=-1, keepdims=True)
    return out
