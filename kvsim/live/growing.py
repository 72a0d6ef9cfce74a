"""What the engine is fed of one row of a decode in one layer: the prompt, which all rows share, and a tail of the row's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.source import Source
from kvsim.geometry import Layer, QueryStats, Request

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]


@dataclass(eq=False)
class Prefix:
    """One layer after the prompt, as float32 (exact): k, v, k_pre [Hkv, prompt, d]; window_q [W, Hq, d]: queries of the last W prompt tokens;
    mass, wo_norm [Hq, prompt]. None: nobody needs it, or the model cannot give it."""

    layer: Layer
    k: Singles
    v: Singles
    window_q: Singles
    k_pre: Singles | None = None
    mass: Singles | None = None
    wo_norm: Singles | None = None
    q_stats: QueryStats | None = None
    wide_k: Floats = field(init=False, repr=False)  # k in float64: logits decide, and near ties must not be lost

    def __post_init__(self) -> None:
        self.wide_k = self.k.astype(np.float64)


class Growing(Source):
    """A Source whose tokens after the prompt come one by one. Rows of tokens still to come are not there."""

    def __init__(self, prefix: Prefix, request: Request):
        lay, steps = prefix.layer, request.total - request.prompt
        super().__init__(
            layer=lay,
            request=request,
            k=prefix.k,
            v=prefix.v,
            steps=np.arange(steps),
            t=np.arange(request.prompt, request.total),
            q=np.zeros((steps, lay.q_heads, lay.key_dim), np.float32),
            window_q=prefix.window_q,
            k_pre=prefix.k_pre,
            mass=prefix.mass,
            wo_norm=None if prefix.wo_norm is None else _room(prefix.wo_norm, request.total, 1),
            q_stats=prefix.q_stats,
        )
        self.prefix, self.seen = prefix, request.prompt
        self.tail: dict[str, Singles] = {
            name: np.zeros((lay.kv_heads, steps, x.shape[2]), np.float32)
            for name in ("k", "v", "k_pre")
            if (x := getattr(self, name)) is not None
        }
        self.wide_tail = np.zeros((lay.kv_heads, steps, lay.key_dim))
        self._norms: Floats | None = None

    def append(self, q: Singles, rows: Mapping[str, Singles], wo_norm: Singles | None = None) -> None:
        """The next token: q [Hq, d]; rows k, v, k_pre [Hkv, d]; wo_norm [Hq]."""
        i = self.seen - self.request.prompt
        self.q[i] = q
        for name, tail in self.tail.items():
            tail[:, i] = rows[name]
        self.wide_tail[:, i] = rows["k"]
        if self.wo_norm is not None and wo_norm is not None:
            self.wo_norm[:, self.seen] = wo_norm
        if self._norms is not None:
            self._norms[:, self.seen] = np.sqrt(np.einsum("hd,hd->h", x := rows["k"], x, dtype=np.float64))
        self.seen += 1

    # -------------------------------------------------------------------------------------------- what the engine asks of a Source
    def rows(self, name: str, head: int, pos: NDArray[np.int64], out: Floats | None = None) -> Floats:
        prompt = self.request.prompt
        old, own = getattr(self, name)[head], self.tail[name][head]
        out = np.empty((len(pos), old.shape[1])) if out is None else out
        early = pos < prompt
        out[early] = old[pos[early]]
        out[~early] = own[pos[~early] - prompt]
        return out

    def whole(self, name: str, head: int) -> Singles:
        """All rows so far of one kv head [seen, d]."""
        return np.concatenate([getattr(self, name)[head], self.tail[name][head, : self.seen - self.request.prompt]])

    def longest_key(self, head: int) -> float:
        return float(self.key_norms[head, : self.seen].max())

    @property
    def key_norms(self) -> Floats:
        """f64[Hkv, T]: L2 norms of the keys; 0 of those still to come."""
        if self._norms is None:
            self._norms = np.zeros((self.layer.kv_heads, self.request.total))
            for h in range(self.layer.kv_heads):
                x = self.whole("k", h)
                self._norms[h, : self.seen] = np.sqrt(np.einsum("td,td->t", x, x, dtype=np.float64))
        return self._norms

    def complete(self, request: Request) -> Source:
        """What a replay of this row would be fed: the tokens so far as plain arrays; `request` says how many they are."""
        n, prompt = request.total, request.prompt
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), tail[:, : n - prompt]], axis=1) for name, tail in self.tail.items()
        }
        return Source(
            layer=self.layer,
            request=request,
            steps=self.steps[: n - prompt],
            t=self.t[: n - prompt],
            q=self.q[: n - prompt],
            window_q=self.window_q,
            mass=self.mass,
            wo_norm=None if self.wo_norm is None else self.wo_norm[:, :n],
            q_stats=self.q_stats,
            **joined,
        )


def _room(x: Singles, total: int, axis: int) -> Singles:
    shape = list(x.shape)
    shape[axis] = total
    out = np.zeros(shape, x.dtype)
    out[:, : x.shape[1]] = x
    return out
