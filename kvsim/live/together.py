"""Rows that hold everything and rank pages alike pick them together: one sort for all their budgets and kv heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine import select
from kvsim.engine.evolve import OwnTruth
from kvsim.engine.pages import Pages
from kvsim.engine.reads import UNBOUNDED, Reader, not_a_number, ranking_of, scored
from kvsim.geometry import TRUTH
from kvsim.kernels.order import settled
from kvsim.live.growing import Growing
from kvsim.policies.protocol import Chain, Read, View
from kvsim.policies.rules import Rule

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def alike(chain: Chain, source: Growing) -> tuple[Any, ...] | None:
    """What decides the order of pages, in the plain case that `Together` knows: a fixed budget over pages that grow to their end, stay and
    stay exact. None: the chain is asked alone, by engine.reads."""
    read = chain.part("read")
    if read.page is None or read.read is None or isinstance(read.read, Rule) or read.refresh != 1 or read.shards is not None:
        return None
    if chain.part("keep").hold is not None or chain.codecs is not None or source.layer.window is not None:
        return None
    if read.index is not None and (getattr(read.index, "fit", None) or getattr(read.index, "keys", "exact") != "exact"):
        return None
    return ranking_of(read)


class Together:
    """R rows of one layer. reads: of every row, the same but for the budget; sources: what each is fed."""

    def __init__(self, reads: Sequence[Read], sources: Sequence[Growing]):
        self.reads, self.sources, self.read = list(reads), list(sources), reads[0]
        self.reader = Reader(self.read, sources[0], 0, 1)
        assert self.read.page is not None
        self.size, self.layer, request = int(self.read.page), sources[0].layer, sources[0].request
        self.summary: dict[str, NDArray[Any]] = {}  # [R, Hkv, pages, ...]
        self.many, self.seen = -(-request.total // self.size), 0
        if self.read.index is not None:
            self._summarise(request.prompt, self.sources[:1])

    def pick(self, i: int, dots: Floats) -> tuple[Ints, Mask]:
        """(page ids i64[P], the chosen bool[R, Hkv, G, P]) of the i-th step. dots f64[R, Hkv, G, n]: of its queries with the n keys so far."""
        n, heads, group = dots.shape[-1], self.layer.kv_heads, self.layer.group
        ids = np.arange(-(-n // self.size))
        pages = Pages(ids, np.minimum(np.arange(len(ids) + 1) * self.size, n), self.size)
        if self.read.index is not None:
            self._summarise(n, self.sources)
        told = [self._score(i, pages, r, h, dots[r, h]) for r in range(len(self.reads)) for h in range(heads)]
        exists, score = np.ones((len(told), len(ids)), bool), np.empty((len(told), group, len(ids)))
        one_state = np.zeros(0, np.int64), np.zeros((len(told), 0), np.int64)
        if settled(np.stack(told), *one_state, exists, UNBOUNDED, score):
            raise not_a_number(self.read)
        forced = np.repeat(select.forced_pages(self.read.forced, ids, self.size, np.array([n - 1])), len(told), 0)
        budgets = np.concatenate([self.reader.to_pages(x.read, np.array([n])) for x in self.reads])
        chosen, _ = self.reader.choose(score, exists, forced, np.repeat(budgets, heads))
        return ids, chosen.reshape(len(self.reads), heads, group, -1)

    def _score(self, i: int, pages: Pages, r: int, h: int, dots: Floats) -> Floats:
        """f64[G, P] of one kv head of one row."""
        src = self.sources[r]
        q = src.queries(h, slice(i, i + 1)).astype(np.float64)
        truth = OwnTruth(src, h, dots, q)

        def asked(kind: str) -> Floats:
            return (truth.mass(pages) if kind == "mass" else truth.peak(pages))[:, None]

        summary = {name: x[r, h : h + 1, : len(pages.id)] for name, x in self.summary.items()}
        where = (src.request.id, self.layer.id, h)
        shown = View(src.t[i : i + 1], q[:, None], pages.id[None], summary, where, asked if TRUTH in self.read.needs else None)
        return scored(self.read, shown)[0, 0]

    def _summarise(self, n: int, sources: Sequence[Growing]) -> None:
        """The pages that changed since the last call, now that there are n tokens; one source speaks for all rows."""
        index: Any = self.read.index
        first, last, heads = self.seen // self.size, -(-n // self.size), self.layer.kv_heads
        pos = np.arange(first * self.size, last * self.size).reshape(-1, self.size)
        at = np.minimum(pos.ravel(), n - 1)
        keys = np.concatenate([x.rows("k", h, at).reshape(*pos.shape, -1) for x in sources for h in range(heads)])
        valid = np.tile(pos < n, (len(sources) * heads, 1))
        for name, x in index.summarise(keys, valid, valid.all(1)).items():
            shape = (len(self.sources), heads, self.many, *x.shape[1:])
            into = self.summary.setdefault(name, np.zeros(shape, x.dtype))
            into[:, :, first:last] = x.reshape(len(sources), heads, last - first, *x.shape[1:])
        self.seen = n
