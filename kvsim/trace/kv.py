"""The rows of a kv table: which row group holds which positions of which head, and the rows as one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.errors import BadTrace
from kvsim.trace.bits import RAW, Raw, first_not_finite
from kvsim.trace.folder import AGAIN, FINITE, Segment, mapped, plain_offset, read_columns, vectors

SORTED = "write rows sorted by (kv_head, pos), one row group per kv head"


@dataclass(frozen=True)
class Piece:
    """The rows [first, first + rows) of one kv head: a row group of a kv segment."""

    segment: Segment
    group: int
    head: int
    first: int
    rows: int


def pieces_of(segments: Sequence[Segment]) -> list[Piece]:
    """The row groups of kv segments by (head, first), from their statistics or else their columns. Raises BadTrace."""
    found = []
    for s in segments:
        for group, rows, (low, high), (first, last) in _ranges(s):
            if low != high:
                raise BadTrace(f"{s}: row group {group} holds the kv heads {low} to {high}; expected one, {SORTED}")
            if last - first + 1 != rows:
                span = f"{rows} rows for the positions {first} to {last}"
                raise BadTrace(f"{s}: kv head {low} has {span}; expected every position once, {AGAIN}")
            found.append(Piece(s, group, low, first, rows))
    return sorted(found, key=lambda p: (p.head, p.first))


def _ranges(s: Segment) -> Iterator[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    """Of each row group that is not empty: its number, its rows, lowest and highest kv head, lowest and highest position."""
    groups = [(g, s.footer.row_group(g)) for g in range(s.footer.num_row_groups)]
    groups = [(g, meta) for g, meta in groups if meta.num_rows]
    stats = [[s.chunk(g, name)[0].statistics for name in ("kv_head", "pos")] for g, _ in groups]
    if all(x is not None and x.has_min_max for pair in stats for x in pair):
        for (g, meta), (head, pos) in zip(groups, stats, strict=True):
            yield g, meta.num_rows, (head.min, head.max), (pos.min, pos.max)
        return
    ends = np.cumsum([meta.num_rows for _, meta in groups])
    columns = zip(*(np.split(x, ends[:-1]) for x in read_columns(s, ("kv_head", "pos"))), strict=True)
    for (g, meta), (head, pos) in zip(groups, columns, strict=True):
        yield g, meta.num_rows, (int(head.min()), int(head.max())), (int(pos.min()), int(pos.max()))


def reach_of(pieces: Sequence[Piece], heads: int, total: int, partial: bool, where: str) -> int:
    """How many positions from 0 on every kv head has: `total`, or the largest whole prefix when partial. Raises BadTrace."""
    if wrong := {p.head for p in pieces} - set(range(heads)):
        raise BadTrace(f"{where}: rows of kv head {min(wrong)}; the layers table says {heads} kv heads, 0 to {heads - 1}")
    reach = total
    for head in range(heads):
        end = 0
        for p in (p for p in pieces if p.head == head):
            if p.first < end:
                raise BadTrace(f"{p.segment}: position {p.first} of kv head {head} is there twice; expected once, {AGAIN}")
            if p.first > end:
                break
            end += p.rows
        if end > total:
            raise BadTrace(f"{where}: kv head {head} has the position {end - 1}; the requests table says {total} tokens")
        if end < total and not partial:
            raise BadTrace(f"{where}: position {end} of kv head {head} is missing; expected 0 to {total - 1}, {AGAIN}")
        reach = min(reach, end)
    return reach


def check_order(pieces: Sequence[Piece]) -> None:
    """The rows themselves stand where the footers say. Raises BadTrace."""
    for s in dict.fromkeys(p.segment for p in pieces):
        mine = sorted((p for p in pieces if p.segment is s), key=lambda p: p.group)
        expected = np.concatenate([np.arange(p.first, p.first + p.rows) for p in mine])
        head, pos = read_columns(s, ("kv_head", "pos"))
        wrong = (head != np.repeat([p.head for p in mine], [p.rows for p in mine])) | (pos != expected)
        if wrong.any():
            i = int(wrong.argmax())
            found = f"row {i} is kv head {head[i]}, position {pos[i]}, where position {expected[i]} belongs"
            raise BadTrace(f"{s}: {found}: rows are out of order, missing or there twice; {SORTED}")


def stack(pieces: Sequence[Piece], column: str, heads: int, total: int, dtype: str) -> Raw:
    """A vector column, [Hkv, T, d] read-only: a view of the file if the heads lie evenly in it, else a copy. Raises BadTrace."""
    out = _view(pieces, column, heads, total, dtype)
    if out is None:
        out = np.empty((heads, total, pieces[0].segment.byte_width(column) // RAW[dtype].itemsize), RAW[dtype])
        for p in pieces:
            rows = max(0, min(p.rows, total - p.first))
            out[p.head, p.first : p.first + rows] = vectors(p.segment, p.group, column, dtype)[:rows]
        out.flags.writeable = False
    for head in range(heads):
        pos = first_not_finite(out[head], dtype)
        if pos is not None:
            s = next(p.segment for p in pieces if p.head == head and p.first <= pos < p.first + p.rows)
            raise BadTrace(f"{s}: {column} holds NaN or infinity at kv head {head}, position {pos}; {FINITE}")
    return out


def _view(pieces: Sequence[Piece], column: str, heads: int, total: int, dtype: str) -> Raw | None:
    """The column as it lies in the file: one segment, each head's values in one piece, aligned, at even distances."""
    if len(pieces) != heads or any(p.segment is not pieces[0].segment or p.rows < total for p in pieces):
        return None
    width, raw = pieces[0].segment.byte_width(column), RAW[dtype]
    offsets = [plain_offset(p.segment, p.group, column) for p in pieces]
    starts = [o for o in offsets if o is not None and o % raw.itemsize == 0]
    steps = set(np.diff(starts).tolist()) or {0}
    if len(starts) < heads or len(steps) > 1:
        return None
    return np.ndarray(
        (heads, total, width // raw.itemsize), raw, mapped(pieces[0].segment), starts[0], (steps.pop(), width, raw.itemsize)
    )
