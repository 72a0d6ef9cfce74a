"""Physical pages of one layer and the requests that share them: append, fork, roll back, free, reuse (card A10).

A request is a list of page numbers and a length. A page that several requests name is resident once, and whoever changes it copies it
first, so all that name a page agree on the rows in it. The summary belongs to the page: the box (smallest and largest number per channel)
of its valid keys as attention reads them. What a query chose is its own and never shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import WrongUse
from kvsim.kernels.boxes import bounds, corners

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Codec(Protocol):
    """What codes keys in groups of `tokens` rows (codecs.minmax)."""

    @property
    def tokens(self) -> int: ...
    def roundtrip(self, x: Floats) -> Floats:
        """[m, rows, d] -> what a reader decodes."""
        ...


class Pool:
    """`slots` pages of `size` rows of `dim` numbers: the keys of a token, those of all kv heads side by side.

    With a codec a group of rows is coded when its last row is written; what is read of them from then on, and what the box encloses, are the
    decoded keys. Rows that stay of a coded group after a rollback stay decoded, and are coded again with the rows that join them.

    keys f64[slots, S, d] · rows i64[slots]: valid ones · refs i64[slots]: requests that name the page · version i64[slots]: moves
    with every change, and no two lives of a slot share one · lo, hi f64[slots, d] · tables: {request: its pages in order} ·
    lengths: {request: tokens}. copied_pages, rescanned_rows: what copy-on-write and rollback have cost.

    Raises WrongUse for a request that is not open, a rollback beyond its start, keys of another shape, and when no page is free: a
    rollback has then done nothing, of an append what fitted has joined."""

    def __init__(self, slots: int, size: int, dim: int, codec: Codec | None = None):
        if min(slots, size, dim) < 1:
            raise WrongUse(f"Pool(slots={slots}, size={size}, dim={dim}): expected 1 or more of each")
        if codec and size % codec.tokens:
            raise WrongUse(f"Pool: groups of {codec.tokens} rows do not fill pages of {size}; take a group that divides the page")
        self.size, self.dim, self.codec = size, dim, codec
        self.keys = np.zeros((slots, size, dim))
        self.rows, self.refs, self.version = np.zeros((3, slots), np.int64)
        self.lo, self.hi = np.empty((2, slots, dim))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.free_pages = list(range(slots))[::-1]  # the last one freed is the next one taken
        self.copied_pages = self.rescanned_rows = 0
        self._opened = self._changes = 0

    # -------------------------------------------------------------------------------------------- requests
    def open(self) -> int:
        """A new request, empty -> its number."""
        return self._named([], 0)

    def append(self, request: int, keys: Floats) -> None:
        """keys [n, d] join at the end of a request."""
        self._table(request)
        if keys.ndim != 2 or keys.shape[1] != self.dim:
            raise WrongUse(f"Pool.append: keys of shape {keys.shape}, expected [n, {self.dim}]")
        for key in keys:
            page = self._tail(request)
            self.keys[page, self.rows[page]] = key
            self.rows[page] += 1
            self.lengths[request] += 1
            self._widen(page, key)
            self._code(page)
            self._changed(page)

    def fork(self, request: int) -> int:
        """A new request with the same tokens -> its number. Nothing is copied: the open page, too, is shared until one of them writes."""
        table = self._table(request)
        self.refs[table] += 1
        return self._named(list(table), self.lengths[request])

    def rollback(self, request: int, n: int, rescan: bool = True) -> None:
        """The last n tokens of a request leave it: whole pages are given back, of a page that is cut the rows left are scanned again.

        rescan=False leaves the box as it was, too wide: still a bound, and what it costs is told by `inflation`."""
        table, left = self._table(request), self.lengths[request] - n
        if n < 0 or left < 0:
            raise WrongUse(f"Pool.rollback: {n} tokens of request {request}, which has {left + n}; take 0 to {left + n}")
        stay = -(-left // self.size)
        gone, inside = table[stay:], left - (stay - 1) * self.size
        cut = stay > 0 and self.rows[table[stay - 1]] > inside
        if cut and self.refs[table[stay - 1]] > 1 and (self.refs[gone] > 1).all():
            self._room()  # for the copy, before anything is given up
        for page in gone:
            self._leave(page)
        del table[stay:]
        self.lengths[request] = left
        if cut:
            page = self._own(request)
            self.rows[page] = inside
            if rescan:
                self._rescan(page)
            self._changed(page)

    def free(self, request: int) -> None:
        """A request ends; a page goes back when no other request names it."""
        for page in self._table(request):
            self._leave(page)
        del self.tables[request], self.lengths[request]

    # -------------------------------------------------------------------------------------------- what is there
    def boxes(self, request: int) -> tuple[Floats, Floats]:
        """(lo, hi) f64[P, d] of a request's pages in order."""
        table = self._table(request)
        return self.lo[table], self.hi[table]

    def scanned(self, request: int) -> tuple[Floats, Floats]:
        """As boxes, of the valid keys alone: what boxes are, unless a rollback left one as it was."""
        return self._boxes_of(self._table(request))

    def read(self, request: int) -> Floats:
        """f64[tokens, d]: the keys of a request as attention reads them."""
        table = self._table(request)
        return self.keys[table].reshape(-1, self.dim)[: self.lengths[request]]

    @property
    def resident_pages(self) -> int:
        """Pages that some request names, each once."""
        return int((self.refs > 0).sum())

    def billed(self, chosen: Mapping[int, Sequence[int]]) -> tuple[int, int]:
        """chosen: {request: numbers of its pages that it reads} -> (pages read, once per request; different pages among them)."""
        read = [self._table(request)[p] for request, pages in chosen.items() for p in pages]
        return len(read), len(set(read))

    # -------------------------------------------------------------------------------------------- pages
    def _named(self, table: list[int], length: int) -> int:
        self._opened += 1
        self.tables[self._opened], self.lengths[self._opened] = table, length
        return self._opened

    def _table(self, request: int) -> list[int]:
        if request not in self.tables:
            was = "was freed" if 0 < request <= self._opened else "was never opened"
            raise WrongUse(f"Pool: request {request} {was}; open() and fork() give the number of a request that lives")
        return self.tables[request]

    def _tail(self, request: int) -> int:
        """The page that the next row of a request goes to, its own."""
        if self.lengths[request] % self.size:
            return self._own(request)
        self.tables[request].append(self._take())
        return self.tables[request][-1]

    def _own(self, request: int) -> int:
        """A request's last page, copied first when others name it."""
        table = self.tables[request]
        if self.refs[table[-1]] > 1:
            old, new = table[-1], self._take()
            for x in (self.keys, self.rows, self.lo, self.hi):
                x[new] = x[old]
            self._leave(old)
            self._changed(new)
            self.copied_pages += 1
            table[-1] = new
        return table[-1]

    def _take(self) -> int:
        """An empty page. Its slot may have had an earlier life, of which nothing must be left."""
        self._room()
        page = self.free_pages.pop()
        self.refs[page], self.rows[page] = 1, 0
        self.lo[page], self.hi[page] = np.inf, -np.inf
        return page

    def _room(self) -> None:
        if not self.free_pages:
            raise WrongUse(f"Pool: all {len(self.refs)} pages are taken; free() a request, or make the pool with more slots")

    def _leave(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self.free_pages.append(page)

    def _widen(self, page: int, key: Floats) -> None:
        self.lo[page], self.hi[page] = np.minimum(self.lo[page], key), np.maximum(self.hi[page], key)

    def _code(self, page: int) -> None:
        """The group that the newest row completes is coded, and the box is that of what is decoded."""
        n = self.rows[page]
        if self.codec and n % self.codec.tokens == 0:
            self.keys[page, n - self.codec.tokens : n] = self.codec.roundtrip(self.keys[page, n - self.codec.tokens : n][None])[0]
            self.lo[page], self.hi[page] = (x[0] for x in self._boxes_of([page]))

    def _rescan(self, page: int) -> None:
        self.lo[page], self.hi[page] = (x[0] for x in self._boxes_of([page]))
        self.rescanned_rows += int(self.rows[page])

    def _boxes_of(self, pages: Sequence[int]) -> tuple[Floats, Floats]:
        """(lo, hi) f64[m, d] of the valid keys of pages."""
        keys, lo, hi = self.keys[pages], *np.empty((2, len(pages), 1, self.dim))
        corners(keys, keys, np.tile(np.arange(self.size), (len(pages), 1)), self.rows[pages], lo, hi)
        return lo[:, 0], hi[:, 0]

    def _changed(self, page: int) -> None:
        self._changes += 1
        self.version[page] = self._changes


class Mirror:
    """A scanner's copy of the boxes of a pool: a page is fetched again when its version moved. fetched: pages fetched so far."""

    def __init__(self, pool: Pool):
        self.pool, self.fetched = pool, 0
        self.version = np.full(len(pool.version), -1)
        self.lo, self.hi = np.empty((2, *pool.lo.shape))

    def boxes(self, request: int) -> tuple[Floats, Floats]:
        """As Pool.boxes."""
        pages = np.array(self.pool._table(request), np.int64)
        stale = pages[self.pool.version[pages] != self.version[pages]]
        for mine, its in ((self.lo, self.pool.lo), (self.hi, self.pool.hi), (self.version, self.pool.version)):
            mine[stale] = its[stale]
        self.fetched += len(stale)
        return self.lo[pages], self.hi[pages]


def inflation(pool: Pool, request: int, q: Floats) -> Floats:
    """q [N, d] -> f64[N, P], 0 or more: the bound of q·k that a page's box gives, minus that of a box of its valid keys alone."""

    def bound(lo: Floats, hi: Floats) -> Floats:
        out: Any = np.empty((len(q), 1, 1, len(lo)))
        bounds(
            np.ascontiguousarray(q[:, None, None], np.float64), *(np.ascontiguousarray(x[None, :, None]) for x in (lo, hi)), out
        )
        return out[:, 0, 0]

    return bound(*pool.boxes(request)) - bound(*pool.scanned(request))
