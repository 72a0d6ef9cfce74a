"""Page tables: the live slots of one kv head on the absolute grid of pages, and the states a page goes through in a block of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.order import changing, live_rows, state_changes, state_slots
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
    _moving: tuple[NDArray[np.uint8], Ints] | None = None  # of the flags that were asked about last

    def rows(self, flags: NDArray[np.uint8]) -> Ints:
        """i64[N, P]: live slots of every page at every step."""
        out = np.empty((len(flags), len(self.id)), np.int64)
        out[:] = np.add.reduceat(flags[0] & np.uint8(ALIVE), self.start[:-1], dtype=np.int64)
        live_rows(flags, self.start, self.moving(flags), ALIVE, out)
        return out

    def moving(self, flags: NDArray[np.uint8]) -> Ints:
        """The places in `id` of the pages whose flags are not those of the first step at all steps: few, so the rest is looked at once."""
        if self._moving is None or self._moving[0] is not flags:
            changed = np.zeros(flags.shape[1], np.uint8)
            changing(flags, changed)
            self._moving = flags, np.flatnonzero(np.bitwise_or.reduceat(changed, self.start[:-1]))
        return self._moving[1]

    def of_slots(self) -> Ints:
        """i64[n]: slot -> its page's place in `id`."""
        return np.repeat(np.arange(len(self.id)), np.diff(self.start))


def pages_of(pos: Ints, size: int) -> Pages:
    """pos i64[n] ascending."""
    if len(pos) and pos[-1] - pos[0] + 1 == len(pos):  # without gaps
        page = np.arange(pos[0] // size, pos[-1] // size + 1)
        return Pages(page, np.append(np.maximum(page * size - pos[0], 0), len(pos)), size)
    page = pos // size
    new = np.ones(len(pos), bool)
    new[1:] = page[1:] != page[:-1]
    start = np.flatnonzero(new)
    return Pages(page[start], np.append(start, len(pos)), size)


@dataclass
class Versions:
    """A page whose rows change within a block of steps counts once per state; the states at the first step come first.

    page i64[V]: place in Pages.id; moving i64[M]: the places of the pages that may have more than one; number i64[N, M]: their version in
    force; slot i64[V, S], valid bool[V, S]: its live slots; blurred bool[V, S]: those that are read decoded; closed bool[V]: its last
    position has been written."""

    page: Ints
    moving: Ints
    number: Ints
    slot: Ints
    valid: Mask
    blurred: Mask
    closed: Mask

    def by_step(self, x: NDArray[Any]) -> NDArray[Any]:
        """x [V] of the versions -> [N, P] of those in force."""
        pages = self.page.max(initial=-1) + 1
        out = np.repeat(x[None, :pages], len(self.number), 0)
        out[:, self.moving] = x[self.number]
        return out


def versions(pages: Pages, flags: NDArray[np.uint8], t: Ints, matter: int = ALIVE) -> Versions:
    """The states of all pages over the steps of a block, in order of step. matter: the flags (kernels.sparse) that make a state."""
    every, last = np.arange(len(pages.id)), (pages.id + 1) * pages.size - 1
    may = (last > t[0]) & (last <= t[-1])
    may[pages.moving(flags)] = True
    moving = np.flatnonzero(may)
    changed = np.empty((len(t) - 1, len(moving)), bool)
    state_changes(flags, matter, pages.start, moving, last[moving] <= t[:, None], changed)
    later, which = np.nonzero(changed)
    step, page = np.append(np.zeros_like(every), later + 1), np.append(every, moving[which])
    number = np.zeros((len(t), len(moving)), np.int64)
    number[0], number[1:][changed] = moving, len(every) + np.arange(len(which))
    number = np.maximum.accumulate(number, axis=0)
    slot, valid, blurred = (np.empty((len(page), pages.size), kind) for kind in (np.int64, bool, bool))
    state_slots(flags, ALIVE, matter & KEY_BLUR, pages.start, page, step, slot, valid, blurred)
    return Versions(page, moving, number, slot, valid, blurred, last[page] <= t[step])
