"""The rows of the tables of a learned indexer: its keys, one per position, and its queries, one per (decode step, index head)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import BadTrace
from kvsim.geometry import ITEMSIZE, SCORE_FNS, Indexer, Request
from kvsim.trace.bits import Raw, first_not_finite, widen
from kvsim.trace.folder import AGAIN, FINITE, Segment, read_columns, vectors

Ints = NDArray[np.int64]


def index_steps(segments: Sequence[Segment], request: Request) -> Ints:
    """The decode steps that have index queries, ascending."""
    found = [read_columns(s, ["decode_step"])[0] for s in segments]
    steps = np.unique(np.concatenate(found).astype(np.int64)) if found else np.empty(0, np.int64)
    return steps[(steps >= 0) & (steps < request.total - request.prompt)]


def indexer_of(
    keys: Sequence[Segment], queries: Sequence[Segment], request: Request, steps: Ints, dtype: str, partial: bool
) -> Indexer:
    """The queries of `steps`, which are all there, and the keys of every position. Raises BadTrace."""
    head, pos, step, score_fn, w = _columns(queries, ("index_head", "pos", "decode_step", "score_fn", "w"))
    where, heads = queries[0].file.parent, int(head.max(initial=-1)) + 1
    if (pos != request.prompt + step).any():
        raise BadTrace(f"{where}: a row whose pos is not {request.prompt} prompt tokens + decode_step; {AGAIN}")
    if len(forms := {*score_fn.tolist()}) != 1 or not forms <= {*SCORE_FNS}:
        raise BadTrace(f"{where}: score_fn is {', '.join(sorted(forms))}; expected {' or '.join(SCORE_FNS)} in all rows")
    q, k = _vectors(queries, "q", dtype), _vectors(keys, "k", dtype)
    if q.shape[1] != k.shape[1]:
        raise BadTrace(f"{where}: queries of {q.shape[1]} numbers beside keys of {k.shape[1]}; expected as many")
    order = np.lexsort((head, step))
    order = order[np.isin(step[order], steps)]
    if not np.array_equal(step[order], np.repeat(steps, heads)) or not np.array_equal(
        head[order], np.tile(np.arange(heads), len(steps))
    ):
        raise BadTrace(f"{where}: not every step has one row for each of {heads} index heads; {AGAIN}")
    (at,) = _columns(keys, ("pos",))
    there = np.flatnonzero(at < request.total) if partial else np.arange(len(at))
    if not np.array_equal(np.sort(at[there]), np.arange(request.total)):
        raise BadTrace(f"{keys[0].file.parent}: expected every position from 0 to {request.total - 1} once, {AGAIN}")
    if not np.isfinite(w).all():
        raise BadTrace(f"{where}: w holds NaN or infinity; {FINITE}")
    shape = len(steps), heads
    return Indexer(
        q[order].reshape(*shape, -1), w[order].astype(np.float32).reshape(shape), k[there][np.argsort(at[there])], forms.pop()
    )


def chosen(indexer: Indexer, t: Ints, most: int) -> NDArray[np.bool_]:
    """bool[N, T]: the tokens that an indexer (raw, of the steps whose queries stand at t [N]) lets each step attend to: the `most` visible
    ones of highest score, in float64, ties to the lower position."""
    out = np.zeros((len(t), len(indexer.k)), bool)
    for row, score in zip(out, _scores(indexer, t), strict=True):
        row[np.argsort(-score, kind="stable")[:most]] = True
    return out


def decided(indexer: Indexer, t: Ints, most: int) -> NDArray[np.bool_]:
    """bool[N]: the scores say which `most` tokens a step attends to. They do not where the last of them ties with the next, as scores of 0 do
    when the keys of many tokens point away from every query: then a model takes any of these."""
    borders = [
        -np.partition(-score, [most - 1, most])[most - 1 : most + 1] if most < len(score) else () for score in _scores(indexer, t)
    ]
    return np.array([len({*border}) != 1 for border in borders], bool)


def _scores(indexer: Indexer, t: Ints) -> Iterator[NDArray[np.float64]]:
    """Of each step, f64[t + 1]: of all tokens that it sees."""
    q, k, w = widen(indexer.q), widen(indexer.k), indexer.w.astype(np.float64)
    for i, last in enumerate(t.tolist()):
        dots = q[i] @ k[: last + 1].T
        yield w[i] @ (np.maximum(dots, 0) if indexer.score_fn == "relu_weighted" else dots)


def widths(segments: Sequence[Segment], column: str, dtype: str) -> None:
    """Vectors of one whole number of numbers in all segments. Raises BadTrace."""
    found = {s.byte_width(column) for s in segments}
    if len(found) > 1 or any(n == 0 or n % ITEMSIZE[dtype] for n in found):
        raise BadTrace(
            f"{segments[0]}: {column} has {min(found)} bytes; expected vectors of {dtype}, of one size in all segments"
        )


def _columns(segments: Sequence[Segment], names: Sequence[str]) -> list[NDArray[Any]]:
    parts = [read_columns(s, names) for s in segments]
    return [np.concatenate(x) for x in zip(*parts, strict=True)]


def _vectors(segments: Sequence[Segment], column: str, dtype: str) -> Raw:
    out = np.concatenate([vectors(s, g, column, dtype) for s in segments for g in range(s.footer.num_row_groups)])
    if first_not_finite(out, dtype) is not None:
        raise BadTrace(f"{segments[0].file.parent}: {column} holds NaN or infinity; {FINITE}")
    return out
