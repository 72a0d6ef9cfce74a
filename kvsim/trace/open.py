"""Open a trace: what is in it, what it can supply, and the arrays of one (request, layer) at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import BadTrace, WrongUse
from kvsim.geometry import ITEMSIZE, Indexer, Layer, QueryStats, Request
from kvsim.tables import LAYERS, PREFILL, REQUESTS, VALUES, index_k_schema, index_q_schema, kv_schema, q_schema, q_stats_schema
from kvsim.trace.bits import Raw
from kvsim.trace.bundled import trace_place
from kvsim.trace.folder import AGAIN, Folder, Segment, check_columns, list_files, open_folder, read_rows
from kvsim.trace.indexer import chosen, decided, index_steps, indexer_of, widths
from kvsim.trace.kv import check_order, pieces_of, reach_of, stack
from kvsim.trace.moments import stats_of
from kvsim.trace.queries import Queries, grid, queries_of, run_before
from kvsim.trace.shapes import layers_of, requests_of

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

INDEX = {"index_k": index_k_schema, "index_q": index_q_schema}  # whose vectors have a size of their own
TABLES = ("kv", "q", "prefill", "values", "q_stats", *INDEX)


@dataclass(frozen=True, eq=False)
class Supply:
    """What a (request, layer) has for a policy, known without reading its rows."""

    steps: Ints  # decode steps whose queries are captured, ascending
    contiguous: bool  # they are 0, 1, 2, ... without a gap
    window_rows: int  # how many of the steps -1, -2, ... are there without a gap
    prefill_mass: bool
    k_pre: bool
    wo_norm: bool
    q_stats: bool
    index_steps: Ints | None  # decode steps that have queries of a learned indexer, ascending; None without its tables


@dataclass(frozen=True, eq=False)
class Lane:
    """The arrays of one (request, layer). Vectors are raw: float32, float16, or bfloat16 bits as uint16.

    k, v and k_pre are read-only: views of the mapped file where it holds all heads evenly in one segment, else one copy."""

    request: Request
    layer: Layer
    dtype: str
    k: Raw  # [Hkv, T, key_dim]
    v: Raw  # [Hkv, T, value_dim]
    k_pre: Raw | None  # [Hkv, T, key_dim], before RoPE; k itself in a layer without
    steps: Ints  # [N] decode steps, ascending
    t: Ints  # [N] position of each step's query
    q: Raw  # [N, Hq, key_dim]
    window_t: Ints  # [W] positions of the last prompt queries, ascending: the steps -W .. -1
    window_q: Raw  # [W, Hq, key_dim]
    mass: Floats | None  # [Hq, prompt] attention of all prompt queries on each key
    wo_norm: Floats | None  # [Hq, T] L1 norm of each head's output projection of v
    out: Raw | None  # [N, Hq, value_dim] attention output as captured
    lse: Floats | None  # [N, Hq] log of the softmax denominator as captured
    q_stats: QueryStats | None  # of the prompt queries before RoPE
    indexer: Indexer | None  # raw q and k of a learned indexer, when every captured step has its queries

    @property
    def sparse(self) -> bool:
        """The model's own indexer kept tokens out of `out` and `lse`."""
        return self.layer.index_topk is not None and self.layer.index_topk < self.request.total


