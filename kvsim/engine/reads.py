"""The read part of a chain over one kv head: page tables, summaries, ranking, budget, refresh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine import select
from kvsim.engine.source import Source
from kvsim.errors import WrongUse
from kvsim.geometry import TRUTH
from kvsim.kernels.sparse import ALIVE
from kvsim.policies import allocate
from kvsim.policies.protocol import Read, View

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
Truth = Callable[[str, "Pages"], NDArray[np.float64]]  # ("mass" | "logit", pages) -> [N, G, P]
CHUNK = 256  # positions whose values are summed in float32 where there are no pages; a grid of its own, so sums do not move


@dataclass
class Pages:
    """The pages of the slots of one kv head on the absolute grid: id i64[P], start i64[P + 1] over the slots."""

    id: Ints
    start: Ints
    size: int

    def rows(self, flags: NDArray[np.uint8]) -> Ints:
        """i64[N, P]: live slots of every page at every step."""
        return np.add.reduceat((flags & ALIVE).astype(np.int64), self.start[:-1], axis=1)

    def of_slots(self) -> Ints:
        """i64[n]: slot -> its page's place in `id`."""
        return np.repeat(np.arange(len(self.id)), np.diff(self.start))


def pages_of(pos: Ints, size: int) -> Pages:
    """pos i64[n] ascending."""
    page = pos // size
    new = np.flatnonzero(np.diff(page, prepend=-1))
    return Pages(page[new], np.append(new, len(pos)), size)


@dataclass
class Picked:
    """What the query heads of one kv head read in a block of steps. chosen bool[N, G, P]; score f64[N, G, P], unscaled, NaN where no
    ranking took place; order i32[N, G, P] of a fixed budget (None otherwise); scanned i64[N]: pages whose summary was read."""

    pages: Pages
    chosen: Mask
    score: NDArray[np.float64]
    order: NDArray[np.int32] | None
    forced: Mask
    rounds: Ints
    scanned: Ints


class Reader:
    """Ranks and picks pages for one kv head under one read policy; keeps page summaries and, between refreshes, the set.

    `full_block`: every call scores as many steps, so that products have one shape."""

    def __init__(self, read: Read, source: Source, head: int, full_block: int):
        self.read, self.source, self.head, self.full_block = read, source, head, full_block
        self.summaries = Summaries(read, source, head) if read.index is not None else None
        self.held_set: tuple[int, list[set[int]]] | None = None  # position of the last ranking, the pages of each query head

    def pick(self, steps: Ints, t: Ints, pos: Ints, flags: NDArray[np.uint8], q: NDArray[np.float64], truth: Truth) -> Picked:
        """steps, t i64[N]; slots at pos i64[n], flags u8[N, n]; q f64[N, G, d]."""
        read, lay = self.read, self.source.layer
        assert read.page is not None
        pages, group = pages_of(pos, read.page), q.shape[1]
        exists = pages.rows(flags) > 0
        if read.read is None:  # everything(page=...): the pages are named, none is ranked
            every = np.repeat(exists[:, None], group, 1)
            none = np.full(every.shape, np.nan)
            return Picked(pages, every, none, None, exists, np.ones(every.shape[:2], int), np.zeros(len(t), int))
        forced = select.forced_pages(read.forced, pages.id, read.page, t) & exists
        visible = t + 1 - np.array([lay.first_visible(int(x)) for x in t])
        k = np.array([allocate.to_pages(read.read, read.page, int(n), self.source.request, lay) for n in visible])
        ranks = np.ones(len(t), bool) if read.refresh == 1 else self._due(steps)
        score = self._score(t, pages, pos, flags, q, truth)
        chosen, order = self._chosen(score, exists, forced, k)
        scanned = np.where(exists.sum(1) > k, exists.sum(1), 0)
        rounds = np.ones((len(t), group), int)
        if not ranks.all() or read.refresh != 1:
            chosen, order = self._keep_set(t, pages, exists, chosen, ranks), None
            score = np.where(ranks[:, None, None], score, np.nan)
            scanned, rounds = np.where(ranks, scanned, 0), np.where(ranks[:, None], rounds, 0)
        return Picked(pages, chosen, score, order, forced, rounds, scanned if read.index is not None else np.zeros_like(scanned))

    def _due(self, steps: Ints) -> Mask:
        due = np.zeros(len(steps), bool)
        for i, step in enumerate(steps):
            due[i] = step == 0 if self.read.refresh == "never" else step % self.read.refresh == 0
        return due

    def _chosen(self, score: NDArray[np.float64], exists: Mask, forced: Mask, k: Ints) -> tuple[Mask, NDArray[np.int32] | None]:
        read, group = self.read, score.shape[1]
        if read.heads == "split":
            private = getattr(read, "private", 1)
            sets = [select.split(score[i], exists[i], forced[i], int(k[i]), private) if k[i] < exists[i].sum() else exists[i] for i in range(len(k))]
            return np.repeat(np.stack(sets)[:, None], group, 1), None
        order = select.page_order(select.joint(read.heads, score, exists, self.source.unit), exists, forced)
        return select.pick(order, exists, forced, k, read.heads, group), order if read.heads == "each" else None

    def _keep_set(self, t: Ints, pages: Pages, exists: Mask, chosen: Mask, ranks: Mask) -> Mask:
        """Between rankings the set stays and pages born since join it (ruling B06)."""
        out = np.zeros_like(chosen)
        for i in range(len(t)):
            if ranks[i] or self.held_set is None:
                self.held_set = int(t[i]), [set(pages.id[c].tolist()) for c in chosen[i]]
                out[i] = chosen[i]
            else:
                since, sets = self.held_set
                young = pages.id * pages.size > since
                for g, ids in enumerate(sets):
                    out[i, g] = (np.isin(pages.id, list(ids)) | young) & exists[i]
        return out

    def _score(self, t: Ints, pages: Pages, pos: Ints, flags: NDArray[np.uint8], q: NDArray[np.float64], truth: Truth) -> NDArray[np.float64]:
        """f64[N, G, P], -inf where a page does not exist."""
        v = versions(pages, flags, t)
        summary = self.summaries.of(v, pages, pos) if self.summaries else {}
        n, group, dim = q.shape
        full = max(self.full_block, n)
        batch, times = np.zeros((full, 1, group, dim)), np.full(full, t[-1])
        batch[:n, 0], times[:n] = q, t
        told = None
        if TRUTH in self.read.needs:

            def told(kind: str) -> NDArray[np.float64]:
                out = np.zeros((full, 1, group, len(v.page)))
                out[:n, 0] = truth(kind, pages)[..., v.page]
                return out

        where = (self.source.request.id, self.source.layer.id, self.head)
        view = View(times, batch, pages.id[v.page][None], {name: x[None] for name, x in summary.items()}, where, told)
        for x in (batch, times, *summary.values()):
            x.flags.writeable = False
        got = self.read.score(view)
        if not isinstance(got, np.ndarray) or got.shape != (full, 1, group, len(v.page)):
            shape = getattr(got, "shape", type(got).__name__)
            raise WrongUse(f"{type(self.read).__name__}.score returned {shape}, expected an array [N, Hkv, G, P] = {(full, 1, group, len(v.page))}")
        score = np.take_along_axis(got[:n, 0].astype(np.float64), np.broadcast_to(v.of[:, None], (n, group, v.of.shape[1])), -1)
        exists = np.broadcast_to((pages.rows(flags) > 0)[:, None], score.shape)
        if np.isnan(score[exists]).any():
            raise WrongUse(f"{type(self.read).__name__}.score returned NaN for a page that exists")
        return np.where(exists, score, -np.inf)


