"""The rows of the q table, and of the tables that hold one number per (q head, position)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import BadTrace
from kvsim.geometry import Layer, Request
from kvsim.trace.bits import Raw, first_not_finite
from kvsim.trace.folder import AGAIN, FINITE, Segment, read_columns, vectors

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Queries:
    """Where the query rows of one (request, layer) stand: every captured step, every q head once."""

    segments: tuple[Segment, ...]
    steps: Ints  # [n] ascending
    rows: Ints  # [n, Hq] row, counted through the segments

    def has(self, column: str) -> bool:
        return any(column in s.columns for s in self.segments)

    def numbers(self, column: str) -> Raw:
        """A small column, [n, Hq]."""
        return np.concatenate([read_columns(s, [column])[0] for s in self.segments])[self.rows]

    def vectors(self, column: str, dtype: str, finite: bool = True) -> Raw:
        """A vector column, [n, Hq, d]. Raises BadTrace on NaN or infinity where it must be finite."""
        groups = [(s, g) for s in self.segments for g in range(s.footer.num_row_groups)]
        out = np.concatenate([vectors(s, g, column, dtype) for s, g in groups])[self.rows]
        bad = first_not_finite(out.reshape(-1, out.shape[-1]), dtype) if finite else None
        if bad is not None:
            n, head = divmod(bad, self.rows.shape[1])
            s = _segment_at(self.segments, int(self.rows[n, head]))
            raise BadTrace(f"{s}: {column} holds NaN or infinity at q head {head}, decode step {self.steps[n]}; {FINITE}")
        return out


def queries_of(segments: tuple[Segment, ...], request: Request, layer: Layer, partial: bool) -> Queries:
    """From the small columns; rows may stand in any order, those beyond a partial trace's end are left out. Raises BadTrace."""
    parts = [read_columns(s, ("kv_head", "q_head", "pos", "decode_step")) for s in segments]
    kv_head, q_head, pos, step = (np.concatenate(x).astype(np.int64) for x in zip(*parts, strict=True))
    for wrong, expected in (
        ((q_head < 0) | (q_head >= layer.q_heads), f"q heads 0 to {layer.q_heads - 1}"),
        (kv_head != q_head // layer.group, f"{layer.group} q heads in a row for each kv head"),
        (pos != request.prompt + step, f"pos = {request.prompt} prompt tokens + decode_step"),
        ((pos < 0) | ((pos >= request.total) & (not partial)), f"positions 0 to {request.total - 1}"),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            row = f"kv head {kv_head[i]}, q head {q_head[i]}, position {pos[i]}, decode step {step[i]}"
            raise BadTrace(f"{_segment_at(segments, i)}: a query of {row}; expected {expected}")
    order = np.lexsort((q_head, step))
    order = order[pos[order] < request.total]
    steps, at = np.unique(step[order], return_inverse=True)
    times = np.zeros((len(steps), layer.q_heads), np.int64)
    np.add.at(times, (at, q_head[order]), 1)
    if (times != 1).any():
        n, head = np.argwhere(times != 1)[0]
        found = "is missing" if times[n, head] == 0 else f"is there {times[n, head]} times"
        raise BadTrace(
            f"{segments[0].file.parent}: the query of q head {head} at decode step {steps[n]} {found}; expected once, {AGAIN}"
        )
    return Queries(segments, steps, order.reshape(-1, layer.q_heads))


def run_before(steps: Ints) -> int:
    """How many of the steps -1, -2, ... are there without a gap."""
    before = -steps[steps < 0][::-1]
    return int((before == np.arange(1, len(before) + 1)).cumprod().sum())


def grid(segments: Sequence[Segment], column: str, heads: int, positions: int, partial: bool) -> Floats:
    """Rows (q_head, pos, value) in any order -> f32[heads, positions]. Raises BadTrace."""
    parts = [read_columns(s, ("q_head", "pos", column)) for s in segments]
    head, pos, value = (np.concatenate(x) for x in zip(*parts, strict=True))
    if partial:
        inside = pos < positions
        head, pos, value = head[inside], pos[inside], value[inside]
    where = segments[0].file.parent
    for wrong, expected in (
        (
            (head < 0) | (head >= heads) | (pos < 0) | (pos >= positions),
            f"q heads 0 to {heads - 1}, positions 0 to {positions - 1}",
        ),
        (~(np.isfinite(value) & (value >= 0)), "a finite number of 0 or more"),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            raise BadTrace(f"{where}: {column} is {value[i]} at q head {head[i]}, position {pos[i]}; expected {expected}")
    flat = head.astype(np.int64) * positions + pos
    times = np.bincount(flat, minlength=heads * positions)
    if (times != 1).any():
        h, p = divmod(int((times != 1).argmax()), positions)
        found = "missing" if times[h * positions + p] == 0 else "there twice"
        raise BadTrace(f"{where}: {column} of q head {h}, position {p} is {found}; expected once, {AGAIN}")
    out = np.empty(heads * positions, np.float32)
    out[flat] = value
    return out.reshape(heads, positions)


def _segment_at(segments: Sequence[Segment], row: int) -> Segment:
    ends = np.cumsum([s.rows for s in segments])
    return segments[int(np.searchsorted(ends, row, side="right"))]