@dataclass(frozen=True, eq=False)
class Trace:
    """An open trace. Rows stay on disk until `lane` maps those of one (request, layer)."""

    path: Path | S3Path
    id: str  # the folder's name
    dtype: str  # "float16" | "bfloat16" | "float32"
    sha256: str  # of the manifest
    requests: tuple[Request, ...]
    layers: tuple[Layer, ...]  # all that the model has, captured or not; row bytes as captured
    folder: Folder = field(repr=False)

    @property
    def manifest(self) -> dict[str, Any]:
        return self.folder.manifest

    @property
    def partial(self) -> bool:
        return self.folder.partial

    @property
    def captured_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.captured)

    def kv_dtype(self, asked: str | None = None) -> str:
        """The dtype that bytes are billed in: as asked, else the trace's when it has 16 bits, else bfloat16. Raises WrongUse."""
        if asked is not None and asked not in ITEMSIZE:
            raise WrongUse(f"kv dtype {asked!r}: expected one of {', '.join(ITEMSIZE)}")
        return asked or (self.dtype if ITEMSIZE[self.dtype] <= 2 else "bfloat16")

    def supplies(self, request: Request, layer: Layer) -> Supply:
        """From footers and the small columns of the queries. Raises BadTrace."""
        return self._supply(request, layer, self._queries(request, layer))

    def lane(self, request: Request, layer: Layer) -> Lane:
        """Every array of one (request, layer). Raises BadTrace: rows out of order, missing, twice, NaN or infinity."""
        at, dtype = (request.id, layer.id), self.dtype
        prefill, values = self.folder.of("prefill", *at), self.folder.of("values", *at)
        pieces = pieces_of(self.folder.of("kv", *at))
        check_order(pieces)
        queries = self._queries(request, layer)
        supply = self._supply(request, layer, queries)
        decode = queries.steps >= 0
        window = ~decode & (queries.steps >= -supply.window_rows)
        q = queries.vectors("q", dtype)
        k = stack(pieces, "k", layer.kv_heads, request.total, dtype)
        if supply.k_pre:
            k_pre = k if layer.rope is None else stack(pieces, "k_pre", layer.kv_heads, request.total, dtype)
        return Lane(
            request=request,
            layer=layer,
            dtype=dtype,
            k=k,
            v=stack(pieces, "v", layer.kv_heads, request.total, dtype),
            k_pre=k_pre if supply.k_pre else None,
            steps=supply.steps,
            t=supply.steps + request.prompt,
            q=q[decode],
            window_t=queries.steps[window] + request.prompt,
            window_q=q[window],
            mass=grid(prefill, "mass", layer.q_heads, request.prompt, self.partial) if supply.prefill_mass else None,
            wo_norm=grid(values, "wo_norm", layer.q_heads, request.total, self.partial) if supply.wo_norm else None,
            out=queries.vectors("out", dtype, finite=False)[decode] if queries.has("out") else None,
            lse=queries.numbers("lse")[decode] if queries.has("lse") else None,
            q_stats=stats_of(self.folder.of("q_stats", *at), layer) if supply.q_stats else None,
            indexer=self._indexer(request, layer, supply),
        )

    def _indexer(self, request: Request, layer: Layer, supply: Supply) -> Indexer | None:
        if supply.index_steps is None or len(np.setdiff1d(supply.steps, supply.index_steps)):
            return None
        keys, queries = (self.folder.of(name, request.id, layer.id) for name in ("index_k", "index_q"))
        return indexer_of(keys, queries, request, supply.steps, self.dtype, self.partial)

    def decode_queries(self, request: Request, layer: Layer) -> tuple[Ints, Raw]:
        """The decode steps whose queries are captured, ascending, and raw queries [N, Hq, key_dim]. Raises BadTrace."""
        queries = self._queries(request, layer)
        decode = queries.steps >= 0
        return queries.steps[decode], queries.vectors("q", self.dtype)[decode]

    def _queries(self, request: Request, layer: Layer) -> Queries:
        return queries_of(self.folder.of("q", request.id, layer.id), request, layer, self.partial)

    def _supply(self, request: Request, layer: Layer, queries: Queries) -> Supply:
        steps, at = queries.steps[queries.steps >= 0], (request.id, layer.id)
        return Supply(
            steps=steps,
            contiguous=bool((steps == np.arange(len(steps))).all()),
            window_rows=run_before(queries.steps),
            prefill_mass=self._holds(self.folder.of("prefill", *at), layer.q_heads * request.prompt),
            k_pre=layer.rope is None or any("k_pre" in s.columns for s in self.folder.of("kv", *at)),
            wo_norm=self._holds(self.folder.of("values", *at), layer.q_heads * request.total),
            q_stats=self._holds(self.folder.of("q_stats", *at), layer.q_heads),
            index_steps=self._index_steps(request, layer),
        )

    def _index_steps(self, request: Request, layer: Layer) -> Ints | None:
        keys, queries = (self.folder.of(name, request.id, layer.id) for name in ("index_k", "index_q"))
        return index_steps(queries, request) if queries and self._holds(keys, request.total) else None

    def _holds(self, segments: Sequence[Segment], rows: int) -> bool:
        """An optional table is there; in a partial trace, and with all rows of the prefix."""
        return bool(segments) and (not self.partial or sum(s.rows for s in segments) >= rows)


def own_reads(lane: Lane) -> NDArray[np.bool_] | None:
    """bool[N, T]: the tokens that the model's own indexer let each step attend to. None: all visible ones, or nothing in the trace says
    which (Lane.sparse tells these apart)."""
    most = lane.layer.index_topk
    return chosen(lane.indexer, lane.t, most) if lane.sparse and lane.indexer is not None and most is not None else None


