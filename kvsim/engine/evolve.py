"""What a keep and a store decide over the steps of one (request, layer), each decision taken from its own past alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine import select
from kvsim.engine.bank import Bank, Record
from kvsim.engine.pages import Pages
from kvsim.engine.reads import Reader
from kvsim.engine.recurrence import note
from kvsim.engine.source import Prefix, Source
from kvsim.errors import WrongUse
from kvsim.geometry import ATTENTION
from kvsim.kernels.dense import TILE, padded
from kvsim.kernels.sparse import ALIVE, KEY_BLUR, own_softmax
from kvsim.policies import allocate
from kvsim.policies.protocol import CODED, FULL, GONE, Chain, Codecs, Ranking, Seen, Store

OBSERVED_ROWS = 64  # query rows whose logits over all live slots are held at once, in float64


def evolve(source: Source, chain: Chain, cuts: bool = False) -> Record | None:
    """The record of every token's fate, or None when all stay and stay exact. cuts: the sets of every cut, too.

    A keep with ATTENTION in its needs sees at every step the softmax over what its own read part loaded."""
    keep, store, read = (chain.part(kind) for kind in ("keep", "store", "read"))
    codecs: Codecs | None = (store or keep).codecs
    if keep.hold is None and codecs is None:
        return None
    lay, observes = source.layer, ATTENTION in keep.needs
    bank = Bank(source, codecs)

    def limit(t: int) -> int:
        return allocate.hold_limit(keep, t + 1 - lay.first_visible(t), source.request, lay)

    prompt = source.request.prompt
    seen = bank.seen(-1, prompt - 1, limit(prompt - 1))
    bank.state, ranking = keep.start(Prefix(source, keep.needs, type(keep).__name__), seen)
    _place(bank, ranking, seen, store, -1, cuts)
    block = max(1, OBSERVED_ROWS // lay.group)
    watch = Watch(source, bank, read) if observes else None
    last = prompt - 1
    for i0 in range(0, len(source.steps), block):
        ts = source.t[i0 : i0 + block]
        room = int(ts[-1] - last) + block - len(ts)
        bank.compact(room)
        if watch:
            watch.begin(i0, ts, range(last + 1, int(ts[-1]) + 1))
        for i, t in enumerate(ts.tolist(), i0):
            for new in range(last + 1, t + 1):
                bank.append(new)
            last = t
            a = watch.attention(i, t) if watch else None
            seen = bank.seen(int(source.steps[i]), t, limit(t), a)
            before = bank.flags() if watch and codecs else None
            _place(bank, keep.step(bank.state, seen), seen, store, i, cuts)
            if watch and before is not None:
                watch.blurred(before)
    return bank.record


def _place(bank: Bank, ranking: Ranking | None, seen: Seen, store: Store | None, index: int, cuts: bool) -> None:
    """plan -> placement: the keep says who stays (and, when it stores too, how full), the store what of it is coded."""
    if ranking is not None:
        if type(ranking) is not Ranking:
            raise WrongUse(
                f"a keep returned {type(ranking).__name__}, expected a Ranking or None: a policy ranks, the engine counts"
            )
        tier = select.cut(ranking, seen.pos, seen.valid, seen.limit, row_cost(bank))
        if cuts:
            note(bank.record, ranking, seen, tier, index)
        if store:
            bank.apply(np.where(tier, seen.k, GONE), np.where(tier, seen.v, GONE), index)
        else:
            bank.apply(tier, tier, index)
    if store:
        after = bank.seen(seen.step, seen.t, int(seen.limit[0]))
        keys, values = store.place(after)
        bank.apply(
            np.where(keys, np.minimum(after.k, CODED), after.k), np.where(values, np.minimum(after.v, CODED), after.v), index
        )


def row_cost(bank: Bank) -> dict[int, float]:
    """Bytes of one row of one kv head by tier; a coded row with its part of its group's scales."""
    lay, cost = bank.source.layer, {FULL: float(bank.source.layer.row_bytes)}
    if bank.codecs:
        cost[CODED] = 0.0
        for codec, dim, exact in ((bank.codecs.k, lay.key_dim, lay.key_bytes), (bank.codecs.v, lay.value_dim, lay.value_bytes)):
            bits, meta = codec.layout(dim) if codec else (8 * exact, 0)
            cost[CODED] += bits / 8 + (meta / codec.tokens if codec else 0)
    return cost


