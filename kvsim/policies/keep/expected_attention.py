"""Expected Attention: one cut after prefill, by the attention that queries to come are expected to pay, and the length of the value.

Queries before RoPE are taken to be Gaussian, with the prompt's mean and covariance, and turned by the average of RoPE's matrices R over the
next `future` positions: mean mu = R m, covariance C = R S R^T. The expected weight of a key is then E[exp(scale q.k)] = exp(scale mu.k +
scale^2 k.C.k / 2); per query head these are normalised over all tokens but the sinks, averaged over the group, and
score = (that + epsilon) * |v|. The first `sinks` tokens stay.

As in NVIDIA's kvpress (0.5.5), which computes the statistics from hidden states and a projection: here they come from the queries, so
models that normalise queries are taken too. Turned queries of many positions are not Gaussian, and C leaves out what the turning
spreads; so do they. A soft cap is not looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsim.geometry import Need
from kvsim.policies.protocol import KEYS, Q_STATS, VALUES, Floats, Hold, Keep, Prefix, Ranking, Seen, State, expect


@dataclass(frozen=True, kw_only=True)
class expected_attention(Keep):
    act = "after prefill keeps the tokens that queries like the prompt's would attend to from later positions"
    paper = "Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution, arXiv 2510.00636"

    hold: Hold
    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "sinks", self.sinks >= 0, "0 tokens or more")
        expect(self, "future", 1 <= self.future <= 2**16, f"1 to {2**16} positions")
        expect(self, "epsilon", self.epsilon >= 0, "0 or more")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Q_STATS, KEYS, VALUES})

    def protected(self, limit: int) -> int:
        return self.sinks

    def looks(self, step: int) -> bool:
        return False

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        safe = seen.pos < self.sinks
        score, rest = np.zeros(seen.pos.shape), ~safe[0]  # no kv head has lost a token yet
        if rest.any():
            paid = self._paid(prefix, prefix.keys()[:, rest], seen.t + 1)
            score[:, rest] = (paid + self.epsilon) * np.linalg.norm(prefix.values()[:, rest], axis=2)
        return State(), Ranking(score, protect=safe)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        return None

    def _paid(self, prefix: Prefix, keys: Floats, first: int) -> Floats:
        """keys [Hkv, n, d] -> [Hkv, n]: expected attention, the mean of the group."""
        lay = prefix.layer
        mean, covariance = prefix.q_stats()
        turn = lay.mean_turn(np.arange(first, first + self.future))
        paid = np.empty((lay.q_heads, keys.shape[1]))
        for head, (m, c) in enumerate(zip(mean @ turn, turn.T @ covariance @ turn, strict=True)):
            k = keys[head // lay.group]
            x = lay.scale * (k @ m) + lay.scale**2 / 2 * ((k @ c) * k).sum(axis=1)
            e = np.exp(x - x.max())
            paid[head] = e / e.sum()
        return prefix.by_kv_head(paid) / lay.group