def with_known_reads(lane: Lane) -> Lane:
    """The lane without the decode steps of which the scores of the model's own indexer do not decide what it read: nothing can be said of
    their `out` and `lse`."""
    most = lane.layer.index_topk
    if not lane.sparse or lane.indexer is None or most is None:
        return lane
    known = decided(lane.indexer, lane.t, most)
    indexer = replace(lane.indexer, q=lane.indexer.q[known], w=lane.indexer.w[known])
    some = {name: x[known] for name in ("steps", "t", "q", "out", "lse") if (x := getattr(lane, name)) is not None}
    return replace(lane, indexer=indexer, **some)


def open_trace(path: str | Path | S3Path, allow_partial: bool = False) -> Trace:
    """The trace in a folder, at s3://BUCKET/PREFIX, or bundled under a name: metadata, sizes, columns and positions checked; values are
    checked when a lane is read.

    A trace whose capture did not complete is refused, or with `allow_partial` read up to the last position and query that every
    captured layer has; requests whose prompt is not whole are left out. Raises BadTrace."""
    root = trace_place(path)
    folder = open_folder(list_files(root, allow_partial))
    described = read_rows(folder.of("requests"), REQUESTS)
    if folder.partial:  # a capture describes a request anew as it ends
        described = list({row["request"]: row for row in described}.values())
    requests = requests_of(described, root / "requests")
    rows = read_rows(folder.of("layers"), LAYERS)
    dtype = folder.manifest.get("dtype") or _dtype(folder, rows)
    layers = layers_of(rows, dtype, root / "layers")
    captured = [layer for layer in layers if layer.captured]
    if not requests or not captured:
        raise BadTrace(f"{root}: no {'request' if not requests else 'captured layer'} in it; expected at least one")
    reach = {r.id: min(_reach(folder, r, layer, dtype) for layer in captured) for r in requests}
    if folder.partial:
        requests = tuple(_cut(r, reach[r.id]) for r in requests if reach[r.id] >= r.prompt)
        if not requests:
            raise BadTrace(f"{root}: partial, and no request has its whole prompt in every captured layer; capture again")
    name = root.resolve().name if isinstance(root, Path) else root.name
    return Trace(root, name, dtype, folder.sha256, requests, layers, folder)


def _dtype(folder: Folder, rows: Sequence[dict[str, Any]]) -> str:
    """The dtype of a partial trace whose layers table does not carry it: 4 bytes a number can only be float32."""
    dims = {row["layer"]: row["key_dim"] for row in rows}
    for (table, _, layer), segments in folder.segments.items():
        if table == "kv" and segments[0].byte_width("k") == 4 * dims.get(layer, 0):
            return "float32"
    raise BadTrace(f"{folder.root}: partial, and nothing says if its numbers are float16 or bfloat16; capture again")


def _reach(folder: Folder, r: Request, layer: Layer, dtype: str) -> int:
    """How many positions of a request one layer has, rows and queries: all, unless the trace is partial. Raises BadTrace."""
    _check_tables(folder, r, layer, dtype)
    kv, q = folder.of("kv", r.id, layer.id), folder.of("q", r.id, layer.id)
    if not kv or not q:
        return 0
    reach = reach_of(pieces_of(kv), layer.kv_heads, r.total, folder.partial, str(kv[0].file.parent))
    if folder.partial:
        reach = min(reach, r.prompt + 1 + int(queries_of(q, r, layer, partial=True).steps.max(initial=-1)))
    return reach


def _check_tables(folder: Folder, r: Request, layer: Layer, dtype: str) -> None:
    """The tables of one (request, layer) are there, with the columns and widths that its layer says. Raises BadTrace."""
    tables = {name: folder.of(name, r.id, layer.id) for name in TABLES}
    for name in ("kv", "q"):
        if not tables[name] and not folder.partial:
            where = f"{folder.root}/{name}/request={r.id}/layer={layer.id}"
            raise BadTrace(f"{where}: the table is missing and layer {layer.id} is listed as captured; {AGAIN}")
    has = {column for name in ("kv", "q") for s in tables[name] for column in s.columns}
    key, value = layer.key_dim * ITEMSIZE[dtype], layer.value_dim * ITEMSIZE[dtype]
    schemas = {
        "kv": kv_schema(key, value, "k_pre" in has),
        "q": q_schema(key, value, "out" in has, lse=False),
        "prefill": PREFILL,
        "values": VALUES,
        "q_stats": q_stats_schema(layer.key_dim),
    }
    for name, segments in tables.items():
        for s in segments:
            check_columns(s, schemas[name] if name in schemas else INDEX[name](s.byte_width(name[-1])))
        if name in INDEX and segments:
            widths(segments, name[-1], dtype)


def _cut(r: Request, total: int) -> Request:
    return replace(r, total=total, roles=r.roles[:total], spans=tuple(s for s in r.spans if s.stop <= total))
