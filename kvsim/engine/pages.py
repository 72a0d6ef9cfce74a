"""Page tables: the live slots of one kv head on the absolute grid of pages, and the states a page goes through in a block of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.order import live_rows
from kvsim.kernels.sparse import ALIVE, KEY_BLUR

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
CHUNK = 256  # positions whose values are summed in float32 where there are no pages; a grid of its own, so sums do not move


@dataclass
class Pages:
    """The pages of the slots of one kv head on the absolute grid: id i64[P], start i64[P + 1] over the slots."""

    id: Ints
    start: Ints
    size: int

    def rows(self, flags: NDArray[np.uint8]) -> Ints:
        """i64[N, P]: live slots of every page at every step."""
        out = np.empty((len(flags), len(self.id)), np.int64)
        live_rows(flags, self.start, ALIVE, out)
        return out

    def of_slots(self) -> Ints:
        """i64[n]: slot -> its page's place in `id`."""
        return np.repeat(np.arange(len(self.id)), np.diff(self.start))


def pages_of(pos: Ints, size: int) -> Pages:
    """pos i64[n] ascending."""
    page = pos // size
    new = np.flatnonzero(np.diff(page, prepend=-1))
    return Pages(page[new], np.append(new, len(pos)), size)


@dataclass
class Versions:
    """A page whose rows change within a block of steps counts once per state.

    page i64[V]: place in Pages.id; of i64[N, P]: the version in force; slot i64[V, S], valid bool[V, S]: its live slots;
    blurred bool[V, S]: those that are read decoded; closed bool[V]: its last position has been written."""

    page: Ints
    of: Ints
    slot: Ints
    valid: Mask
    blurred: Mask
    closed: Mask


def versions(pages: Pages, flags: NDArray[np.uint8], t: Ints, matter: int = ALIVE) -> Versions:
    """The states of all pages over the steps of a block, in order of step. matter: the flags (kernels.sparse) that make a state."""
    flags = flags & np.uint8(matter)
    alive = (flags & ALIVE).astype(bool)
    full = (pages.id + 1) * pages.size - 1 <= t[:, None]
    changed = np.ones((len(t), len(pages.id)), bool)
    changed[1:] = np.logical_or.reduceat(flags[1:] != flags[:-1], pages.start[:-1], axis=1) | (full[1:] != full[:-1])
    step, page = np.nonzero(changed)
    number = np.zeros(changed.shape, np.int64)
    number[step, page] = np.arange(len(step))
    offset = np.arange(pages.size)
    inside = offset < np.diff(pages.start)[page][:, None]
    slot = np.where(inside, pages.start[page][:, None] + offset, 0)
    valid = inside & alive[step[:, None], slot]
    blurred = valid & ((flags[step[:, None], slot] & KEY_BLUR) > 0)
    return Versions(page, np.maximum.accumulate(number, axis=0), slot, valid, blurred, full[step, page])
