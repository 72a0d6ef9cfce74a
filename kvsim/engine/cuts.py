"""Cuts that ranked windows: what each window was before and after, and the counts that the events table shows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.policies.protocol import FULL, GONE, Ranking

Ids = NDArray[np.int64]
Tiers = NDArray[np.uint8]


@dataclass(frozen=True)
class Cut:
    """One cut of one kv head. unit i64[m]: the windows it ranked, ascending; rows i64[m]: their live rows; before, after u8[m]: tiers."""

    index: int  # the step's place, -1 after prefill
    head: int
    unit: Ids
    rows: Ids
    before: Tiers
    after: Tiers


@dataclass(frozen=True)
class Sets:
    """The sets of one cut, for engine.recurrence: index (the step's place, -1 after prefill), t its position; which tokens were protected, and
    which of the others got a full place, or any: bits u8[Hkv or 1, T / 8] by position."""

    index: int
    t: int
    safe: Tiers
    full: Tiers
    held: Tiers


def cuts_of(ranking: Ranking, valid: NDArray[np.bool_], before: Tiers, after: Tiers, index: int) -> list[Cut]:
    """The cut of every kv head by a ranking of units; valid, before, after [Hkv, n]."""
    assert ranking.unit is not None
    found = []
    for h, live in enumerate(valid):
        row = h if len(ranking.score) > 1 else 0
        slots = np.flatnonzero(live if ranking.protect is None else live & ~ranking.protect[row])
        unit, first, rows = np.unique(ranking.unit[row, slots], return_index=True, return_counts=True)
        found.append(Cut(index, h, unit, rows, before[h, slots[first]], after[h, slots[first]]))
    return found


def window_events(cuts: list[Cut]) -> dict[int, dict[str, Any]]:
    """{the step's place: columns of the events table} of one kv head's cuts, in order.

    A window ages in at the first cut that ranks it. churn_full: 1 - |A & B| / |A or B| of the full windows of this cut and the one before,
    those that aged in at this one left out; null at the first."""
    found: dict[int, dict[str, Any]] = {}
    known: set[int] = set()
    last: set[int] | None = None
    for x in cuts:
        new = ~np.isin(x.unit, list(known))
        coded = (x.after != FULL) & (x.after != GONE)
        full = {*x.unit[x.after == FULL].tolist()}
        counts = {
            "promoted": (x.before != FULL) & (x.after == FULL),
            "demoted": (x.before == FULL) & coded,
            "evicted": x.after == GONE,
            "aged_in": new,
        }
        found[x.index] = {f"windows_{name}": int(mask.sum()) for name, mask in counts.items()} | {
            "aged_in": int(x.rows[new].sum()),
            "churn_full": None if last is None else _churn(last, full - {*x.unit[new].tolist()}),
        }
        known |= {*x.unit.tolist()}
        last = full
    return found


def _churn(a: set[int], b: set[int]) -> float:
    return 1 - len(a & b) / len(a | b) if a | b else 0.0
