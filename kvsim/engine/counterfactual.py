"""What a step is held against on the same live set: an oracle that reads as many pages, and the step before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Attended, Dense, Held, page_stats
from kvsim.engine.bank import Record
from kvsim.engine.pages import CHUNK, Pages, pages_of
from kvsim.engine.reads import Picked
from kvsim.kernels.change import read_churn
from kvsim.kernels.dense import NONE
from kvsim.kernels.sparse import ALIVE, MASS

Floats = NDArray[np.float64]


class Counterfactual:
    """One policy over one kv head; blocks must come in order of step, and churn is null where steps between were left out."""

    def __init__(self, record: Record | None, tokens: int, group: int):
        self.record = record
        self.before, self.since = np.zeros((group, tokens), bool), -1

    def columns(self, block: Dense, held: Held, picked: Picked | None, got: Attended) -> dict[str, Any]:
        """Columns [N * G] of heads: read_churn, mass_evicted_prefill, oracle_recall, oracle_held_recall."""
        pages = picked.pages if picked else pages_of(held.pos, CHUNK)
        chosen = picked.chosen if picked else np.repeat((pages.rows(held.flags) > 0)[:, None], block.group, 1)
        churn = np.empty(chosen.shape[:2])
        read_churn(held.pos, block.t, held.flags, pages.start, chosen, self.before, self.since, churn)
        churn[np.diff(block.t, prepend=self.since) != 1] = np.nan
        self.since = int(block.t[-1])
        out: dict[str, Any] = {"read_churn": churn.ravel(), "mass_evicted_prefill": self._evicted_at_prefill(block)}
        if picked is not None:
            many = picked.chosen.sum(-1).ravel()
            out["oracle_recall"] = leading(block.page_mass(picked.pages.size), many)
            held_mass = block.page_mass(picked.pages.size) if held.whole else held_page_mass(block, held, picked.pages)
            out["oracle_held_recall"] = np.maximum(leading(held_mass, many), got.sums[:, MASS])
        return out

    def _evicted_at_prefill(self, block: Dense) -> Floats:
        """Dense mass on the tokens that the cut after prefill dropped."""
        if self.record is None:
            return np.zeros(block.rows)
        prompt = block.source.request.prompt
        kept = np.flatnonzero(self.record.start[block.head, :prompt] & ALIVE)
        if len(kept) == prompt:
            return np.zeros(block.rows)
        pos = np.append(kept, np.arange(prompt, int(block.t.max()) + 1))
        flags = np.ascontiguousarray(block.flags[:, pos])
        held = Held(pos, flags, flags, lambda: block.dots[pos], False)
        return np.maximum(1 - block.sink_mass - held_page_mass(block, held, pages_of(pos, CHUNK)).sum(1), 0)


def leading(mass: Floats, many: NDArray[np.int64]) -> Floats:
    """f64[R]: the sum of the many[r] largest entries of each row of mass [R, P]."""
    falling = -np.sort(-mass, axis=1)
    sums = np.concatenate([np.zeros((len(mass), 1)), falling.cumsum(1)], 1)
    return np.take_along_axis(sums, np.minimum(many, mass.shape[1])[:, None], 1)[:, 0]


def held_page_mass(block: Dense, held: Held, pages: Pages) -> Floats:
    """f64[R, P]: dense probability of each page's live slots."""
    peak, mass = page_stats(held.dots, held.flags, held.every, pages.start, block)
    bent = block.source.bend(peak.astype(np.float64))
    return np.where(peak > NONE, mass * np.exp2(np.minimum(bent - block.lse, 0)), 0).T[: block.rows]
