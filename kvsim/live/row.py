"""One row of a decode in one layer: its policy decides over its own keys, and its attention is over what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.evolve import Course, Life, OwnTruth, decides
from kvsim.engine.reads import Reader
from kvsim.geometry import Layer
from kvsim.kernels.dense import padded
from kvsim.kernels.sparse import ALIVE, KEY_BLUR, own_softmax
from kvsim.live.growing import Growing
from kvsim.policies import allocate
from kvsim.policies.protocol import Chain

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
BLOCK = 32  # steps between two times that the dead leave their places


@dataclass(frozen=True)
class Asked:
    """A chain for some kv heads of a layer (None: all); limits: what each may hold after prefill, where layers share a budget."""

    chain: Chain
    heads: tuple[int, ...] | None = None
    limits: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Pick:
    """What one kv head reads at one step: ids i64[P] of the pages there are, the chosen bool[G, P]."""

    ids: NDArray[np.int64]
    chosen: Mask


class Deciding:
    """One chain over all kv heads of one layer, step by step, as the replay's engine decides: what is held, what of it is read.

    together: the pages are picked by a Together, which puts them into `picked` before the step."""

    def __init__(self, source: Growing, asked: Asked, keep_picks: bool = False):
        self.source, self.heads = source, asked.heads
        self.chain = allocate.for_layer(asked.chain, source.layer)
        limits = None if asked.limits is None else np.array(asked.limits, np.int64)
        self.now = Life(source, Course(self.chain, limits)) if decides(self.chain) else None
        self.picks: list[list[Pick]] | None = [] if keep_picks else None
        self.picked: tuple[NDArray[np.int64], Mask] | None = None

    @cached_property
    def readers(self) -> list[Reader] | None:
        read, record = self.chain.part("read"), self.now.bank.record if self.now else None
        if read.page is None or read.read is None:
            return None
        return [Reader(read, self.source, h, 1, record) for h in range(self.source.layer.kv_heads)]

    def held(self, i: int) -> Mask:
        """bool[Hkv, n]: positions that the i-th step may read, its own token among them."""
        t = int(self.source.t[i])
        out = np.zeros((self.source.layer.kv_heads, t + 1), bool)
        if self.now is None:
            out[:, self.source.layer.first_visible(t) :] = True
            return out
        bank = self.now.bank
        if i % BLOCK == 0:
            bank.compact(min(BLOCK, len(self.source.steps) - i))
        self.now.join(t)
        head, slot = np.nonzero(bank.valid[:, : bank.n])
        out[head, bank.pos[head, slot]] = True
        return out

    def blurred(self, i: int, side: str) -> Mask | None:
        """bool[Hkv, n]: positions whose key ("k") or value ("v") is read decoded; None: none."""
        if self.now is None or side not in self.now.bank.record.decoded:
            return None
        bank = self.now.bank
        blur = (bank.key_blur if side == "k" else bank.value_blur)[:, : bank.n] & bank.valid[:, : bank.n]
        if not blur.any():
            return None
        out = np.zeros((len(blur), int(self.source.t[i]) + 1), bool)
        head, slot = np.nonzero(blur)
        out[head, bank.pos[head, slot]] = True
        return out

    def decoded(self, side: str, n: int) -> NDArray[np.float32]:
        """f32[Hkv, n, d]: what codes decode to now."""
        assert self.now is not None
        return self.now.bank.record.decoded[side][:, :n]

    def read(self, i: int, held: Mask, dots: Floats, exact: Floats, blurred: Mask | None) -> Mask:
        """bool[Hkv, G or 1, n]: what the i-th step reads. dots, exact f64[Hkv, G, n]: dot products with keys as they are stored, and as they
        were; blurred bool[Hkv, n]: whose they differ."""
        if self.picked is not None:
            ids, chosen = self.picked
            self.picked = None
            if self.picks is not None:
                self.picks.append([Pick(ids, x) for x in chosen])
            return np.repeat(chosen, self.chain.part("read").page, -1)[..., : held.shape[1]]
        if self.readers is None:
            return held[:, None]
        src, lay = self.source, self.source.layer
        steps, t = src.steps[i : i + 1], src.t[i : i + 1]
        out = np.zeros((lay.kv_heads, lay.group, held.shape[1]), bool)
        picks = []
        for h, reader in enumerate(self.readers):
            pos = np.flatnonzero(held[h])
            flags = np.full((1, len(pos)), ALIVE, np.uint8)
            if blurred is not None:
                flags[0, blurred[h, pos]] |= KEY_BLUR
            q = src.queries(h, slice(i, i + 1)).astype(np.float64)
            known = exact if getattr(reader.read.index, "keys", "exact") == "exact" else dots
            picked = reader.pick(steps, t, pos, flags, q, OwnTruth(src, h, known[h][:, pos], q))
            out[h][:, pos] = picked.chosen[0][:, picked.pages.of_slots()]
            picks.append(Pick(picked.pages.id, picked.chosen[0]))
        if self.picks is not None:
            self.picks.append(picks)
        return out

    def settle(self, i: int, a: Floats) -> None:
        """After the attention of the i-th step, a f64[Hkv, G, n] over positions."""
        if self.now is None:
            return
        bank, own = self.now.bank, None
        if self.now.looking(i):
            pos = bank.pos[:, None]
            own = np.where(pos >= 0, np.take_along_axis(a, np.maximum(pos, 0), 2), 0.0)
        self.now.settle(i, own)


def room(layer: Layer, rows: int, total: int) -> Floats:
    """f64[rows, Hkv, G, columns] for the numbers of one step; as many columns at every step, a multiple of 8 (own_softmax)."""
    return np.zeros((rows, layer.kv_heads, layer.group, padded(total, 8)))


class RowLayer:
    """One row in one layer. inject bool[total]: positions that every read takes beside what the policy chose, as far as they are held."""

    def __init__(self, source: Growing, asked: Sequence[Asked], inject: Mask | None = None, keep_picks: bool = False):
        self.source, self.inject = source, inject
        self.parts = [Deciding(source, x, keep_picks) for x in asked]

    def step(self, i: int, exact: Floats, weight: Floats) -> Step:
        """The attention of the i-th token, which was just appended, and then what becomes of the rows. exact f64[Hkv, G, columns]: dot products
        with the keys; weight, as large, is filled with the attention."""
        src, n = self.source, int(self.source.t[i]) + 1
        held, read, dots, values = self._decide(i, n, exact)
        extra = self._inject(held, read, n)
        live = np.zeros((len(held), exact.shape[2]), bool)
        live[:, :n] = held
        mask = np.zeros(exact.shape, bool)
        mask[..., :n] = read
        columns = np.broadcast_to(np.arange(exact.shape[2]), live.shape)  # every position is a slot
        own_softmax(dots, columns, 0, live, mask, src.unit, src.cap, src.sinks, weight)
        a = weight[..., :n]
        out = self._decoded(a, values) if values else None
        for part in self.parts:
            part.settle(i, a)
        first = src.layer.first_visible(n - 1)
        whole = dots is exact and not values and bool(read[..., first:].all())
        return Step(out, held.sum(1), mask.sum(2), extra, whole)

    def _decide(self, i: int, n: int, exact: Floats) -> tuple[Mask, Mask, Floats, list[tuple[Mask, NDArray[np.float32], Any]]]:
        """(held bool[Hkv, n], read bool[Hkv, G, n], dots f64[Hkv, G, columns] with keys as stored, [(positions, decoded values, kv heads)])."""
        lay = self.source.layer
        held, read = np.zeros((lay.kv_heads, n), bool), np.zeros((lay.kv_heads, lay.group, n), bool)
        dots, values = exact, []
        q = self.source.q[i].reshape(lay.kv_heads, lay.group, -1).astype(np.float64)
        for part in self.parts:
            heads = slice(None) if part.heads is None else list(part.heads)
            live, own = part.held(i), exact
            blurred = part.blurred(i, "k")
            if blurred is not None:
                own = exact.copy()
                hat = np.matmul(q, part.decoded("k", n).swapaxes(1, 2).astype(np.float64))
                np.copyto(own[..., :n], hat, where=blurred[:, None])
            mine = part.read(i, live, own[..., :n], exact[..., :n], blurred)
            held[heads], read[heads] = live[heads], mine[heads]
            if own is not exact:
                if dots is exact:
                    dots = exact.copy()
                dots[heads] = own[heads]
            if (coded := part.blurred(i, "v")) is not None:
                values.append((coded, part.decoded("v", n), heads))
        return held, read, dots, values

    def _inject(self, held: Mask, read: Mask, n: int) -> NDArray[np.int64] | None:
        """Adds the injected positions to `read` -> how many more each query head reads, i64[Hkv, G]; None where nothing is injected."""
        if self.inject is None:
            return None
        before = read.sum(2)
        read |= (held & self.inject[:n])[:, None]
        return np.asarray(read.sum(2) - before)

    def _decoded(self, a: Floats, values: list[tuple[Mask, NDArray[np.float32], Any]]) -> NDArray[np.float32]:
        """f32[Hkv, G, dv]: a over the values as they are stored, some of them coded."""
        src, prompt = self.source, self.source.request.prompt
        weight = a.astype(np.float32)
        blurred = np.zeros((a.shape[0], a.shape[2]), bool)
        for coded, _, heads in values:
            blurred[heads] = coded[heads]
        exact = np.where(blurred[:, None], np.float32(0), weight)
        out = np.matmul(exact[..., :prompt], src.v) + np.matmul(exact[..., prompt:], src.tail["v"][:, : a.shape[2] - prompt])
        for coded, decoded, heads in values:
            own = np.matmul(np.where(coded[:, None], weight, np.float32(0)), decoded)
            out[heads] += own[heads]
        return out


@dataclass(frozen=True)
class Step:
    """out f32[Hkv, G, dv], where values are coded (None: the weights over the values as they are); held i64[Hkv], read i64[Hkv, G]: tokens that
    were held at the attention and read by it, injected ones included; injected i64[Hkv, G]: those among them that the policy would not have
    read (None: nothing is injected); whole: all that dense attention sees was read, exactly."""

    out: NDArray[np.float32] | None
    held: NDArray[np.int64]
    read: NDArray[np.int64]
    injected: NDArray[np.int64] | None
    whole: bool
