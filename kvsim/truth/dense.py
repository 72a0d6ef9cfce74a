"""Dense attention of one (request, layer) of a trace: what every policy is judged against, for all decode steps and query heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels import dense as kernel
from kvsim.kernels.dense import LOG2E, PAGE, ROWS, TILE
from kvsim.kernels.memory import empty, leave, room
from kvsim.kernels.numbers import to_float32
from kvsim.kernels.product import GRID
from kvsim.trace.open import Lane


@dataclass(frozen=True, eq=False)
class Truth:
    """Pages are PAGE tokens of the absolute grid, P of them; a page that a query cannot see has peak -inf and mass 0."""

    steps: NDArray[np.int64]  # [N]
    t: NDArray[np.int64]  # [N] positions of the queries
    lse: NDArray[np.float64]  # [Hq, N]: natural log of the softmax denominator, learned sinks included
    out: NDArray[np.float32] | None  # [Hq, N, dv]: attention output before W_O
    top: NDArray[np.int32] | None  # [Hq, N, 64]: positions of the highest logits, ties to the lower; -1 where fewer are visible
    told: tuple[
        tuple[NDArray[np.float32], ...], ...
    ]  # of each kv head and block of n steps, as the kernel writes them: [2, P, n * G]

    @cached_property
    def peak(self) -> NDArray[np.float32]:
        """f32[Hq, N, P]: the largest logit, scale and soft cap included."""
        return self._by_head(0)

    @cached_property
    def mass(self) -> NDArray[np.float32]:
        """f32[Hq, N, P]: attention probability."""
        return self._by_head(1)

    def _by_head(self, which: int) -> NDArray[np.float32]:
        """Put together when it is asked for: turning rows and columns takes a tenth of all the rest."""
        heads = [np.concatenate([x[which] for x in blocks], axis=1) for blocks in self.told]
        return np.concatenate([x.reshape(len(x), len(self.t), -1).transpose(2, 1, 0) for x in heads])


def dense(lane: Lane, output: bool = True, top: int = 64) -> Truth:
    """The truth of a lane; `output=False` and `top=0` leave those out. Memory: one kv head's K as float32, 256 rows of logits
    over all T tokens, and the result."""
    lay, steps = lane.layer, len(lane.steps)
    pages = -(-lane.request.total // PAGE)
    told: list[list[NDArray[np.float32]]] = [[] for _ in range(lay.kv_heads)]
    lse = np.empty((lay.q_heads, steps))
    out = np.empty((lay.q_heads, steps, lay.value_dim), np.float32) if output else None
    best = np.full((lay.q_heads, steps, top), -1, np.int32) if top else None
    tokens = kernel.padded(lane.request.total, TILE)
    kept = output or top > 0
    per = max(1, (ROWS if kept else 2 * ROWS) // lay.group)  # more are a little faster, and cost memory once they are kept
    length, width = tokens if kept else kernel.NEAR, kernel.padded(min(per, steps) * lay.group, GRID)
    memory = room(length * width)
    dots = memory[: length * width].reshape(length, width)
    stats = empty((2, tokens // PAGE, width))
    start = np.arange(0, tokens + 1, PAGE)
    unit, cap = lay.scale * LOG2E, (lay.softcap or 0.0) * LOG2E
    for h in range(lay.kv_heads):
        keys = to_float32(lane.k[h], tokens) if top else None
        longest = 0.0 if keys is None else float(np.sqrt(np.einsum("td,td->t", keys, keys).max()))
        mine = slice(h * lay.group, (h + 1) * lay.group)
        for i in range(0, steps, per):
            t = lane.t[i : i + per]
            rows, part = len(t) * lay.group, np.s_[mine, i : i + per]
            flags, every = kernel.visible(lay.first_of_each(t), t, tokens)
            raw = lane.q[i : i + per, mine]
            q = kernel.block(to_float32(raw.reshape(rows, -1)), width)
            sink = np.full(len(q), -1e300)
            if lay.sinks is not None:
                sink[:rows] = np.tile(np.array(lay.sinks[mine]) * LOG2E, len(t))
            kernel.scan(lane.k[h], q, flags, every, lay.group, unit, cap, dots, *stats)
            denominator = np.empty(len(q))
            kernel.denominator(*stats, sink, np.float32(unit), np.float32(cap), denominator)
            here = np.empty((2, pages, rows), np.float32)
            kernel.probability(*(x[:pages] for x in stats), denominator, np.float32(unit), np.float32(cap), *here)
            told[h].append(here)
            shape = (len(t), lay.group, -1)
            lse[part] = _heads_first(denominator / LOG2E, shape)[..., 0]
            strongest = None
            if keys is not None:
                strongest = kernel.Strongest(dots, flags, every, start, stats[0], keys, q, lay.group, longest, top)
            if out is not None:
                found = kernel.output(dots, lane.v[h], flags, every, lay.group, unit, cap, denominator, strongest)
                out[part] = _heads_first(found, shape)
            elif strongest is not None:
                strongest.look(0, len(stats[0]))
            if best is not None and strongest is not None:
                found, count = strongest.told()
                best[part] = _heads_first(np.where(np.arange(top) < count[:, None], found, -1), shape)
    leave(memory)
    return Truth(lane.steps, lane.t, lse, out, best, tuple(map(tuple, told)))


def _heads_first(rows: NDArray[Any], shape: tuple[int, int, int]) -> NDArray[Any]:
    """Rows of a block [R, ...], step by step -> [G, N, ...]."""
    return rows[: shape[0] * shape[1]].reshape(shape).swapaxes(0, 1)
