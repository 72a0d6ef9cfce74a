"""Mean and covariance of a layer's prompt queries before RoPE: gathered as they come, and read back from a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import BadTrace
from kvsim.geometry import Layer, QueryStats
from kvsim.trace.folder import AGAIN, FINITE, Segment, read_columns, vectors

SKIPPED = 4  # the first tokens, whose queries are unlike all others


class Moments:
    """Sums in float64 over the queries of one layer's prompt, which may come in parts."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.queries = layer, 0
        self.sum = np.zeros((layer.q_heads, layer.key_dim))
        self.products = np.zeros((layer.q_heads, layer.key_dim, layer.key_dim))

    def add(self, q: NDArray[np.float32], first: int) -> None:
        """Queries [Hq, n, d] as attention saw them, of positions from `first`; RoPE is undone. Raises WrongUse (geometry.rope_problem)."""
        new = q[:, max(0, SKIPPED - first) :]
        pos = np.arange(first + q.shape[1] - new.shape[1], first + q.shape[1])
        for h, rows in enumerate(new):
            x = self.layer.rotated_back(rows.astype(np.float64), pos)
            self.sum[h] += x.sum(axis=0)
            self.products[h] += x.T @ x
        self.queries += len(pos)

    def stats(self) -> QueryStats | None:
        """None for a prompt of no more tokens than are skipped."""
        if not self.queries:
            return None
        mean = self.sum / self.queries
        covariance = self.products / self.queries - mean[:, :, None] * mean[:, None]
        return QueryStats(mean.astype(np.float32), covariance.astype(np.float32), SKIPPED, self.queries)


def stats_of(segments: Sequence[Segment], layer: Layer) -> QueryStats:
    """The rows of the q_stats table of one (request, layer). Raises BadTrace."""
    where, d = segments[0].file.parent, layer.key_dim
    parts = [read_columns(s, ("q_head", "pos", "queries")) for s in segments]
    q_head, pos, queries = (np.concatenate(x).astype(np.int64) for x in zip(*parts, strict=True))
    if sorted(q_head.tolist()) != list(range(layer.q_heads)):
        raise BadTrace(f"{where}: rows of q heads {q_head.tolist()}; expected each of 0 to {layer.q_heads - 1} once, {AGAIN}")
    if len({*pos.tolist()}) > 1 or len({*queries.tolist()}) > 1:
        raise BadTrace(f"{where}: pos and queries differ between q heads; expected the same prompt queries for all, {AGAIN}")
    order, groups = np.argsort(q_head), [(s, g) for s in segments for g in range(s.footer.num_row_groups)]
    found = {}
    for name in ("mean", "covariance"):
        found[name] = np.concatenate([vectors(s, g, name, "float32") for s, g in groups])[order]
        if not np.isfinite(found[name]).all():
            raise BadTrace(f"{where}: {name} holds NaN or infinity; {FINITE}")
    return QueryStats(found["mean"], found["covariance"].reshape(-1, d, d), int(pos[0]), int(queries[0]))
