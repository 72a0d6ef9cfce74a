"""`--explain`, from step to step: whether other pages are read because the query changed or the summaries, and whether pages that were missed
are read soon after."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.account import best_pages
from kvsim.engine.attend import Dense, Held, HeldTruth
from kvsim.engine.reads import Picked, Reader
from kvsim.policies.rules import Rule

SOON = (1, 4, 16)  # steps within which a missed page counts as recovered
NEVER = -(2**40)  # a step before all others
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Turnover:
    """One policy over one kv head; blocks must come in order of step. Where steps between were left out, columns are null until enough
    neighbouring steps have gone by.

    reader: ranks again; it keeps nothing between steps."""

    def __init__(self, reader: Reader, pages: int, group: int):
        self.reader = reader
        self.read_at = np.full((group, pages), NEVER)  # the last step at which each page was read
        self.past: deque[tuple[int, Mask, Mask]] = deque(
            maxlen=max(SOON)
        )  # step, pages read and pages missed bool[G, P], one by one

    def columns(self, block: Dense, held: Held, picked: Picked, truth: HeldTruth) -> dict[str, Any]:
        """Columns [N * G] of explain.

        churn_summary = d(A, C) and churn_query = d(C, B): A is what was read at the step before, C what its query reads of the present
        pages, B what is read; d = 1 - |X and Y| / |X or Y| in live tokens that existed at the step before (card D9).
        recovered_h: of the pages that an oracle of as many pages would have read h steps ago and the policy did not, the share that it
        has read since; null where none was missed."""
        ids, steps = picked.pages.id, block.source.steps[block.index]
        again = self._again(block, held, picked, truth)
        best = best_pages(block, picked)
        shape = picked.chosen.shape[:2]
        out = {name: np.full(shape, np.nan) for name in ("churn_summary", "churn_query", *(f"recovered_{h}" for h in SOON))}
        old = picked.pages.rows(held.flags * (held.pos < block.t[:, None]))
        for i, step in enumerate(steps.tolist()):
            if self.past and self.past[-1][0] != step - 1:
                self.past.clear()
            read = np.zeros(self.read_at.shape, bool)
            read[:, ids] = picked.chosen[i]
            if self.past and again is not None:
                before = self.past[-1][1][:, ids]
                out["churn_summary"][i] = _distance(before, again[i], old[i])
                out["churn_query"][i] = _distance(again[i], picked.chosen[i], old[i])
            self.read_at[read] = step
            for h in SOON:
                if len(self.past) >= h:
                    then, _, missed = self.past[-h]
                    many = missed.sum(1)
                    since = (missed & (self.read_at > then)).sum(1)
                    out[f"recovered_{h}"][i] = np.divide(since, many, out=np.full(len(many), np.nan), where=many > 0)
            self.past.append((step, read, best[i][:, : read.shape[1]] & ~read))
        return {name: x.ravel() for name, x in out.items()}

    def _again(self, block: Dense, held: Held, picked: Picked, truth: HeldTruth) -> Mask | None:
        """bool[N, G, P]: what the query before each step's would read of the step's pages; the first captured step's own has none before
        it. None for a stopping rule: it looks at logits, which are the present query's."""
        read, src = self.reader.read, block.source
        if isinstance(read.read, Rule):
            return None
        q = src.queries(block.head, np.maximum(block.index - 1, 0)).astype(np.float64)
        score = self.reader.score(block.t, picked.pages, picked.rows > 0, held.pos, held.flags, q, truth)
        exists, k = picked.rows > 0, self.reader.to_pages(read.read, block.t + 1 - block.first)
        return self.reader.choose(score, exists, picked.forced & exists, k)[0]


def _distance(a: Mask, b: Mask, weight: NDArray[np.int64]) -> Floats:
    """f64[G]: 1 - |A and B| / |A or B| of sets of pages [G, P] with so many tokens each; 0 when both are empty."""
    both, either = (a & b) @ weight, (a | b) @ weight
    return 1 - np.divide(both, either, out=np.ones(len(a)), where=either > 0)
