"""What the engine is fed: the queries, keys and values of one (request, layer), from a trace or from a running model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import WrongUse
from kvsim.geometry import (
    FUTURE,
    KEY_NORM,
    KEYS,
    PREFILL_MASS,
    Q_STATS,
    QUERIES,
    VALUES,
    WO_NORM,
    Indexer,
    Layer,
    Need,
    QueryStats,
    Request,
    Span,
)
from kvsim.kernels.dense import LOG2E, TILE, bend, padded
from kvsim.kernels.numbers import to_float32, to_float64
from kvsim.kernels.product import times

Raw = NDArray[Any]  # float32, float16, or the bits of bfloat16 as uint16
NO_SINK = -1e300


@dataclass
class Source:
    """k, v, k_pre: raw numbers [Hkv, T, d]; q f32[N, Hq, d] of the decode steps; window_q f32[W, Hq, d]: the last W prompt rows.

    steps i64[N] are the decode steps that were captured, ascending; t i64[N] their positions; mass f32[Hq, prompt]."""

    layer: Layer
    request: Request
    k: Raw
    v: Raw
    steps: NDArray[np.int64]
    t: NDArray[np.int64]
    q: NDArray[np.float32]
    window_q: NDArray[np.float32]
    k_pre: Raw | None = None
    mass: NDArray[np.float32] | None = None
    wo_norm: NDArray[np.float32] | None = None
    q_stats: QueryStats | None = None
    indexer: Indexer | None = None  # in float32
    before: NDArray[np.float32] | None = None  # [N, Hq, d]: queries of the attention layer before, at the same steps
    _one: dict[str, Any] = field(default_factory=dict, repr=False)  # the float32 copies of one kv head at a time

    @cached_property
    def unit(self) -> float:
        """A dot product times `unit` is a logit in powers of 2."""
        return self.layer.scale * LOG2E

    @cached_property
    def cap(self) -> float:
        """The soft cap in powers of 2; 0 without."""
        return (self.layer.softcap or 0.0) * LOG2E

    @cached_property
    def sinks(self) -> NDArray[np.float64]:
        """f64[Hkv, G]: learned sink logits in powers of 2, NO_SINK without."""
        shape = (self.layer.kv_heads, self.layer.group)
        if self.layer.sinks is None:
            return np.full(shape, NO_SINK)
        return np.reshape(self.layer.sinks, shape) * LOG2E

    def bend(self, dots: NDArray[Any]) -> NDArray[Any]:
        """Dot products -> logits in powers of 2, soft-capped."""
        return bend(dots, self.unit, self.cap)

    def queries(self, head: int, steps: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """f32[n, G, d] of one kv head."""
        g = self.layer.group
        return self.q[steps, head * g : (head + 1) * g]

    def whole(self, name: str, head: int) -> NDArray[np.float32]:
        """`k` or `v` of one kv head as float32 [T padded to TILE, d]; kept until another head is asked for."""
        if self._one.get(name, (None,))[0] != head:
            raw = getattr(self, name)[head]
            self._one[name] = (head, to_float32(raw, padded(len(raw), TILE)))
        return self._one[name][1]

    def rows(self, name: str, head: int, pos: NDArray[np.int64], out: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """`k`, `v` or `k_pre` of one kv head at positions [n] -> float64 [n, d], exact."""
        return to_float64(getattr(self, name)[head], pos, out)

    def longest_key(self, head: int) -> float:
        """The largest L2 norm of a key of one kv head."""
        if self._one.get("longest", (None,))[0] != head:
            keys = self.whole("k", head)
            self._one["longest"] = (head, float(np.sqrt(np.einsum("td,td->t", keys, keys).max())))
        return float(self._one["longest"][1])

    @cached_property
    def value_norms(self) -> NDArray[np.float64]:
        """f64[Hkv, T]: L2 norms of the values."""
        return self._strays(np.zeros((len(self.v), 1)))

    @cached_property
    def value_centre(self) -> NDArray[np.float64]:
        """f64[Hkv, dv]: the mean value of the prompt."""
        prompt = self.request.prompt
        return np.stack([to_float32(np.ascontiguousarray(x[:prompt])).mean(axis=0, dtype=np.float64) for x in self.v])

    @cached_property
    def value_strays(self) -> NDArray[np.float64]:
        """f64[Hkv, T]: L2 distances of the values from the centre."""
        return self._strays(self.value_centre)

    def _strays(self, centre: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.empty(self.v.shape[:2])
        for h, raw in enumerate(self.v):
            for at in range(0, len(raw), TILE):  # float64 is twice to four times as large as what is stored
                out[h, at : at + TILE] = np.linalg.norm(to_float32(raw[at : at + TILE]) - centre[h], axis=1)
        return out

    @cached_property
    def key_norms(self) -> NDArray[np.float64]:
        """f64[Hkv, T]: L2 norms of the keys."""
        return _norms(self.k)

    @cached_property
    def future(self) -> Future:
        """What later steps look at; for oracles."""
        return Future(self)

    def attention(
        self, head: int, g: int, q: NDArray[np.float64], t: NDArray[np.int64], keys: NDArray[np.float64], first: int = 0
    ) -> NDArray[np.float64]:
        """f64[n, m]: softmax, in float64, of the queries [n, d] at positions t of the g-th query head over the keys [m, d] at positions
        first, first + 1, …; 0 where a query does not see a key."""
        pos = first + np.arange(len(keys))
        since = self.layer.first_of_each(t)
        x = np.where((pos <= t[:, None]) & (pos >= since[:, None]), self.bend(times(q, keys.T)), -np.inf)
        sink = self.sinks[head, g]
        top = np.maximum(x.max(1), sink)[:, None]
        e = np.exp2(x - top)
        out: NDArray[np.float64] = e / (e.sum(1, keepdims=True) + np.exp2(sink - top))
        return out


def _norms(rows: Raw) -> NDArray[np.float64]:
    """[Hkv, T, d] -> f64[Hkv, T]: L2 norms."""
    out = np.empty(rows.shape[:2])
    for h, raw in enumerate(rows):
        out[h] = np.sqrt(np.einsum("td,td->t", x := to_float32(raw), x, dtype=np.float64))
    return out


class Prefix:
    """What a keep may look at before decoding (protocol.Prefix); the columns are the live slots, first_visible ... prompt - 1."""

    def __init__(self, source: Source, needs: frozenset[Need], name: str):
        self._source, self.needs, self.name, self.layer = source, needs, name, source.layer
        self.stop = source.request.prompt
        self.first = source.layer.first_visible(self.stop - 1)
        self.where = source.request.id, source.layer.id
        self.spans: Sequence[Span] = source.request.spans

    def _declared(self, what: str, ok: bool) -> None:
        if not ok:
            raise WrongUse(f"{self.name} looks at {what} but does not declare it in needs")

    def mass(self) -> NDArray[np.float64]:
        """f64[Hq, n]: attention mass of all prompt queries on each key."""
        self._declared("prefill_mass", PREFILL_MASS in self.needs)
        assert self._source.mass is not None
        return self._source.mass[:, self.first : self.stop].astype(np.float64)

    def queries(self) -> NDArray[np.float64]:
        """f64[Hkv, n]: how many prompt queries saw each key: its own and all later ones, or it would have left a sliding window."""
        return np.tile(np.arange(self.stop - self.first, 0.0, -1.0), (self.layer.kv_heads, 1))

    def window(self, rows: int) -> NDArray[np.float64]:
        """f64[min(rows, prompt), Hq, n]: attention of the last prompt queries, in float64: a cut cannot be decided again later."""
        q = self._window_q(rows)
        rows = len(q)
        t, lay = np.arange(self.stop - rows, self.stop), self.layer
        pos = np.arange(self.first, self.stop)
        out = np.empty((rows, lay.q_heads, len(pos)))
        for h in range(lay.kv_heads):
            keys = self._source.rows("k", h, pos)
            for g in range(lay.group):
                row = h * lay.group + g
                out[:, row] = self._source.attention(h, g, q[:, row], t, keys, self.first)
        return out

    def last_queries(self, rows: int) -> NDArray[np.float64]:
        """f64[min(rows, prompt), Hkv, G, d]: the last prompt queries, oldest first."""
        self._declared("queries", QUERIES in self.needs)
        q = self._window_q(rows)
        return q.reshape(len(q), self.layer.kv_heads, self.layer.group, -1)

    def _window_q(self, rows: int) -> NDArray[np.float64]:
        """f64[min(rows, prompt), Hq, d]."""
        self._declared(f"window({rows})", any(n.name == "window" and n.rows >= rows for n in self.needs))
        first = len(self._source.window_q) - min(rows, self.stop)
        return self._source.window_q[first:].astype(np.float64)

    def wo_norm(self) -> NDArray[np.float64]:
        """f64[Hq, n]: L1 norm of each query head's output projection of the value."""
        self._declared("wo_norm", WO_NORM in self.needs)
        assert self._source.wo_norm is not None
        return self._source.wo_norm[:, self.first : self.stop].astype(np.float64)

    def key_norm(self) -> NDArray[np.float64]:
        """f64[Hkv, n]: L2 norm of the key."""
        self._declared("key_norm", KEY_NORM in self.needs)
        return self._source.key_norms[:, self.first : self.stop].copy()

    def keys(self) -> NDArray[np.float64]:
        """f64[Hkv, n, d]: the keys."""
        self._declared("keys", KEYS in self.needs)
        return self._rows("k")

    def values(self) -> NDArray[np.float64]:
        """f64[Hkv, n, dv]: the values."""
        self._declared("values", VALUES in self.needs)
        return self._rows("v")

    def q_stats(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean f64[Hq, d] and covariance f64[Hq, d, d] of the prompt queries before RoPE."""
        self._declared("q_stats", Q_STATS in self.needs)
        stats = self._source.q_stats
        assert stats is not None
        return stats.mean.astype(np.float64), stats.covariance.astype(np.float64)

    def _rows(self, name: str) -> NDArray[np.float64]:
        pos = np.arange(self.first, self.stop)
        return np.stack([self._source.rows(name, h, pos) for h in range(self.layer.kv_heads)])

    def future(self) -> NDArray[np.float64]:
        """f64[Hkv, n]: dense attention that all captured decode steps pay, summed over the group."""
        self._declared("future", FUTURE in self.needs)
        return self._source.future.after(-1)[:, self.first : self.stop].copy()

    def by_kv_head(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """[Hq, n] -> [Hkv, n], summed over the group."""
        return x.reshape(self.layer.kv_heads, self.layer.group, -1).sum(1)


class Future:
    """The dense attention that the steps after a step pay to every position, summed over the group.

    Steps are cut into about √N blocks: what the blocks after one pay is held, what the steps inside it pay is computed anew."""

    def __init__(self, source: Source):
        self.source, steps = source, len(source.steps)
        self.size = max(1, math.isqrt(steps))
        self.starts = list(range(0, steps, self.size))
        self.later = np.zeros((len(self.starts) + 1, *source.k.shape[:2]))
        for b in reversed(range(len(self.starts))):
            self.later[b] = self.later[b + 1] + self._paid(b).sum(0)
        self.block, self.left = -1, self.later[:0]

    def after(self, i: int) -> NDArray[np.float64]:
        """f64[Hkv, T]: what the captured steps after the i-th pay (-1: all of them)."""
        if i < 0:
            return self.later[0]
        block, at = divmod(i, self.size)
        if block != self.block:
            paid = self._paid(block)
            paid = np.concatenate([paid[1:], self.later[block + 1][None]])
            self.block, self.left = block, paid[::-1].cumsum(0)[::-1]
        return self.left[at]

    def _paid(self, block: int) -> NDArray[np.float64]:
        """f64[n, Hkv, T]: what each step of a block pays."""
        src, steps = self.source, slice(self.starts[block], self.starts[block] + self.size)
        t, every = src.t[steps], np.arange(src.request.total)
        out = np.zeros((len(t), src.layer.kv_heads, len(every)))
        for h in range(src.layer.kv_heads):
            keys, q = src.rows("k", h, every), src.queries(h, steps).astype(np.float64)
            for g in range(src.layer.group):
                out[:, h] += src.attention(h, g, q[:, g], t, keys)
        return out


class Sight:
    """What a keep is shown of every live slot beside its own attention, as far as its needs say."""

    def __init__(self, source: Source, needs: frozenset[Need]):
        self.source, self.needs = source, needs

    def at(self, i: int, pos: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """After the i-th captured step (-1: after prefill), fields of protocol.Seen for slots at pos i64[Hkv, n]; 0 where there is none."""
        src, found = self.source, {}
        if QUERIES in self.needs and i >= 0:
            found["q"] = src.q[i].astype(np.float64).reshape(src.layer.kv_heads, src.layer.group, -1)
        if KEY_NORM in self.needs:
            found["key_norm"] = _taken(src.key_norms, pos)
        for need, name, told in ((KEYS, "k", "keys"), (VALUES, "v", "values")):
            if need in self.needs:
                rows = [src.rows(name, h, np.maximum(at, 0)) for h, at in enumerate(pos)]
                found[told] = np.where((pos >= 0)[..., None], rows, 0.0)
        if FUTURE in self.needs:
            found["future"] = _taken(src.future.after(i), pos)
        if WO_NORM in self.needs:
            assert src.wo_norm is not None
            by_group = src.wo_norm.reshape(src.layer.kv_heads, src.layer.group, -1)
            found["wo_norm"] = _taken(by_group, pos[:, None]).astype(np.float64)
        return found


def _taken(x: NDArray[Any], pos: NDArray[np.int64]) -> NDArray[Any]:
    """x[..., pos], 0 where pos is -1."""
    return np.where(pos >= 0, np.take_along_axis(x, np.maximum(pos, 0), -1), 0)