class Watch:
    """A policy's own attention over its live slots, in float64: near ties of accumulated scores cannot be decided again later."""

    def __init__(self, source: Source, bank: Bank, read: Any):
        self.source, self.bank = source, bank
        heads = range(source.layer.kv_heads)
        ranks = read.page is not None and read.read is not None
        self.readers = [Reader(read, source, h, 1, bank.record) for h in heads] if ranks else None
        self.start = 0

    def begin(self, start: int, ts: NDArray[np.int64], born: range) -> None:
        """Logits of the block's queries over the slots that live now or join in it. f64[Hkv, R, n]."""
        lay, bank, n = self.source.layer, self.bank, self.bank.n
        self.start, width = start, bank.pos.shape[1]
        pos = bank.pos.copy()
        pos[:, n : n + len(born)] = born
        rows = padded(max(OBSERVED_ROWS, lay.group), OBSERVED_ROWS)
        self.keys = np.zeros((lay.kv_heads, width, lay.key_dim))
        self.q = np.zeros((lay.kv_heads, rows, lay.key_dim))
        self.dots = np.empty((lay.kv_heads, rows, width))
        blur = bank.key_blur
        for h in range(lay.kv_heads):
            real = np.flatnonzero(pos[h, : n + len(born)] >= 0)
            self.keys[h, real] = self.source.rows("k", h, pos[h, real])
            if blur[h].any():
                self.keys[h, blur[h]] = bank.record.decoded["k"][h, pos[h, blur[h]]]
            q = self.source.queries(h, slice(start, start + len(ts)))
            self.q[h, : q.shape[0] * q.shape[1]] = q.reshape(-1, lay.key_dim)
            for x in range(0, width, TILE):
                self._tile(h, x)

    def _tile(self, h: int, x: int) -> None:
        for r in range(0, self.q.shape[1], OBSERVED_ROWS):
            self.dots[h, r : r + OBSERVED_ROWS, x : x + TILE] = self.q[h, r : r + OBSERVED_ROWS] @ self.keys[h, x : x + TILE].T

    def blurred(self, before: NDArray[np.uint8]) -> None:
        """Keys that were just coded are seen decoded from the next step on."""
        now = self.bank.flags()
        for h in range(len(now)):
            new = np.flatnonzero((now[h] ^ before[h]) & KEY_BLUR & -(now[h] & ALIVE))
            for s in new:
                name = self.bank.record.decoded["k"][h] if now[h, s] & KEY_BLUR else None
                pos = self.bank.pos[h, s]
                self.keys[h, s] = name[pos] if name is not None else self.source.rows("k", h, pos[None])[0]
            for x in sorted({int(s) // TILE * TILE for s in new}):
                self._tile(h, x)

    def attention(self, i: int, t: int) -> NDArray[np.float64]:
        """f64[Hkv, G, width] of the i-th captured step, 0 where not read."""
        lay, bank, row = self.source.layer, self.bank, (i - self.start) * self.source.layer.group
        width = bank.pos.shape[1]
        read = np.ones((lay.kv_heads, 1, width), bool)
        if self.readers:
            read = np.zeros((lay.kv_heads, lay.group, width), bool)
            picked = [self._pick(h, i, t, row, read[h]) for h in range(lay.kv_heads)]
            bank.record.reads.append(picked)
        a = np.empty((lay.kv_heads, lay.group, width))
        own_softmax(self.dots, row, bank.valid, read, self.source.unit, self.source.cap, self.source.sinks, a)
        return a

    def _pick(self, h: int, i: int, t: int, row: int, read: NDArray[np.bool_]) -> Any:
        assert self.readers is not None
        bank, live = self.bank, np.flatnonzero(self.bank.valid[h, : self.bank.n])
        dots = self.dots[h, row : row + self.source.layer.group][:, live]

        q = self.source.queries(h, slice(i, i + 1)).astype(np.float64)
        flags = np.where(bank.key_blur[h, live], ALIVE | KEY_BLUR, ALIVE).astype(np.uint8)[None]
        if bank.key_blur[h, live].any() and getattr(self.readers[h].read.index, "keys", "exact") == "exact":
            dots = q[0] @ self.source.rows("k", h, bank.pos[h, live]).T  # the truth is that of the keys as captured
        picked = self.readers[h].pick(
            self.source.steps[i : i + 1], np.array([t]), bank.pos[h, live], flags, q, OwnTruth(self.source, h, dots, q)
        )
        read[:, live] = picked.chosen[0][:, picked.pages.of_slots()]
        return picked


class OwnTruth:
    """stop.Truth of one step: dots f64[G, n] over the live slots, q f64[1, G, d]."""

    def __init__(self, source: Source, head: int, dots: NDArray[np.float64], q: NDArray[np.float64]):
        self.source, self.head, self.q, self.dots, self.logits = source, head, q, dots, source.bend(dots)

    def peak(self, pages: Pages) -> NDArray[np.float64]:
        return np.maximum.reduceat(self.logits, pages.start[:-1], axis=1)[None]

    def mass(self, pages: Pages) -> NDArray[np.float64]:
        return np.add.reduceat(np.exp2(self.logits - self.top(pages)[0, :, None]), pages.start[:-1], axis=1)[None]

    def top(self, pages: Pages) -> NDArray[np.float64]:
        return self.logits.max(1)[None]

    def kth(self, r: int) -> NDArray[np.float64]:
        group, n = self.dots.shape
        return (np.partition(self.dots, n - r, axis=1)[:, n - r] * self.source.unit if r <= n else np.full(group, -np.inf))[None]

    def size(self) -> NDArray[np.float64]:
        return np.linalg.norm(self.q, axis=-1) * self.source.longest_key(self.head) * self.source.unit
