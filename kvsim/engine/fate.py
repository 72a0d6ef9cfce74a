"""The tiers and events tables: what became of the tokens of one kv head, read off the record."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.coded import levels
from kvsim.engine.away import ON_HOST, ON_SSD
from kvsim.engine.bank import Record
from kvsim.engine.cuts import window_events
from kvsim.engine.source import Source
from kvsim.kernels.sparse import ALIVE, KEY_CODED, KEY_KEPT
from kvsim.policies.protocol import Codecs

CODES_BESIDE, HOST_COPY, SSD_COPY = 4, 8, 16


def tiers_and_events(
    source: Source, record: Record, codecs: Codecs | None, head: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of both tables for every step, -1 (the cut after prefill) first.

    A tiers row holds runs of equal tier: the whole prompt at step -1, then only the positions whose tier changed at the step."""
    prompt = source.request.prompt
    windows = window_events([x for x in record.cuts if x.head == head])
    where = np.zeros(source.request.total, np.uint8)
    now = record.start[head].copy()
    first, last = source.layer.first_visible(prompt - 1), prompt - 1
    whole = np.arange(first, prompt)
    _moved(record, head, -1, where)
    tiers = [
        {
            "step": -1,
            "runs": runs(whole, _tier(codecs, now[whole], where[whole]), _level(record, codecs, head, whole, now[whole])),
        }
    ]
    before = np.full(len(whole), ALIVE, np.uint8)
    events = [_event(-1, before, now[whole], len(whole), 0) | windows.get(-1, {})]
    full = int(_exact(now[whole]).sum())
    for i, (step, t) in enumerate(zip(source.steps.tolist(), source.t.tolist(), strict=True)):
        pos, flags = _latest([(pos, flags) for h, pos, flags in record.changes[i] if h == head])
        moved = _moved(record, head, i, where)
        if len(pos) or len(moved):
            named, then = pos, flags
            if len(moved):
                named = np.union1d(pos, moved)
                then = now[named]
                then[np.searchsorted(named, pos)] = flags
            level = _level(record, codecs, head, named, then)
            tiers.append({"step": step, "runs": runs(named, _tier(codecs, then, where[named]), level)})
        seen = source.layer.first_visible(t)
        if seen > first:  # some left a sliding window; now: exact tokens that existed before
            full -= int(_exact(now[first:seen]).sum())
        old = (pos >= seen) & (pos <= last)
        aged = 0 if windows else t - last
        counts = _event(step, now[pos], flags, full, aged, old) | {"requantised": int(record.requantised[i, head])}
        events.append(counts | windows.get(i, {}))
        full += t - last + np.count_nonzero(_exact(flags)) - np.count_nonzero(_exact(now[pos]))
        now[pos], first, last = flags, seen, t
    return tiers, events


def runs(pos: NDArray[np.int64], tier: NDArray[np.int64], level: NDArray[np.uint8] | None = None) -> list[dict[str, int | None]]:
    """Neighbouring positions of equal tier and level (0: none) as half-open ranges; pos ascending."""
    if not len(pos):
        return []
    level = np.zeros(len(pos), np.uint8) if level is None else level
    edge = (pos[1:] > pos[:-1] + 1) | (tier[1:] != tier[:-1]) | (level[1:] != level[:-1])
    start = [0, *(np.flatnonzero(edge) + 1).tolist()]
    return [
        {"start": int(pos[a]), "stop": int(pos[b - 1]) + 1, "tier": int(tier[a]), "level": int(level[a]) or None}
        for a, b in zip(start, [*start[1:], len(pos)], strict=True)
    ]


def _level(
    record: Record, codecs: Codecs | None, head: int, pos: NDArray[np.int64], flags: NDArray[np.uint8]
) -> NDArray[np.uint8] | None:
    """Which of several widths the keys of rows are coded in, 0: in none."""
    if codecs is None or record.level is None or len(levels(codecs.k)) < 2:
        return None
    return np.where(flags & KEY_CODED, record.level[head, pos], 0).astype(np.uint8)


def _latest(changes: list[tuple[NDArray[np.int64], NDArray[np.uint8]]]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """(positions, ascending; flags) of one step. A cut and a placement may both touch a token: what it became last."""
    if len(changes) == 1:
        return changes[0]
    pos = np.concatenate([np.zeros(0, np.int64), *(p for p, _ in changes)])
    flags = np.concatenate([np.zeros(0, np.uint8), *(f for _, f in changes)])
    unique, at = np.unique(pos[::-1], return_index=True)
    return unique, flags[::-1][at]


def _exact(flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return (flags & (ALIVE | KEY_CODED)) == ALIVE


def _moved(record: Record, head: int, index: int, where: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Carries the moves between places after a step into `where`; their positions, ascending."""
    mine = [(pos, to) for h, pos, to in record.away.get(index, ()) if h == head]
    if not mine:
        return np.zeros(0, np.int64)
    for pos, to in mine:
        where[pos] = to
    return np.concatenate([pos for pos, _ in mine])


def _tier(codecs: Codecs | None, flags: NDArray[np.uint8], where: NDArray[np.uint8]) -> NDArray[np.int64]:
    """0 not on the device, 1 coded, 2 full, by keys; +4 codes kept beside, +8 on the host, +16 on SSD."""
    alive, coded = (flags & ALIVE) > 0, (flags & KEY_CODED) > 0
    if codecs is None:  # nothing is coded, so nothing lies elsewhere
        return np.where(alive, 2, 0)
    tier = np.where(alive & (where == 0), np.where(coded, 1, 2), 0)
    kept = (flags & KEY_KEPT) > 0
    copied = (coded | kept) & (codecs is not None and codecs.shadow)
    copied |= alive & (where == ON_HOST)
    on_ssd = alive & (where == ON_SSD)
    return tier + np.where(kept, CODES_BESIDE, 0) + np.where(copied, HOST_COPY, 0) + np.where(on_ssd, SSD_COPY, 0)


def _event(
    step: int, before: NDArray[np.uint8], after: NDArray[np.uint8], full: int, born: int, old: NDArray[np.bool_] | bool = True
) -> dict[str, Any]:
    """Counts of one step from the flags of the tokens that changed. churn: 1 - |A & B| / |A or B| of the exact tokens before (`full` of
    them) and after, of those that existed before and can still be seen (`old`)."""
    was, now = _exact(before), _exact(after)
    left, stays = was & ~now, (after & ALIVE) > 0
    joined = int(np.count_nonzero(now & ~was))
    return {
        "step": step,
        "promoted": joined,
        "demoted": np.count_nonzero(left & stays),
        "evicted": np.count_nonzero(((before & ALIVE) > 0) & ~stays),
        "aged_in": born,
        "requantised": 0,
        "churn": (np.count_nonzero(left & old) + joined) / max(1, full + joined),
    }
