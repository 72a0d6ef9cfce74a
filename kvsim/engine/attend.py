"""Dense attention of a block of steps of one kv head, and the attention of a policy over what it held and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.bank import Record
from kvsim.engine.pages import CHUNK, Pages, pages_of
from kvsim.engine.reads import Picked
from kvsim.engine.source import NO_SINK, Source
from kvsim.kernels import dense as kernel
from kvsim.kernels import sparse
from kvsim.kernels.dense import NONE, PAGE, ROWS, TILE, padded
from kvsim.kernels.memory import NOTHING, empty, leave, room
from kvsim.kernels.order import ABSENT, RANKED, ranked
from kvsim.kernels.product import GRID, product, strips, times
from kvsim.kernels.sparse import ALIVE, KEY_BLUR
from kvsim.policies.protocol import Index

TOP = 64
HEAD_TOKENS, NEAR_TOKENS = 4, 64  # what `far` leaves out at both ends

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Stats = tuple[Floats, Floats]


def steps_per_block(group: int) -> int:
    """Decode steps that are looked at together."""
    return max(1, ROWS // group)


def blocks(source: Source, places: Ints) -> list[Ints]:
    """Places in source.steps, ascending, in blocks: a step is in the same one whatever steps are chosen, or captured."""
    block = source.steps[places] // steps_per_block(source.layer.group)
    return [x for x in np.split(places, np.flatnonzero(np.diff(block)) + 1) if len(x)]


@dataclass
class Dense:
    """Full attention of steps `index` (places in source.steps, one of `blocks`) of kv head `head`; rows r = i * G + g.

    flags u8[N, T padded]: ALIVE where visible; lse f64[R] in powers of 2, learned sink included. keep: whether the dot products stay, for
    who needs more than masses of pages; they are the largest of all there is."""

    source: Source
    head: int
    index: Ints
    keep: bool = True
    memory: NDArray[np.float32] = field(init=False, default_factory=lambda: NOTHING)  # where its dot products are
    _stats: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = field(default_factory=dict)
    _mass: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    _mass_order: dict[int, tuple[NDArray[np.int32], Ints]] = field(default_factory=dict)
    true_stats: dict[int, Stats] = field(default_factory=dict)
    rankings: dict[Any, Any] = field(default_factory=dict)  # what policies over all visible tokens share (engine.reads, curves)

    def __post_init__(self) -> None:
        src, lay = self.source, self.source.layer
        self.t = src.t[self.index]
        self.first = lay.first_of_each(self.t)
        self.group, self.rows = lay.group, len(self.index) * lay.group
        tokens = padded(src.k.shape[1], TILE)
        self.flags, self.every = kernel.visible(self.first, self.t, tokens)
        self.q = kernel.block(src.queries(self.head, self.index).reshape(self.rows, -1))
        self.sink = np.full(len(self.q), NO_SINK)
        self.sink[: self.rows].reshape(-1, self.group)[:] = src.sinks[self.head]
        if self.keep:
            self.dots = dots = self._room(tokens)
            keys = src.whole("k", self.head)
        else:
            dots, keys = self._room(kernel.NEAR), src.k[self.head]
        peak, mass = empty((2, tokens // PAGE, len(self.q)))
        kernel.scan(keys, self.q, self.flags, self.every, self.group, src.unit, src.cap, dots, peak, mass)
        self._stats[PAGE] = peak, mass
        self.lse = np.empty(len(self.q))
        kernel.denominator(peak, mass, self.sink, np.float32(src.unit), np.float32(src.cap), self.lse)
        self.sink_mass = np.exp2(self.sink - self.lse)[: self.rows]

    def _room(self, tokens: int) -> NDArray[np.float32]:
        """f32[tokens, R] for dot products."""
        self.memory = room(tokens * len(self.q))
        return self.memory[: tokens * len(self.q)].reshape(tokens, -1)

    def leave(self) -> None:
        """Last of all: the memory of its dot products is the next block's of this thread."""
        leave(self.memory)

    @property
    def queries(self) -> Floats:
        """f64[N, G, d]."""
        return self.q[: self.rows].reshape(len(self.t), self.group, -1).astype(np.float64)

    @cached_property
    def dots(self) -> NDArray[np.float32]:
        """f32[T padded, R]: dot products, made again when they were not kept."""
        keys = self.source.whole("k", self.head)
        return kernel.products(keys, self.q, self._room(len(keys)))

    def stats(self, size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(peak, mass) f32[P, R] of pages of `size`: the largest dot product, and the sum of 2**(logit - largest)."""
        if size not in self._stats:
            start = np.append(np.arange(0, len(self.every), size), len(self.every))
            self._stats[size] = page_stats(self.dots, self.flags, self.every, start, self)
        return self._stats[size]

    def page_mass(self, size: int) -> Floats:
        """f64[R, P]: dense probability of every page of the grid."""
        return self.page_mass32(size).astype(np.float64)

    def page_mass32(self, size: int) -> NDArray[np.float32]:
        """f32[R, P]: the same, as it was computed: for who adds it up in float64 anyway."""
        if size not in self._mass:
            peak, mass = self.stats(size)
            self._mass[size] = np.empty((self.rows, len(peak)), np.float32)
            unit, cap = np.float32(self.source.unit), np.float32(self.source.cap)
            kernel.probability_by_row(peak, mass, self.lse, unit, cap, self._mass[size])
        return self._mass[size]

    def mass_order(self, size: int) -> tuple[NDArray[np.int32], Ints]:
        """(i32[R, P], i64[R]): the pages of the grid by dense mass, ties to the lower page, and how many of them can be seen."""
        if size not in self._mass_order:
            mass = self.page_mass(size)
            ids = np.arange(mass.shape[1])
            seen = (ids * size <= self.t[:, None]) & ((ids + 1) * size > self.first[:, None])
            kind = np.repeat(np.where(seen, RANKED, ABSENT), self.group, 0)
            self._mass_order[size] = ranked(mass, kind), np.repeat(seen.sum(1), self.group)
        return self._mass_order[size]

    @cached_property
    def out(self) -> Floats:
        """f64[R, dv]: the attention output."""
        src = self.source
        values = src.whole("v", self.head)
        found = kernel.output(self.dots, values, self.flags, self.every, self.group, src.unit, src.cap, self.lse)
        return found[: self.rows]

    @cached_property
    def top(self) -> tuple[NDArray[np.int32], Ints]:
        """(positions i32[R, 64], how many i64[R]): the tokens of highest logit, ties to the lower position."""
        keys, longest = self.source.whole("k", self.head), self.source.longest_key(self.head)
        start = np.arange(0, len(keys) + 1, PAGE)
        best, count = kernel.best_tokens(
            self.dots, self.flags, self.every, start, self.stats(PAGE)[0], keys, self.q, self.group, longest, TOP
        )
        return best[: self.rows], count[: self.rows]

    @cached_property
    def far_mass(self) -> Floats:
        """f64[R]: dense probability outside the first 4 and the last 64 visible tokens."""
        return self.mass_between(*self.far_range)

    @cached_property
    def far_range(self) -> tuple[Ints, Ints]:
        return self.first + HEAD_TOKENS, np.maximum(self.t + 1 - NEAR_TOKENS, self.first + HEAD_TOKENS)

    def mass_between(self, low: Ints, high: Ints) -> Floats:
        """f64[R]: dense probability on low[i] <= position < high[i], clipped to what is visible."""
        out = np.zeros(len(self.q))
        low, high = np.maximum(low, self.first), np.minimum(high, self.t + 1)
        kernel.range_mass(
            self.dots, self.page_mass32(PAGE), PAGE, low, high, self.group, self.source.unit, self.source.cap, self.lse, out
        )
        return out[: self.rows]

    @cached_property
    def evidence_mass(self) -> Floats:
        """f64[R]: dense probability on evidence tokens."""
        mask = self.source.request.evidence_mask()
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
        out = np.zeros(self.rows)
        for a, b in edges.reshape(-1, 2):
            out += self.mass_between(np.full(len(self.t), a), np.full(len(self.t), b))
        return out

    @cached_property
    def value_bound(self) -> Floats:
        """f64[N]: the largest L2 norm of a visible value."""
        return self._largest(self.source.value_norms)

    @cached_property
    def value_radius(self) -> Floats:
        """f64[R]: the largest distance of a visible value from the centre; of the zero vector, too, where a learned sink adds it."""
        far, centre = self._largest(self.source.value_strays), np.linalg.norm(self.source.value_centre[self.head])
        sunk = (self.sink[: self.rows] > NO_SINK).reshape(-1, self.group)
        return np.where(sunk, np.maximum(far, centre)[:, None], far[:, None]).ravel()

    def _largest(self, norms: Floats) -> Floats:
        mine = norms[self.head]
        return np.array([mine[a : t + 1].max() for a, t in zip(self.first, self.t, strict=True)])


def page_stats(dots: Any, flags: Any, every: Any, start: Ints, block: Dense) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(peak, mass) f32[P, R] over the live slots of every page."""
    shape = (len(start) - 1, dots.shape[1])
    peak, mass, src = np.empty(shape, np.float32), np.empty(shape, np.float32), block.source
    kernel.page_stats32(dots, flags, every, start, block.group, np.float32(src.unit), np.float32(src.cap), peak, mass)
    return peak, mass


@dataclass
class Held:
    """What one kv head held in a block: slots pos i64[n]; flags u8[N, n] at the attention of each step, after u8[N, n] once its cut was
    made; where, where_after u8[N, n] likewise (engine.away; None when all rows are on the device); dots f32[n, R]. whole: nothing was
    ever dropped or coded."""

    pos: Ints
    flags: NDArray[np.uint8]
    after: NDArray[np.uint8]
    products: Callable[[], NDArray[np.float32]]
    whole: bool
    where: NDArray[np.uint8] | None = None
    where_after: NDArray[np.uint8] | None = None

    @cached_property
    def dots(self) -> NDArray[np.float32]:
        """f32[n, R]: dot products of the slots."""
        return self.products()

    @cached_property
    def every(self) -> NDArray[np.uint8]:
        return np.asarray((self.flags & ALIVE).all(0)).view(np.uint8)


class Past:
    """Replays a record block by block for one kv head; blocks must come in order of step."""

    def __init__(self, source: Source, record: Record | None, head: int):
        self.source, self.record, self.head, self.done = source, record, head, 0
        self.now = None if record is None else record.start[head].copy()
        self.where = None if record is None or not record.away else np.zeros(source.request.total, np.uint8)
        self._moves(-1)

    def held(self, block: Dense) -> Held:
        """The slots of a block: all visible positions without a record, else those that live at one of its steps."""
        total = self.source.request.total
        if self.record is None or self.now is None:
            flags = block.flags[:, :total]
            return Held(np.arange(total), flags, flags, lambda: block.dots[:total], True)
        lo, hi = int(block.first.min()), int(block.t.max()) + 1
        flags, after = np.empty((2, len(block.t), hi - lo), np.uint8)
        where = None if self.where is None else np.empty((2, len(block.t), hi - lo), np.uint8)
        for i, at in enumerate(block.index):
            for step in range(self.done, at):
                self._pass(step)
            flags[i] = self.now[lo:hi]
            if where is not None and self.where is not None:
                where[0, i] = self.where[lo:hi]
            self._pass(int(at))
            after[i], self.done = self.now[lo:hi], int(at) + 1
            if where is not None and self.where is not None:
                where[1, i] = self.where[lo:hi]
        visible = block.flags[:, lo:hi]
        flags *= visible
        after *= visible
        keep = np.flatnonzero(flags.any(0))
        pos = keep + lo
        flags, after = np.ascontiguousarray(flags[:, keep]), np.ascontiguousarray(after[:, keep])
        places = () if where is None else np.ascontiguousarray(where[:, :, keep])
        return Held(pos, flags, after, lambda: block.dots[pos], False, *places)

    def _pass(self, step: int) -> None:
        assert self.record is not None
        assert self.now is not None
        for h, pos, flags in self.record.changes[step]:
            if h == self.head:
                self.now[pos] = flags
        self._moves(step)

    def _moves(self, step: int) -> None:
        if self.record is None or self.where is None:
            return
        for h, pos, where in self.record.away.get(step, ()):
            if h == self.head:
                self.where[pos] = where


@dataclass
class Attended:
    """sums f64[R, SUMS] (kernels.sparse), the entropy NaN where all_read; out f64[R, dv]; exact and mixed outputs when rows were decoded,
    else None."""

    sums: Floats
    out: Floats
    exact: Floats | None
    mixed: Floats | None
    all_read: NDArray[np.bool_]


def attend(block: Dense, held: Held, picked: Picked | None, record: Record | None) -> Attended:
    """The attention of every row over the live slots it read. Rows that read all that dense attention sees, exactly, take its output."""
    src, rows, group, n = block.source, block.rows, block.group, len(block.t)
    pages = picked.pages if picked else pages_of(held.pos, CHUNK)
    exists = pages.rows(held.flags) > 0
    chosen = picked.chosen if picked else np.repeat(exists[:, None], group, 1)
    coded = record is not None and record.key_group is not None  # by policy, not by what this block of steps happens to hold
    everything = (chosen | ~exists[:, None]).all(-1)  # [N, G]
    visible = block.t + 1 - block.first
    exact_now = ((held.flags & ALIVE).sum(1) == visible) & (held.flags <= ALIVE).all(1)
    all_read = (everything & exact_now[:, None]).ravel()
    chosen = chosen & ~all_read.reshape(n, group)[..., None]
    sums, out = np.zeros((rows, sparse.SUMS)), np.empty((rows, src.layer.value_dim))
    values, dim = src.whole("v", block.head), src.layer.value_dim
    exact, mixed = np.empty((rows if coded else 0, dim)), np.empty((rows if coded else 0, dim))
    marks = np.zeros(src.request.total, np.uint8)
    marks[: src.request.total] = src.request.evidence_mask()
    far = np.stack(block.far_range, 1)
    if not all_read.all():
        for steps in record.versions(block.head, block.index) if record is not None and coded else [slice(0, n)]:
            part = slice(steps.start * group, steps.stop * group)
            dots, blurred, blurred_values = held.dots, held.dots, values
            if record is not None and coded:
                at = int(block.index[steps.start])
                blurred = decoded_dots(block, held, record, at)
                blurred_values = record.decoded_at("v", block.head, at) if "v" in record.decoded else values
            if steps != slice(0, n):
                dots, blurred = (np.ascontiguousarray(x[:, part]) for x in (dots, blurred))
            sparse.attend(
                dots, blurred, values, blurred_values, held.pos, held.flags[steps], marks[held.pos], far[steps], pages.start, chosen[steps],
                np.float32(src.unit), np.float32(src.cap), block.lse[part], block.sink[part], sums[part], out[part], exact[part], mixed[part],
            )  # fmt: skip
    if all_read.any():
        for mine in (out, exact, mixed) if coded else (out,):
            mine[all_read] = block.out[all_read]
        sums[all_read, sparse.MASS] = 1 - block.sink_mass[all_read]
        sums[all_read, sparse.FAR] = block.far_mass[all_read]
        sums[all_read, sparse.EVIDENCE] = sums[all_read, sparse.OWN_EVIDENCE] = block.evidence_mass[all_read]
        sums[all_read, sparse.ENTROPY] = np.nan
        sums[all_read, sparse.TOKENS] = np.repeat(visible, group)[all_read]
    return Attended(sums, out, exact if coded else None, mixed if coded else None, all_read)


def decoded_dots(block: Dense, held: Held, record: Record, at: int) -> NDArray[np.float32]:
    """f32[n, R]: dot products with the keys as codes decode at the step at place `at`, where any step sees one."""
    if "k" not in record.decoded or not (held.flags & KEY_BLUR).any():
        return held.dots
    return times(record.decoded_at("k", block.head, at), block.q.T)[held.pos]


class HeldTruth:
    """stop.Truth of a block: float64 throughout, because rankings and proofs rest on it. decoded f32[T, d]: what coded keys are read as;
    None: the truth is that of the keys as captured."""

    def __init__(self, block: Dense, held: Held, decoded: NDArray[np.float32] | None = None):
        self.block, self.held, self.decoded = block, held, decoded
        self._known: dict[int, Stats] = block.true_stats if held.whole and decoded is None else {}

    @cached_property
    def parts(self) -> list[tuple[Held, NDArray[np.float32]]]:
        """Live slots with their dot products, and the keys f32[n, d] of these: those read as captured, and those read decoded."""
        block, held = self.block, self.held
        keys = block.source.whole("k", block.head)
        captured = keys[: len(held.pos)] if held.whole else keys[held.pos]
        if self.decoded is None:
            return [(held, captured)]
        blurred = (held.flags & KEY_BLUR) > 0
        exact, coded = (np.where(blurred == what, held.flags, 0).astype(np.uint8) for what in (False, True))
        dots = times(self.decoded, block.q.T)[held.pos]
        return [
            (replace(held, flags=exact), captured),
            (replace(held, flags=coded, products=lambda: dots), self.decoded[held.pos]),
        ]

    def stats(self, pages: Pages) -> Stats:
        """f64[N, G, P] twice: the largest true dot product of each page (NONE: nothing live), and the sum of 2**(logit - its logit)."""
        if pages.size not in self._known:
            found = [true_pages(self.block, held, pages, keys) for held, keys in self.parts]
            self._known[pages.size] = self._by_row(_joined(found, self.block.source))
        return self._known[pages.size]

    def near_stats(self, pages: Pages) -> Stats:
        """The same from dot products in float32."""
        found = [page_stats(x.dots, x.flags, x.every, pages.start, self.block) for x, _ in self.parts]
        return self._by_row(_joined([(p.astype(np.float64), m.astype(np.float64)) for p, m in found], self.block.source))

    def _by_row(self, stats: Stats) -> Stats:
        block = self.block
        peak, mass = (np.ascontiguousarray(x.T[: block.rows]).reshape(len(block.t), block.group, -1) for x in stats)
        return peak, mass

    def peak(self, pages: Pages) -> Floats:
        peak = self.stats(pages)[0]
        return np.where(peak > NONE, self.block.source.bend(peak), -np.inf)

    def mass(self, pages: Pages) -> Floats:
        peak, mass = self.peak(pages), self.stats(pages)[1]
        return mass * np.exp2(np.where(mass > 0, peak, -np.inf) - peak.max(-1, keepdims=True))

    def top(self, pages: Pages) -> Floats:
        return self.peak(pages).max(-1)

    def kth(self, r: int) -> Floats:
        block, start, found = self.block, pages_of(self.held.pos, PAGE).start, []
        if r > len(self.held.pos):
            return np.full((len(block.t), block.group), -np.inf)
        for held, keys in self.parts:
            peak, _ = page_stats(held.dots, held.flags, held.every, start, block)
            best, count = kernel.best_tokens(
                held.dots, held.flags, held.every, start, peak, keys, block.q, block.group, self._longest, r
            )
            value = kernel.true_dots(keys, block.q, best)
            found.append(np.where(np.arange(r) < count[:, None], value * block.source.unit, -np.inf))
        best = np.sort(np.concatenate(found, 1), axis=1)[: block.rows, -r]
        return best.reshape(len(block.t), block.group)

    def size(self) -> Floats:
        block = self.block
        size = np.linalg.norm(block.q[: block.rows], axis=1) * self._longest * block.source.unit
        return size.reshape(len(block.t), block.group)

    @cached_property
    def _longest(self) -> float:
        longest = self.block.source.longest_key(self.block.head)
        return longest if self.decoded is None else max(longest, float(np.linalg.norm(self.decoded, axis=1).max()))


def truth_of(block: Dense, held: Held, record: Record | None, index: Index | None) -> HeldTruth:
    """Of the keys that the index speaks of."""
    return truth_read(block, held, None if getattr(index, "keys", "exact") == "exact" else record)


def truth_read(block: Dense, held: Held, record: Record | None) -> HeldTruth:
    """Of the keys that attention reads."""
    if record is None or "k" not in record.decoded:
        return HeldTruth(block, held)
    return HeldTruth(block, held, record.decoded["k"][block.head])


def _joined(parts: list[Stats], source: Source) -> Stats:
    """(peak, mass) of disjoint sets of slots as those of their union."""
    if len(parts) == 1:
        return parts[0]
    top = np.maximum(*(peak for peak, _ in parts))
    bent = [np.where(peak > NONE, source.bend(peak) - source.bend(top), -np.inf) for peak, _ in parts]
    return top, np.add(*(mass * np.exp2(x) for (_, mass), x in zip(parts, bent, strict=True)))


def true_pages(block: Dense, held: Held, pages: Pages, own: NDArray[np.float32]) -> Stats:
    """f64[P, R]: the largest true dot product of each page's live slots (NONE: none), and the sum of 2**(logit - its logit); own f32[n, d]:
    the keys of the slots."""
    src = block.source
    peak, mass = np.empty((2, len(pages.id), len(block.q)))
    q, at = strips(block.q.astype(np.float64).T), 0
    while at < len(pages.id):
        stop = max(at + 1, int(np.searchsorted(pages.start, pages.start[at] + TILE, side="right")) - 1)
        a, b = pages.start[at], pages.start[stop]
        keys = np.zeros((padded(int(b - a), GRID), src.layer.key_dim))
        keys[: b - a] = own[a:b]
        dots = np.empty((len(keys), len(block.q)))
        product(keys, q, dots)
        kernel.page_stats64(
            dots[: b - a], np.ascontiguousarray(held.flags[:, a:b]), np.ascontiguousarray(held.every[a:b]), pages.start[at : stop + 1] - a,
            block.group, src.unit, src.cap, peak[at:stop], mass[at:stop],
        )  # fmt: skip
        at = stop
    return peak, mass
