"""The live slots of one (request, layer) while a keep or a store decides step by step, and the record of what it decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.coded import encode, for_head, levels, nominal_bits
from kvsim.engine.away import ON_HOST, ON_SSD
from kvsim.engine.cuts import Cut, Sets
from kvsim.engine.source import Sight, Source
from kvsim.errors import WrongUse
from kvsim.kernels.dense import TILE, padded
from kvsim.kernels.sparse import (
    ALIVE,
    BITS,
    COSTS,
    GROUP,
    GROUP_META,
    KEY_BLUR,
    KEY_CODED,
    KEY_KEPT,
    NOMINAL,
    ROW_META,
    VALUE_BLUR,
    VALUE_CODED,
    VALUE_KEPT,
)  # fmt: skip
from kvsim.policies.protocol import CODED, FULL, GONE, HOST, SSD, Codecs, Seen, State

NO_GROUP = -1


@dataclass
class Record:
    """What became of every token: all that the accounts need to know of a keep and a store.

    start u8[Hkv, T]: flags (kernels.sparse) after the cut that follows prefill; changes[i]: (kv head, positions, flags) after the
    cut of the i-th captured step; moved i64[N, Hkv, 2]: bytes in and out of tiers; coded_bytes i64[N, Hkv]: bytes written by encoding;
    requantised i64[N, Hkv]: keys encoded again; cost["k" | "v"] i64[COSTS, Hkv, T]: what the coded form of each row costs (kernels.sparse),
    key_group, value_group its first row: rows encoded together share a number; once i64[2, Hkv]: bytes of keys and values stored once;
    level u8[Hkv, T]: the width of coded keys; decoded["k" | "v"] f32[Hkv, T, d]: what codes decode to at last (decoded_at); reads[i][h]:
    pages an observer read; cuts: of keeps that rank windows; sets of every cut (None: not asked for), unit i64[Hkv or 1, T]: the unit of
    each token at its last cut; away[i]: (kv head, positions, where: engine.away) of rows that changed
    places after the i-th step; state[i] i64[Hkv]: numbers that keep and store remember after the i-th decision, the cut after prefill first."""

    start: NDArray[np.uint8]
    changes: list[list[tuple[int, NDArray[np.int64], NDArray[np.uint8]]]]
    moved: NDArray[np.int64]
    coded_bytes: NDArray[np.int64]
    requantised: NDArray[np.int64]
    key_group: NDArray[np.int64] | None = None
    value_group: NDArray[np.int64] | None = None
    decoded: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    reads: list[list[Any]] = field(default_factory=list)
    state: list[NDArray[np.int64]] = field(default_factory=list)
    key_codec: Any = None
    cost: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    once: NDArray[np.int64] | None = None
    level: NDArray[np.uint8] | None = None
    cuts: list[Cut] = field(default_factory=list)
    sets: list[Sets] | None = None
    unit: NDArray[np.int64] | None = None
    recoded: list[Recoded] = field(default_factory=list)
    away: dict[int, list[tuple[int, NDArray[np.int64], NDArray[np.uint8]]]] = field(default_factory=dict)

    def decoded_at(self, side: str, head: int, index: int) -> NDArray[np.float32]:
        """f32[T, d]: what the codes of a kv head decode to at the attention of the step at place `index`."""
        rows = self.decoded[side][head]
        later = [x for x in self.recoded if (x.side, x.head) == (side, head) and x.index >= index]
        if later:
            rows = rows.copy()
        for x in reversed(later):
            rows[x.pos] = x.rows
        return rows

    def versions(self, head: int, index: NDArray[np.int64]) -> list[slice]:
        """Runs of steps, places `index` ascending, over which the codes of a kv head decode to the same rows."""
        changes = sorted({x.index for x in self.recoded if x.head == head})
        edges = [0, *sorted(set(np.searchsorted(index, changes, side="right").tolist()) - {0, len(index)}), len(index)]
        return [slice(a, b) for a, b in pairwise(edges)]


@dataclass(frozen=True)
class Recoded:
    """Rows of a kv head that were encoded again after the step at place `index`: what their codes decoded to until then."""

    index: int
    side: str
    head: int
    pos: NDArray[np.int64]
    rows: NDArray[np.float32]


class Bank:
    """Columns [Hkv, n] of the live slots, positions ascending; a slot that died in this block of steps stays, not valid, until the
    next `compact`, so that columns keep their place for a while."""

    COLUMNS = ("pos", "valid", "k", "v", "key_blur", "value_blur", "key_kept", "value_kept", "away")

    def __init__(self, source: Source, codecs: Codecs | None):
        lay, self.source, self.codecs = source.layer, source, codecs
        stop, total = source.request.prompt, source.request.total
        first = lay.first_visible(stop - 1)
        shape = (lay.kv_heads, stop - first)
        self.pos = np.tile(np.arange(first, stop), (lay.kv_heads, 1))
        self.valid = np.ones(shape, bool)
        self.k, self.v = np.full(shape, FULL, np.uint8), np.full(shape, FULL, np.uint8)
        self.key_blur, self.value_blur = np.zeros(shape, bool), np.zeros(shape, bool)
        self.key_kept, self.value_kept = np.zeros(shape, bool), np.zeros(shape, bool)
        self.away = np.zeros(shape, np.uint8)
        self.n, self.newest = shape[1], stop - 1  # columns in use; the newest position among them
        self.state, self.store_state = State(), State()
        steps = len(source.steps)
        self.record = Record(
            np.full((lay.kv_heads, total), ALIVE, np.uint8),
            [[] for _ in range(steps)],
            np.zeros((steps, lay.kv_heads, 2), np.int64),
            *np.zeros((2, steps, lay.kv_heads), np.int64),
        )
        if codecs:
            record, shape = self.record, (lay.kv_heads, total)
            record.cost = {side: np.zeros((COSTS, *shape), np.int64) for side in "kv"}
            for cost in record.cost.values():
                cost[GROUP] = NO_GROUP
            record.key_group, record.value_group = record.cost["k"][GROUP], record.cost["v"][GROUP]
            record.once, record.level = np.zeros((2, lay.kv_heads), np.int64), np.zeros(shape, np.uint8)
            record.key_codec = codecs.k

    # -------------------------------------------------------------------------------------------- slots
    def compact(self, room: int) -> None:
        """Close the ranks of the dead and leave `room` free columns at the end."""
        n = int(self.valid[:, : self.n].sum(1).max())
        take = np.argsort(~self.valid[:, : self.n], axis=1, kind="stable")[:, :n]
        for name in self.COLUMNS:
            old = getattr(self, name)
            new = np.zeros((len(old), padded(n + room, TILE)), old.dtype)
            new[:, :n] = np.take_along_axis(old, take, 1)
            setattr(self, name, new)
        for state in (self.state, self.store_state):
            state.slots = {name: np.take_along_axis(x, take[: len(x)], 1) for name, x in state.slots.items()}
        self.pos[:, :n][~self.valid[:, :n]] = -1
        self.n = n

    def append(self, t: int) -> None:
        """The token at position t joins, full; those that left a sliding window are no longer held."""
        self.newest = t
        self.pos[:, self.n], self.valid[:, self.n] = t, True
        self.k[:, self.n] = self.v[:, self.n] = FULL
        self.away[:, self.n] = 0
        self.n += 1
        for state in (self.state, self.store_state):
            for name, x in state.slots.items():
                state.slots[name] = np.concatenate([x, np.zeros((len(x), 1), x.dtype)], 1)
        if self.source.layer.window is not None:
            self.drop(self.pos[:, : self.n] < self.source.layer.first_visible(t))

    def drop(self, gone: NDArray[np.bool_]) -> None:
        at = np.nonzero(self.valid[:, : self.n] & gone)
        self.valid[at], self.pos[at] = False, -1

    def seen(
        self,
        step: int,
        t: int,
        limit: int | NDArray[np.int64],
        a: NDArray[np.float64] | None = None,
        sight: Sight | None = None,
        index: int = -1,
    ) -> Seen:
        """What a policy is shown: views it cannot write to. sight: of the rows beside, after the step at place `index`."""

        def frozen(x: NDArray[Any]) -> NDArray[Any]:
            x = x.view()
            x.flags.writeable = False
            return x

        def shown(x: NDArray[Any]) -> NDArray[Any]:
            return frozen(x[..., : self.n])

        tiers = shown(self.k), shown(self.v)
        own, pos = None if a is None else shown(a), shown(self.pos)
        beside: dict[str, Any] = {name: frozen(x) for name, x in sight.at(index, pos).items()} if sight else {}
        limits = np.full(len(pos), limit, np.int64)
        return Seen(step, t, pos, shown(self.valid), *tiers, limits, own, **beside)

    def state_numbers(self) -> NDArray[np.int64]:
        """i64[Hkv]: numbers that a copy of what keep and store remember takes; what is once for the layer stands on kv head 0."""
        live = np.array([np.count_nonzero(x) for x in self.valid[:, : self.n]])
        out = np.zeros_like(live)
        for state in (self.state, self.store_state):
            for x in state.slots.values():
                out[: len(x)] += live[: len(x)]
            out[0] += sum(x.size for x in state.other.values() if isinstance(x, np.ndarray))
        return out

    def flags(self) -> NDArray[np.uint8]:
        """u8[Hkv, n] of the slots in use."""
        valid = self.valid[:, : self.n]
        out = valid.astype(np.uint8) * np.uint8(ALIVE)
        if self.codecs:
            sides = ((self.k == CODED, KEY_CODED), (self.v == CODED, VALUE_CODED), (self.key_blur, KEY_BLUR))
            kept = ((self.key_kept, KEY_KEPT), (self.value_kept, VALUE_KEPT))
            for has, bit in (*sides, (self.value_blur, VALUE_BLUR), *kept):
                out |= (has[:, : self.n] & valid).astype(np.uint8) * np.uint8(bit)
        return out

    # -------------------------------------------------------------------------------------------- tiers
    def apply(self, k: NDArray[np.uint8], v: NDArray[np.uint8], index: int, widths: tuple[Any, Any] = (None, None)) -> None:
        """Carry out a plan, u8[Hkv, n] of tiers for keys and values; gone is irrevocable. index: the step's place, -1 after prefill.
        widths u8[Hkv, n] of keys and values: which codec of several encodes a row, 1 the first (None: it)."""
        if self.codecs is None:
            self._evict(k, index)
            return
        before, pos = self.flags(), self.pos[:, : self.n].copy()
        where = np.where(k == HOST, ON_HOST, np.where(k == SSD, ON_SSD, 0)).astype(np.uint8)
        for side, plan, width in (("k", k, widths[0]), ("v", v, widths[1])):
            self._retier(side, np.where(plan > FULL, CODED, plan), index, width)
        self._move(where, index)
        self.drop((self.k[:, : self.n] == 0) & (self.v[:, : self.n] == 0))
        after = self.flags()
        for h in np.flatnonzero((before != after).any(1)):
            changed = np.flatnonzero(before[h] != after[h])
            self._changed(int(h), pos[h, changed], after[h, changed], index)

    def _evict(self, tier: NDArray[np.uint8], index: int) -> None:
        """Where nothing is ever coded, a row stays or goes."""
        before, pos = self.valid[:, : self.n].copy(), self.pos[:, : self.n].copy()
        self.drop(tier == GONE)
        for h, gone in enumerate(before & ~self.valid[:, : self.n]):
            if len(slots := np.flatnonzero(gone)):
                self.k[h, slots] = self.v[h, slots] = GONE
                self._changed(h, pos[h, slots], np.zeros(len(slots), np.uint8), index)

    def _changed(self, h: int, pos: NDArray[np.int64], flags: NDArray[np.uint8], index: int) -> None:
        if index < 0:
            self.record.start[h, pos] = flags
        else:
            self.record.changes[index].append((h, pos, flags))

    def _move(self, where: NDArray[np.uint8], index: int) -> None:
        """Coded rows change places: out is to a slower one, in to a faster one."""
        away = self.away[:, : self.n]
        moved = self.valid[:, : self.n] & (self.k[:, : self.n] > 0) & (away != where)
        for h in np.flatnonzero(moved.any(1)):
            pos, old, new = (x[h, : self.n][moved[h]] for x in (self.pos, away, where))
            self.record.away.setdefault(index, []).append((int(h), pos, new))
            if index >= 0:
                self.record.moved[index, h, 0] += self._coded_bytes(int(h), pos[new < old])
                self.record.moved[index, h, 1] += self._coded_bytes(int(h), pos[new > old])
        away[:] = where

    def _coded_bytes(self, h: int, pos: NDArray[np.int64]) -> int:
        """Of the coded rows at some positions of a kv head; groups are paid whole."""
        total = 0
        for cost in self.record.cost.values():
            _, first = np.unique(cost[GROUP, h, pos], return_index=True)
            total += int(cost[BITS, h, pos].sum()) // 8 + int(
                cost[ROW_META, h, pos].sum() + cost[GROUP_META, h, pos[first]].sum()
            )
        return total

    def tiers(self) -> NDArray[np.uint8]:
        """u8[Hkv, n]: the tier of every slot by its key, HOST and SSD among them."""
        away = self.away[:, : self.n]
        return np.where(away > 0, FULL + away, self.k[:, : self.n]).astype(np.uint8)

    def _retier(self, side: str, plan: NDArray[np.uint8], index: int, width: NDArray[np.uint8] | None = None) -> None:
        n, valid = self.n, self.valid[:, : self.n]
        tier, blur = getattr(self, side)[:, :n], (self.key_blur if side == "k" else self.value_blur)[:, :n]
        down, up = valid & (plan == CODED) & (tier == FULL), valid & (plan == FULL) & (tier == CODED)
        if down.any() or up.any():
            assert self.codecs is not None
            kept = (self.key_kept if side == "k" else self.value_kept)[:, :n]
            fresh = down & ~kept  # no codes are kept beside them
            if fresh.any():
                self._encode(side, fresh, index, width)
            row = self.source.layer.key_bytes if side == "k" else self.source.layer.value_bytes
            if self.codecs.shadow and index >= 0:
                self.record.moved[index, :, 0] += up.sum(1) * row
                self.record.moved[index, :, 1] += fresh.sum(1) * row
            blur |= down
            kept &= ~down
            kept |= up & self.codecs.ledger
            if self.codecs.shadow:
                blur &= ~up
        tier[:] = np.where(valid, plan, 0)

    def _encode(self, side: str, rows: NDArray[np.bool_], index: int, width: NDArray[np.uint8] | None = None) -> None:
        """Encode whole groups of rows bool[Hkv, n] in slot order, those of one width together; a group is named by its first position."""
        assert self.codecs is not None
        codecs = levels(self.codecs.k if side == "k" else self.codecs.v)
        width = np.ones(rows.shape, np.uint8) if width is None else width
        if rows.any() and not 1 <= width[rows].min() <= width[rows].max() <= len(codecs):
            if not codecs:
                raise WrongUse(f"a plan codes {side} rows, but the policy declares no codec for them")
            raise WrongUse(
                f"a plan codes {side} rows at level {width[rows].max()}, but the policy declares {len(codecs)} codecs for them"
            )
        for h, slots in enumerate(rows):
            for level, codec in enumerate(codecs, 1):
                mine = np.flatnonzero(slots & (width[h] == level))
                if len(mine):
                    self._encode_rows(side, h, mine, level, for_head(codec, self.source.layer, h), index)

    def _encode_rows(self, side: str, h: int, slots: NDArray[np.int64], level: int, codec: Any, index: int) -> None:
        """Encode the rows in some slots of one kv head by one codec."""
        assert self.codecs is not None
        pos = self.pos[h, slots]
        lay, record, tokens = self.source.layer, self.record, codec.tokens or len(pos)
        assert record.once is not None
        assert record.level is not None
        if len(pos) % tokens:
            raise WrongUse(f"{len(pos)} {side} rows of kv head {h} are to be coded in groups of {tokens}: groups must be whole")
        dim = lay.key_dim if side == "k" else lay.value_dim
        pre = side == "k" and self.codecs.keys == "pre" and lay.rope is not None
        x = self.source.rows("k_pre" if pre else side, h, pos)
        decoded = record.decoded.setdefault(side, np.zeros((lay.kv_heads, self.source.request.total, dim), np.float32))
        old, again = decoded[h, pos].copy(), (self.key_blur if side == "k" else self.value_blur)[h, slots]
        if again.any():  # what was read from codes is coded as it was read
            x[again] = lay.rotated_back(old[again].astype(np.float64), pos[again]) if pre else old[again]
        coded = encode(codec, x.reshape(-1, tokens, dim))
        y = coded.values.reshape(-1, dim)
        decoded[h, pos] = lay.rotate(y, pos) if pre else y
        if again.any():
            self._recoded(side, h, index, pos[again], old[again])
        cost = record.cost[side]
        cost[GROUP, h, pos], cost[GROUP_META, h, pos] = np.repeat(pos[::tokens], tokens), np.repeat(coded.group_meta, tokens)
        cost[BITS, h, pos], cost[ROW_META, h, pos] = coded.bits.ravel(), coded.row_meta.ravel()
        cost[NOMINAL, h, pos] = nominal_bits(codec, dim)
        if side == "k":
            record.level[h, pos] = level
        record.once[0 if side == "k" else 1, h] = codec.once(dim) if hasattr(codec, "once") else 0
        if index >= 0:
            record.coded_bytes[index, h] += int(coded.bits.sum()) // 8 + int(coded.row_meta.sum() + coded.group_meta.sum())

    def _recoded(self, side: str, h: int, index: int, pos: NDArray[np.int64], old: NDArray[np.float32]) -> None:
        if side == "k":
            self.record.requantised[index, h] += len(pos)
        if not np.array_equal(self.record.decoded[side][h, pos], old):
            self.record.recoded.append(Recoded(index, side, h, pos, old))
