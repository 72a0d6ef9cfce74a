"""Late importance recurrence (card D8): how often what a cut took out of the full tier is full again later, and the churn between cuts.

Beside the policy's own sets stand two oracles that see all tokens at the same cuts: as many units, the same tokens protected, ranked by the
dense attention received since the prompt began, or since the cut before. And how far codes turn the scores that a cut goes by: the cosine of
what units received between cuts, with their keys as decoded and as captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, Held
from kvsim.engine.bank import Record
from kvsim.engine.by_tier import decodings, what_was_read
from kvsim.engine.cuts import Sets
from kvsim.engine.reads import Picked
from kvsim.engine.source import Source
from kvsim.kernels.by_tier import watched
from kvsim.kernels.lags import received
from kvsim.policies.protocol import FULL, GONE, Ranking, Seen

DORMANCY = (1, 4, 16)  # events
DEPLOYED, ORACLE, INTERVAL = "deployed", "oracle", "oracle_interval"
LAYER = -1  # stands for a kv head where one decision is taken for all

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]


def note(record: Record, ranking: Ranking, seen: Seen, tier: NDArray[np.uint8], index: int) -> None:
    """Writes down one cut where that is asked for: which tokens could lose their place, and which got a full one. index: the step's place, -1
    after prefill."""
    if record.sets is None:
        return
    heads, total = len(ranking.score), record.start.shape[1]
    if ranking.unit is not None and record.unit is None:
        record.unit = np.full((heads, total), -1)
    masks = np.zeros((3, heads, total), bool)
    for h in range(heads):
        slots = np.flatnonzero(seen.valid[h])
        pos, got = seen.pos[h, slots], tier[h, slots]
        safe = np.zeros(len(slots), bool) if ranking.protect is None else ranking.protect[h, slots]
        for into, x in zip(masks, (safe, ~safe & (got == FULL), ~safe & (got != GONE)), strict=True):
            into[h, pos] = x
        if ranking.unit is not None and record.unit is not None:
            record.unit[h, pos] = np.where(safe, record.unit[h, pos], ranking.unit[h, slots])
    record.sets.append(Sets(index, seen.t, *np.packbits(masks, axis=-1)))


@dataclass
class Counts:
    """Of one sequence of sets, per dormancy: re-entries, dormant spells that lasted, pairs (unit, event) that were dormant long enough; the
    last two also without what is gone (alive). Sums of churn over events, in tokens."""

    returns: NDArray[np.int64]
    spells: NDArray[np.int64]
    pairs: NDArray[np.int64]
    spells_alive: NDArray[np.int64]
    pairs_alive: NDArray[np.int64]
    churn_full: float = 0.0
    churn_held: float = 0.0


def count(
    full: list[Mask], held: list[Mask], safe: list[Mask], first: list[int], end: list[int], unit: NDArray[np.int64]
) -> Counts:
    """Masks [T] per event: full and held tokens that could lose their place, protected ones; first, end: the range of what is visible;
    unit i64[T]: the position that stands for a token's unit, -1 for none.

    A spell begins at the event at which a unit that was full is not, and lasts until it is full again, is protected, leaves a sliding window
    or the trace ends. Units never full before do not count. Alive: a spell of what is gone ends, and is forgotten, when it goes."""
    least = np.array(DORMANCY)[:, None]
    out = Counts(*np.zeros((5, len(DORMANCY)), np.int64))
    stands = unit == np.arange(len(unit))
    was, since = np.zeros(len(unit), bool), np.full(len(unit), -1)
    dead = np.zeros(len(unit), bool)
    for e, (now, kept, out_of_reach) in enumerate(zip(full, held, safe, strict=True)):
        gone_by = np.arange(len(unit)) < first[e]
        over = (since >= 0) & (out_of_reach | gone_by)
        out.spells += (e - since[over] >= least).sum(1)
        out.spells_alive += (e - since[over & ~dead] >= least).sum(1)
        since[over] = -1
        left = was & ~now & ~out_of_reach & ~gone_by & stands
        back = (since >= 0) & now
        lasted = e - since[back] >= least
        out.returns += lasted.sum(1)
        out.spells += lasted.sum(1)
        out.spells_alive += lasted.sum(1)
        since[back] = -1
        since[left] = e
        dead = (since >= 0) & ~kept
        out.pairs += (e + 1 - since[since >= 0] >= least).sum(1)
        out.pairs_alive += (e + 1 - since[(since >= 0) & ~dead] >= least).sum(1)
        was = now & stands
        if e:
            old = (np.arange(len(unit)) < end[e - 1]) & ~gone_by & ~safe[e - 1]
            out.churn_full += churn(full[e - 1] & old, now & old)
            out.churn_held += churn(held[e - 1] & old, kept & old)
    out.spells += (len(full) - since[since >= 0] >= least).sum(1)
    out.spells_alive += (len(full) - since[(since >= 0) & ~dead] >= least).sum(1)
    return out


def churn(a: Mask, b: Mask) -> float:
    """1 - |A and B| / |A or B|; 0 when both are empty."""
    either = int((a | b).sum())
    return 1.0 - int((a & b).sum()) / either if either else 0.0


class Recurrence:
    """The recurrence table of one (request, layer). `add` takes every step of every kv head, for the oracles."""

    def __init__(self, source: Source, record: Record, explain: bool):
        assert record.sets
        self.source, self.record, self.sets, self.unit = source, record, record.sets, record.unit
        self.joint = source.layer.kv_heads > 1 and len(self.sets[0].full) == 1
        ends = [cut.index for cut in self.sets]
        self.interval = np.searchsorted(ends, np.arange(len(source.steps)))  # the cut that follows a step
        self.since: dict[int, Floats] = {}  # of a kv head (or the layer): dense attention between cuts, f64[events + 1, T]
        self.own: dict[
            int, Floats
        ] = {}  # the policy's own attention, with keys as decoded and as captured, f64[2, events + 1, T]
        self.explain, self.oracles = explain, explain and source.mass is not None

    def add(self, block: Dense, held: Held, picked: Picked | None) -> None:
        if self.explain and "k" in self.record.decoded:
            self._watch(block, held, picked)
        if self.oracles:
            self._receive(block)

    def _watch(self, block: Dense, held: Held, picked: Picked | None) -> None:
        src = self.source
        own = self.own.setdefault(self._of_block(block), np.zeros((2, len(self.sets) + 1, src.request.total)))
        page, chosen = what_was_read(block, held, picked)
        unit, cap, row = np.float32(src.unit), np.float32(src.cap), self.interval[block.index]
        for steps, part, dots, blurred in decodings(block, held, self.record):
            watched(dots, blurred, held.pos, held.flags[steps], page, chosen[steps], row[steps], unit, cap, block.sink[part], own)

    def _of_block(self, block: Dense) -> int:
        return LAYER if self.joint else block.head

    def _receive(self, block: Dense) -> None:
        head, total = self._of_block(block), self.source.request.total
        if head not in self.since:
            self.since[head] = np.zeros((len(self.sets) + 1, total))
        if block.index[0] == 0:
            assert self.source.mass is not None
            prompt, group = self.source.request.prompt, block.group
            mine = self.source.mass[block.head * group : (block.head + 1) * group]
            self.since[head][0, :prompt] += mine.sum(0, dtype=np.float64)
        unit, cap = np.float32(self.source.unit), np.float32(self.source.cap)
        received(
            block.dots, block.first, block.t, block.group, unit, cap, block.lse, self.interval[block.index], self.since[head]
        )

    def rows(self, heads: tuple[int, ...] | None) -> list[dict[str, Any]]:
        """Columns of the table, a part per kv head (-1: one decision for the layer)."""
        every = range(len(self.sets[0].full)) if not self.joint else (LAYER,)
        return [self._of(h) for h in every if heads is None or h in heads or h == LAYER]

    def _of(self, head: int) -> dict[str, Any]:
        row, cuts, lay, total = max(head, 0), self.sets, self.source.layer, self.source.request.total
        full, held, safe = ([unpacked(getattr(c, name)[row], total) for c in cuts] for name in ("full", "held", "safe"))
        first, end = [lay.first_visible(c.t) for c in cuts], [c.t + 1 for c in cuts]
        unit = leaders(None if self.unit is None else self.unit[row], total)
        found = {DEPLOYED: count(full, held, safe, first, end, unit)}
        if self.oracles and (head in self.since):
            since = self.since[head]
            for kind in (ORACLE, INTERVAL):
                score, best, all_of = np.zeros(total), [], []
                for e in range(len(cuts)):
                    score = since[e] + (score if kind == ORACLE else 0)
                    reach = ~safe[e] & (unit >= 0)
                    reach[: first[e]] = reach[end[e] :] = False
                    many = int((full[e] & (unit == np.arange(total))).sum())
                    best.append(highest(score, reach, unit, many))
                    all_of.append(reach)
                found[kind] = count(best, all_of, safe, first, end, unit)
        n = len(DORMANCY)
        columns: dict[str, list[Any]] = {
            "set": [kind for kind in found for _ in range(n)],
            "dormancy": list(DORMANCY) * len(found),
        }
        for name in ("returns", "spells", "pairs", "spells_alive", "pairs_alive"):
            columns[name] = [x for c in found.values() for x in getattr(c, name).tolist()]
        for name in ("churn_full", "churn_held"):
            columns[name] = [getattr(c, name) / max(1, len(cuts) - 1) for c in found.values() for _ in range(n)]
        cosine = self._cosine(head, unit, safe)
        return (
            {"kv_head": head, "events": len(cuts)} | columns | {"score_cosine": [cosine] * n + [np.nan] * (n * (len(found) - 1))}
        )

    def _cosine(self, head: int, unit: NDArray[np.int64], safe: list[Mask]) -> float:
        """Mean over cuts of the cosine of units' scores; NaN where nothing is coded."""
        found = []
        for e, out_of_reach in enumerate(safe) if head in self.own else ():
            pos = np.flatnonzero(~out_of_reach & (unit >= 0))
            low, full = (np.bincount(unit[pos], x[e, pos], len(unit)) for x in self.own[head])
            if low.any() and full.any():
                found.append(float(np.sum(low * full) / np.sqrt(np.sum(low * low) * np.sum(full * full))))
        return float(np.mean(found)) if found else np.nan


def unpacked(bits: NDArray[np.uint8], total: int) -> Mask:
    return np.unpackbits(bits, count=total).view(bool)


def leaders(unit: NDArray[np.int64] | None, total: int) -> NDArray[np.int64]:
    """i64[T]: the first position of each token's unit, its own where tokens stand alone; -1 where no cut has named a unit."""
    if unit is None:
        return np.arange(total)
    _, first, of = np.unique(unit, return_index=True, return_inverse=True)
    return np.where(unit >= 0, first[of], -1)


def highest(score: Floats, reach: Mask, unit: NDArray[np.int64], many: int) -> Mask:
    """bool[T]: the tokens of the `many` units within reach of highest summed score; ties to the lower position."""
    pos = np.flatnonzero(reach)
    ids, of = np.unique(unit[pos], return_inverse=True)
    by = np.bincount(of, score[pos], len(ids))
    out = np.zeros(len(score), bool)
    out[pos[np.isin(of, np.lexsort((ids, -by))[:many])]] = True
    return out
