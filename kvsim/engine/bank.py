"""The live slots of one (request, layer) while a keep or a store decides step by step, and the record of what it decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.source import Source
from kvsim.errors import WrongUse
from kvsim.kernels.dense import TILE, padded
from kvsim.kernels.sparse import ALIVE, KEY_BLUR, KEY_CODED, KEY_KEPT, VALUE_BLUR, VALUE_CODED, VALUE_KEPT
from kvsim.policies.protocol import CODED, FULL, Codecs, Seen, State

NO_GROUP = -1


@dataclass(frozen=True)
class Cut:
    """One cut: index (the step's place, -1 after prefill), t its position; which tokens were protected, and which of the others got a full
    place, or any: bits u8[Hkv or 1, T / 8] by position."""

    index: int
    t: int
    safe: NDArray[np.uint8]
    full: NDArray[np.uint8]
    held: NDArray[np.uint8]


@dataclass
class Record:
    """What became of every token: all that the accounts need to know of a keep and a store.

    start u8[Hkv, T]: flags (kernels.sparse) after the cut that follows prefill; changes[i]: (kv head, positions, flags) after the
    cut of the i-th captured step; groups: rows encoded together share a number; moved i64[N, Hkv, 2]: bytes in and out of tiers;
    coded_bytes i64[N, Hkv]: bytes written by encoding; decoded["k" | "v"] f32[Hkv, T, d]; reads[i][h]: pages an observer read;
    cuts, unit i64[Hkv or 1, T]: see engine.recurrence."""

    start: NDArray[np.uint8]
    changes: list[list[tuple[int, NDArray[np.int64], NDArray[np.uint8]]]]
    moved: NDArray[np.int64]
    coded_bytes: NDArray[np.int64]
    key_group: NDArray[np.int64] | None = None
    value_group: NDArray[np.int64] | None = None
    decoded: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    reads: list[list[Any]] = field(default_factory=list)
    key_codec: Any = None
    aged_in: NDArray[np.int64] | None = None
    cuts: list[Cut] = field(default_factory=list)
    unit: NDArray[np.int64] | None = None


class Bank:
    """Columns [Hkv, n] of the live slots, positions ascending; a slot that died in this block of steps stays, not valid, until the
    next `compact`, so that columns keep their place for a while."""

    COLUMNS = ("pos", "valid", "k", "v", "key_blur", "value_blur", "key_kept", "value_kept")

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
        self.n = shape[1]
        self.state = State()
        steps = len(source.steps)
        self.record = Record(
            np.full((lay.kv_heads, total), ALIVE, np.uint8),
            [[] for _ in range(steps)],
            np.zeros((steps, lay.kv_heads, 2), np.int64),
            np.zeros((steps, lay.kv_heads), np.int64),
        )
        if codecs:
            self.record.key_group = np.full((lay.kv_heads, total), NO_GROUP)
            self.record.value_group = np.full((lay.kv_heads, total), NO_GROUP)
            self.record.key_codec = codecs.k

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
        self.state.slots = {name: np.take_along_axis(x, take[: len(x)], 1) for name, x in self.state.slots.items()}
        self.pos[:, :n][~self.valid[:, :n]] = -1
        self.n = n

    def append(self, t: int) -> None:
        """The token at position t joins, full; those that left a sliding window are no longer held."""
        self.pos[:, self.n], self.valid[:, self.n] = t, True
        self.k[:, self.n] = self.v[:, self.n] = FULL
        self.n += 1
        for name, x in self.state.slots.items():
            self.state.slots[name] = np.concatenate([x, np.zeros((len(x), 1), x.dtype)], 1)
        if self.source.layer.window is not None:
            self.drop(self.pos[:, : self.n] < self.source.layer.first_visible(t))

    def drop(self, gone: NDArray[np.bool_]) -> None:
        self.valid[:, : self.n] &= ~gone
        self.pos[:, : self.n][~self.valid[:, : self.n]] = -1

    def seen(self, step: int, t: int, limit: int, a: NDArray[np.float64] | None = None) -> Seen:
        """What a policy is shown: views it cannot write to."""

        def shown(x: NDArray[Any]) -> NDArray[Any]:
            x = x[..., : self.n].view()
            x.flags.writeable = False
            return x

        tiers = shown(self.k), shown(self.v)
        own = None if a is None else shown(a)
        return Seen(step, t, shown(self.pos), shown(self.valid), *tiers, np.full(len(self.pos), limit), own)

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
    def apply(self, k: NDArray[np.uint8], v: NDArray[np.uint8], index: int) -> None:
        """Carry out a plan, u8[Hkv, n] of tiers for keys and values; gone is irrevocable. index: the step's place, -1 after prefill."""
        before, pos = self.flags(), self.pos[:, : self.n].copy()
        for side, plan in (("k", k), ("v", v)):
            self._retier(side, plan, index)
        self.drop((self.k[:, : self.n] == 0) & (self.v[:, : self.n] == 0))
        after = self.flags()
        for h in np.flatnonzero((before != after).any(1)):
            changed = np.flatnonzero(before[h] != after[h])
            if index < 0:
                self.record.start[h, pos[h, changed]] = after[h, changed]
            else:
                self.record.changes[index].append((int(h), pos[h, changed], after[h, changed]))

    def _retier(self, side: str, plan: NDArray[np.uint8], index: int) -> None:
        n, valid = self.n, self.valid[:, : self.n]
        tier, blur = getattr(self, side)[:, :n], (self.key_blur if side == "k" else self.value_blur)[:, :n]
        down, up = valid & (plan == CODED) & (tier == FULL), valid & (plan == FULL) & (tier == CODED)
        if down.any() or up.any():
            assert self.codecs is not None
            group = self.record.key_group if side == "k" else self.record.value_group
            assert group is not None
            known = np.take_along_axis(group, np.maximum(self.pos[:, :n], 0), 1) != NO_GROUP
            if (down & ~known).any():
                self._encode(side, down & ~known, index)
            row = self.source.layer.key_bytes if side == "k" else self.source.layer.value_bytes
            if self.codecs.shadow and index >= 0:
                self.record.moved[index, :, 0] += up.sum(1) * row
                self.record.moved[index, :, 1] += (down & ~known).sum(1) * row
            kept = (self.key_kept if side == "k" else self.value_kept)[:, :n]
            blur |= down
            kept &= ~down
            kept |= up & self.codecs.ledger
            if self.codecs.shadow:
                blur &= ~up
            if not self.codecs.ledger:
                for h in range(len(group)):
                    group[h, self.pos[h, :n][up[h]]] = NO_GROUP
        tier[:] = np.where(valid, plan, 0)

    def _encode(self, side: str, rows: NDArray[np.bool_], index: int) -> None:
        """Encode whole groups of rows bool[Hkv, n] in slot order; a group is named by its first position."""
        assert self.codecs is not None
        codec, lay = (self.codecs.k if side == "k" else self.codecs.v), self.source.layer
        if codec is None:
            raise WrongUse(f"a plan codes {side} rows, but the policy declares no codec for them")
        dim = lay.key_dim if side == "k" else lay.value_dim
        pre = side == "k" and self.codecs.keys == "pre" and lay.rope is not None
        group = self.record.key_group if side == "k" else self.record.value_group
        assert group is not None
        decoded = self.record.decoded.setdefault(side, np.zeros((lay.kv_heads, self.source.request.total, dim), np.float32))
        bits, meta = codec.layout(dim)
        for h, slots in enumerate(rows):
            pos = self.pos[h, : self.n][slots]
            if not len(pos):
                continue
            if len(pos) % codec.tokens:
                raise WrongUse(
                    f"{len(pos)} {side} rows of kv head {h} are to be coded in groups of {codec.tokens}: groups must be whole"
                )
            x = self.source.rows("k_pre" if pre else side, h, pos)
            y = codec.roundtrip(x.reshape(-1, codec.tokens, dim)).reshape(-1, dim)
            decoded[h, pos] = lay.rotate(y, pos) if pre else y
            group[h, pos] = np.repeat(pos[:: codec.tokens], codec.tokens)
            if index >= 0:
                self.record.coded_bytes[index, h] += len(pos) * bits // 8 + len(pos) // codec.tokens * meta
