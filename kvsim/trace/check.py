"""What `kvsim trace check` finds: everything that opening a trace does not look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import BadTrace, WrongUse
from kvsim.geometry import Layer, QueryStats, Request, rope_problem
from kvsim.places import file_hash, names_in
from kvsim.trace.bits import widen
from kvsim.trace.bundled import trace_place
from kvsim.trace.folder import AGAIN, Listing, Segment, list_files, read_columns, read_journal
from kvsim.trace.open import Lane, Trace, open_trace, own_reads, with_known_reads
from kvsim.trace.reference import attend
from kvsim.trace.write import ROWS

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

# How far a model's own attention may be from float64, by the dtype it computes in: relative error of a head's outputs over all
# steps, difference of a log sum. Wide in 16 bits, where the model rounds its scores, so they find mistakes and not rounding.
OUT = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.25}
LSE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 0.5}
ROTATED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
MASS = 0.01  # of the number of queries
SYMMETRIC = 1e-5  # of the largest number of a covariance, which is stored in float32
STEPS = 16  # attended at a time


def check_trace(path: str | Path, allow_partial: bool = False, tell: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """One line for each problem: hashes first, then files and every value of every (request, layer). Nothing: the trace is sound.
    tell: hears of what could not be held against anything."""
    try:
        altered = list(_altered(list_files(trace_place(path), allow_partial)))
        yield from altered
        if altered:
            return
        trace = open_trace(path, allow_partial)
    except BadTrace as e:
        yield str(e)
        return
    yield from _files(trace)
    for request in trace.requests:
        for layer in trace.captured_layers:
            yield from _lane(trace, request, layer, tell)


def _altered(listing: Listing) -> Iterator[str]:
    for name, entry in listing.manifest["files"].items():
        if file_hash(listing.root / name) != entry.get("sha256"):
            yield f"{listing.root / name}: its sha256 is not the one listed: the file was altered; {AGAIN}"


def _files(trace: Trace) -> Iterator[str]:
    files, root = trace.manifest["files"], trace.path
    there = names_in(root)
    for name in sorted(there - set(files) - {"manifest.json", "journal.jsonl"}):
        yield f"{root / name}: not listed in the manifest, so never read; remove it"
    if not trace.partial and "journal.jsonl" in there:
        yield from _journal(root / "journal.jsonl", files)
    lanes = {(r.id, layer.id) for r in trace.requests for layer in trace.captured_layers}
    for (table, request, layer), segments in trace.folder.segments.items():
        if table not in ("requests", "layers") and (request, layer) not in lanes and not trace.partial:
            yield f"{segments[0].file.parent}: rows of a request and layer not described as captured, so never read; remove them"
        for s in segments:
            yield from _layout(s, table)


def _journal(file: Path | S3Path, files: dict[str, Any]) -> Iterator[str]:
    try:
        closed = read_journal(file, file.read_bytes())
    except BadTrace as e:
        yield str(e)
        return
    for name, entry in files.items():
        if any(closed.get(name, {}).get(key) != entry.get(key) for key in ("bytes", "sha256", "rows")):
            yield f"{file}: it does not say of {name} what manifest.json says: one of them was altered; {AGAIN}"


def _layout(s: Segment, table: str) -> Iterator[str]:
    groups = [s.footer.row_group(g) for g in range(s.footer.num_row_groups)]
    rows = max((g.num_rows for g in groups), default=0)
    if table == "kv" and rows > ROWS:
        yield f"{s}: a row group of {rows} rows; expected at most {ROWS}, write it in several segments"
    for name in (n for n in s.columns if s.byte_width(n)):
        odd = {e for g in range(len(groups)) for e in s.chunk(g, name)[0].encodings} - {"PLAIN", "RLE", "BIT_PACKED"}
        if odd:
            yield f"{s}: the column {name!r} is encoded as {', '.join(sorted(odd))}; expected PLAIN, which every reader has"


def _lane(trace: Trace, request: Request, layer: Layer, tell: Callable[[str], None]) -> Iterator[str]:
    """Problems in the values of one (request, layer)."""
    try:
        lane = trace.lane(request, layer)
    except BadTrace as e:
        yield str(e)
        return
    where = f"{trace.path}: request {request.id}, layer {layer.id}"
    known = with_known_reads(lane)
    read = own_reads(known)
    if (lost := len(lane.t) - len(known.t)) and not (lane.out is None and lane.lse is None):
        tell(f"{where}: {lost} of {len(lane.t)} steps left out: tied scores do not tell which tokens the model's indexer chose")
    for head in range(layer.kv_heads):
        yield from (f"{where}, {problem}" for problem in _attention(known, head, read))
        yield from (f"{where}, kv head {head}: {problem}" for problem in _rotation(lane, head))
    if lane.q_stats is not None:
        yield from (f"{where}: {problem}" for problem in _moments(lane.q_stats, request.prompt))
    if lane.mass is not None:
        yield from (f"{where}: {problem}" for problem in _masses(lane, lane.mass))
        yield from _counts(trace.folder.of("prefill", request.id, layer.id), lane)


def _attention(lane: Lane, kv_head: int, read: NDArray[np.bool_] | None) -> Iterator[str]:
    """Captured outputs and log sums against attention recomputed from q, k and v, over what each step may read [N, T] (None: all)."""
    if (lane.out is None and lane.lse is None) or (read is None and lane.sparse):
        return
    layer, heads = lane.layer, slice(kv_head * lane.layer.group, (kv_head + 1) * lane.layer.group)
    k, v = widen(lane.k[kv_head]), widen(lane.v[kv_head])
    wrong, size, apart = np.zeros(layer.group), np.zeros(layer.group), np.zeros(layer.group)
    for a in range(0, len(lane.t), STEPS):
        block = slice(a, a + STEPS)
        p, lse = attend(widen(lane.q[block, heads]), lane.t[block], k, layer, kv_head, None if read is None else read[block])
        if lane.out is not None:
            out = p @ v
            wrong += ((widen(lane.out[block, heads]) - out) ** 2).sum(axis=(0, 2))
            size += (out**2).sum(axis=(0, 2))
        if lane.lse is not None:
            apart = np.maximum(apart, np.abs(lane.lse[block, heads] - lse).max(axis=0))
    error = np.sqrt(wrong / np.maximum(size, 1e-300))
    for g in range(layer.group):
        head = heads.start + g
        if not error[g] <= OUT[lane.dtype]:
            yield f"q head {head}: `out` is {error[g]:.2g} away from attention over the stored q, k, v; expected {OUT[lane.dtype]:g}"
        if not apart[g] <= LSE[lane.dtype]:
            yield f"q head {head}: `lse` is {apart[g]:.2g} away from that of the stored q and k; expected {LSE[lane.dtype]:g}"


def _rotation(lane: Lane, kv_head: int) -> Iterator[str]:
    """k is k_pre with RoPE applied."""
    if lane.k_pre is None or lane.layer.rope is None:
        return
    k = widen(lane.k[kv_head])
    if problem := rope_problem(lane.layer.rope):
        if "layout" not in problem:  # a layout or a scaling that cannot be applied again is no fault of the trace
            yield problem
        return
    try:
        rotated = lane.layer.rotate(widen(lane.k_pre[kv_head]), np.arange(len(k)))
    except WrongUse as e:
        yield str(e)
        return
    error = np.linalg.norm(rotated - k) / max(float(np.linalg.norm(k)), 1e-300)
    if not error <= ROTATED[lane.dtype]:
        yield f"`k` is {error:.2g} away from `k_pre` under the rope of the layers table; expected {ROTATED[lane.dtype]:g}"


def _moments(stats: QueryStats, prompt: int) -> Iterator[str]:
    """A covariance is symmetric, and no direction varies by less than nothing; the queries are those from `first` on."""
    if not 0 <= stats.first < prompt or stats.queries != prompt - stats.first:
        yield f"q_stats are of {stats.queries} queries from position {stats.first}; expected {prompt - stats.first}, to the prompt's end"
    for head, c in enumerate(stats.covariance.astype(np.float64)):
        size = max(float(np.abs(c).max()), 1e-300)
        if np.abs(c - c.T).max() > SYMMETRIC * size or np.linalg.eigvalsh((c + c.T) / 2).min() < -SYMMETRIC * size * len(c):
            yield f"q head {head}: the covariance of q_stats is none; expected a symmetric matrix without negative eigenvalues"


def _masses(lane: Lane, mass: NDArray[np.float32]) -> Iterator[str]:
    """Every query spreads a mass of 1 over what it sees; learned sinks take some of it."""
    n = lane.request.prompt
    for head, total in enumerate(mass.sum(axis=1, dtype=np.float64)):
        low = 0 if lane.layer.sinks else n * (1 - MASS)
        if not low <= total <= n * (1 + MASS):
            yield f"q head {head}: the prefill masses sum to {total:.6g}; expected {n}, one for each prompt query"


def _counts(segments: Sequence[Segment], lane: Lane) -> Iterator[str]:
    """`queries` of a key: the prompt queries that see it."""
    n, window = lane.request.prompt, lane.layer.window or lane.request.prompt
    for s in segments:
        pos, queries = read_columns(s, ("pos", "queries"))
        wrong = queries != np.minimum(n - pos, window)
        if wrong.any():
            i = int(wrong.argmax())
            yield f"{s}: queries is {queries[i]} at position {pos[i]}; expected {min(n - pos[i], window)}, the prompt queries that see it"