@dataclass
class Versions:
    """A page that gains or loses rows within a block of steps counts once per state.

    page i64[V]: place in Pages.id; of i64[N, P]: the version in force; slot i64[V, S], valid bool[V, S]: its live slots;
    closed bool[V]: its last position has been written."""

    page: Ints
    of: Ints
    slot: Ints
    valid: Mask
    closed: Mask


def versions(pages: Pages, flags: NDArray[np.uint8], t: Ints) -> Versions:
    """The states of all pages over the steps of a block, in order of step."""
    alive = (flags & ALIVE).astype(bool)
    full = (pages.id + 1) * pages.size - 1 <= t[:, None]
    changed = np.ones((len(t), len(pages.id)), bool)
    changed[1:] = np.logical_or.reduceat(alive[1:] != alive[:-1], pages.start[:-1], axis=1) | (full[1:] != full[:-1])
    step, page = np.nonzero(changed)
    number = np.zeros(changed.shape, np.int64)
    number[step, page] = np.arange(len(step))
    offset = np.arange(pages.size)
    inside = offset < np.diff(pages.start)[page][:, None]
    slot = np.where(inside, pages.start[page][:, None] + offset, 0)
    return Versions(page, np.maximum.accumulate(number, axis=0), slot, inside & alive[step[:, None], slot], full[step, page])


class Summaries:
    """The index's arrays of one kv head; a page is summarised again only when its live rows changed.

    Rows leave a page, or join it as its newest: so how many live and which is the newest tell one state from another."""

    def __init__(self, read: Read, source: Source, head: int):
        self.index, self.source, self.head, self.size = read.index, source, head, read.page
        pages = -(-source.request.total // int(self.size or 1))
        self.state = np.full((pages, 3), -2)  # rows, newest position, closed
        self.arrays: dict[str, NDArray[Any]] = {}

    def of(self, v: Versions, pages: Pages, pos: Ints) -> dict[str, NDArray[Any]]:
        """{name: [V, ...]} for every version."""
        ids = pages.id[v.page]
        newest = np.where(v.valid, pos[v.slot], -1).max(1)
        state = np.stack([v.valid.sum(1), newest, v.closed], 1)
        stale = (state != self.state[ids]).any(1)
        made: dict[str, NDArray[Any]] = {}
        if stale.any():
            at = np.where(v.valid[stale], pos[v.slot[stale]], 0)
            keys = self.source.rows("k", self.head, at.ravel()).reshape(*at.shape, -1)
            made = self.index.summarise(keys, v.valid[stale], v.closed[stale])
        for name, x in made.items():
            if name not in self.arrays:
                self.arrays[name] = np.zeros((len(self.state), *x.shape[1:]), x.dtype)
        out = {name: x[ids] for name, x in self.arrays.items()}
        for name, x in made.items():
            out[name][stale] = x
            self.arrays[name][ids] = out[name]  # ids repeat in order of step: the last state stays
        self.state[ids] = state
        return out
