"""Rows that live on the host: which of the pages that a step reads are on the device, and what has to be fetched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.account import index_bytes, page_rows
from kvsim.engine.attend import Dense, Held
from kvsim.engine.counterfactual import held_page_mass
from kvsim.engine.reads import Picked
from kvsim.policies import allocate
from kvsim.policies.protocol import Read
from kvsim.policies.store.offload import offload

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
NEVER = -1


@dataclass
class PageCache:
    """The pages of one kv head on the device; steps come one after the other, none left out.

    A step's pages are served from the cache, from what was prefetched for it, or fetched (a miss); then those read are in the cache, and
    what is too much leaves: the least recently used, or of lowest score when it was last ranked; of equal ones the higher page. A page of
    which only the newest row lives was made on the device and joins without a fetch; the newest row is written to both places. A
    prefetch is for the next step only and outside the budget: the pages of this one, or its neighbours on both sides.

    on bool[pages]; used i64[pages]: position of the last query that read it; score f64[pages]; ahead bool[pages]: prefetched."""

    store: offload
    size: int
    pages: int
    on: Mask = field(init=False)
    used: Ints = field(init=False)
    score: NDArray[np.float64] = field(init=False)
    ahead: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.on, self.ahead = np.zeros((2, self.pages), bool)
        self.used, self.score = np.full(self.pages, NEVER), np.full(self.pages, -np.inf)

    def step(self, t: int, asked: Mask, rows: Ints, after: Ints, score: NDArray[np.float64], most: int) -> Step:
        """One step at position t over all pages: asked bool[pages]: read now; rows, after i64[pages]: live rows at its attention and after its
        cut; score f64[pages], NaN where not ranked; most: pages that the cache holds."""
        old = rows - (np.arange(self.pages) == t // self.size)  # rows that the host may have to send
        born = (rows > 0) & (old == 0)
        self.on |= born
        self.used[born & (self.used == NEVER)] = t
        ahead = self.ahead & ~self.on & (old > 0)
        missed = asked & ~self.on & ~ahead
        self.on |= asked
        self.used[asked] = t
        self.score = np.where(np.isnan(score), self.score, score)
        self.on &= after > 0
        self._trim(most)
        self._look_ahead(asked, after)
        return Step(missed, ahead, ahead & asked, int(old[missed | ahead].sum()), self.on.copy())

    def _trim(self, most: int) -> None:
        there = np.flatnonzero(self.on)
        by = self.score[there] if self.store.evict == "score" else np.zeros(len(there))
        self.on[there[np.lexsort((there, -self.used[there], -by))[most:]]] = False

    def _look_ahead(self, asked: Mask, after: Ints) -> None:
        if self.store.prefetch is None:
            return
        wanted = asked.copy()
        if self.store.prefetch == "neighbour":
            wanted[1:] |= asked[:-1]
            wanted[:-1] |= asked[1:]
        self.ahead = wanted & ~self.on & (after > 0)


@dataclass
class Step:
    """missed, ahead, hit, on bool[pages]: fetched on demand, prefetched, of these read, on the device after the step; rows: fetched in all."""

    missed: Mask
    ahead: Mask
    hit: Mask
    rows: int
    on: Mask


def offloaded(
    cache: PageCache, read: Read, block: Dense, held: Held, picked: Picked
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Columns [N] of ledger and [N * G] of heads that offloading changes or adds, and the pages on the device after each step."""
    src, lay, ids = block.source, block.source.layer, picked.pages.id
    rows, after = picked.pages.rows(held.flags), picked.pages.rows(held.after)
    union: Any = picked.chosen.any(1)
    score = picked.score.max(1)
    visible = block.t + 1 - block.first
    steps = []

    def whole(x: Any, empty: Any) -> Any:
        out: Any = np.full(cache.pages, empty)
        out[ids] = x
        return out

    for i, t in enumerate(block.t.tolist()):
        most = allocate.to_pages(cache.store.device, cache.size, int(visible[i]), src.request, lay)
        steps.append(cache.step(t, whole(union[i], False), whole(rows[i], 0), whole(after[i], 0), whole(score[i], np.nan), most))
    on, missed = (np.stack([getattr(s, name)[ids] for s in steps]) for name in ("on", "missed"))
    live, here = after.sum(1), (after * on).sum(1)
    fetched = np.array([s.rows for s in steps]) * lay.row_bytes
    pages, summary = (after > 0).sum(1), index_bytes(read, src, block.head)
    ledger: dict[str, Any] = {
        "held_tokens": here,
        "full_tokens": here,
        "resident_bytes": here * lay.row_bytes,
        "resident_page_bytes": on.sum(1) * page_rows(read) * lay.row_bytes,
        "host_tokens": live,
        "host_resident_bytes": live * lay.row_bytes,
        "host_read_bytes": fetched,
        "moved_out_bytes": np.full(len(steps), lay.row_bytes),
        "missed_pages": np.array([s.missed.sum() for s in steps]),
        "missed_runs": np.array([(s.missed & ~np.append(False, s.missed[:-1])).sum() for s in steps]),
        "prefetched_pages": np.array([s.ahead.sum() for s in steps]),
        "prefetch_hits": np.array([s.hit.sum() for s in steps]),
    }
    if cache.store.summaries == "host":
        ledger |= {"host_resident_bytes": live * lay.row_bytes + pages * summary, "index_resident_bytes": 0 * live}
        ledger |= {"host_read_bytes": fetched + picked.scanned * summary, "index_bytes": 0 * live}
    mass = held_page_mass(block, held, picked.pages).reshape(len(steps), block.group, -1)
    heads = {"mass_host": (mass * (picked.chosen & missed[:, None])).sum(-1).ravel()}
    return ledger, heads, [ids[row].tolist() for row in on]
