"""Write a trace: every call closes a segment that outlives a kill, the manifest comes last and makes the trace complete."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from kvsim.errors import WrongUse
from kvsim.geometry import ITEMSIZE, SCORE_FNS, Layer, QueryStats, Request
from kvsim.tables import (
    LAYERS,
    PREFILL,
    RARE,
    REQUESTS,
    TRACE_SCHEMA,
    VALUES,
    index_k_schema,
    index_q_schema,
    kv_schema,
    q_schema,
    q_stats_schema,
)
from kvsim.trace.bits import RAW, Raw
from kvsim.trace.closing import locked, replacing
from kvsim.trace.folder import DRAFT, Key
from kvsim.trace.rest import Rest, rest_of
from kvsim.trace.shapes import layers_of, requests_of

ROWS = 32768  # most rows of a row group
_PARQUET: dict[str, Any] = {"use_dictionary": False, "data_page_size": 16 << 20}
if "max_rows_per_page" in inspect.signature(pq.write_table).parameters:
    _PARQUET["max_rows_per_page"] = ROWS  # newer pyarrow also ends a page by its rows; one page a row group can be mapped whole

Row = Mapping[str, Any]
Columns = dict[str, Raw]


class TraceWriter:
    """A context manager that writes `path`, a new or empty folder. `requests` and `layers` are rows of the tables of these names.

    Left without an error, it checks that every captured (request, layer) is whole and writes the manifest. After an error or a
    kill the segments closed so far stay readable as a partial trace; if `durable`, after a power cut too. `go_on`: a trace of the
    same source and capture may be there, complete or not: its finished requests stay, `finished` tells which, others follow them.
    Raises WrongUse: a folder that is taken, that another process writes, or whose trace is of another capture."""

    def __init__(
        self,
        path: str | Path,
        dtype: str,
        source: Mapping[str, Any],
        capture: Mapping[str, Any],
        requests: Sequence[Row],
        layers: Sequence[Row],
        compression: str = "none",
        created: str | None = None,
        durable: bool = True,
        go_on: bool = False,
    ) -> None:
        self.path, self.dtype, self.compression, self.durable = Path(path), dtype, compression, durable
        if dtype not in RAW:
            raise WrongUse(f"dtype {dtype!r}: expected {', '.join(RAW)}")
        if compression not in ("none", "zstd"):
            raise WrongUse(f"compression {compression!r}: expected none or zstd")
        if not go_on and self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise WrongUse(f"{self.path}: there is something already; write to a new folder, or remove it first")
        self.layers = layers_of(layers, dtype, "layers")
        self.requests: tuple[Request, ...] = ()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = locked(self.path)
        self._rows: dict[int, Row] = {}  # of the table `requests`
        self._files: dict[str, dict[str, Any]] = {}
        self._ends: dict[Key, int] = {}  # the position after the last one written
        self._columns: dict[Key, set[str]] = {}
        self._parts: Counter[str] = Counter()
        self._told: dict[str, Any] = {}
        self._latest: set[int] = set()  # requests of the last part of their table
        self._draft = {
            "schema": TRACE_SCHEMA,
            "kind": "attention",
            "created": created or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "source": dict(source),
            "dtype": dtype,
            "byte_order": "little",
            "capture": dict(capture),
        }
        self._capture = dict(capture)
        try:
            rest = rest_of(self.path, self._draft, list(layers)) if go_on else None
            self._journal = (self.path / "journal.jsonl").open("ab")
            if rest is None:
                rare = [name for name in RARE if all(row.get(name) is None for row in layers)]
                draft = pa.schema([f for f in LAYERS if f.name not in rare], {DRAFT: json.dumps(self._draft).encode()})
                self._close("layers/part-0.parquet", pa.Table.from_pylist(list(layers), draft))
            else:
                self._take(rest)
            if requests:
                self.describe(requests)
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._journal.close()
            os.close(self._lock)

    @property
    def finished(self) -> dict[int, Row]:
        """The requests that have all their tokens, by id: rows of the table `requests`."""
        return {i: row for i, row in self._rows.items() if row.get("token_ids") is not None}

    def describe(self, requests: Sequence[Row]) -> None:
        """More requests, or the same anew, for a capture that learns their tokens and totals as they end: the last word counts.

        In a trace that may be gone on with, a request is finished when it is described with its tokens, after all its rows."""
        self._known(requests)
        self._latest = {int(row["request"]) for row in requests}
        self._close(f"requests/part-{self._next('requests')}.parquet", pa.Table.from_pylist(list(requests), REQUESTS))

    def tell(self, **more: Any) -> None:
        """What the manifest's `capture` says beside what was given at first, for what only the end of a capture knows."""
        self._told |= more

    def _known(self, requests: Iterable[Row]) -> None:
        self._rows |= {int(row["request"]): row for row in requests}
        self.requests = requests_of(list(self._rows.values()), "requests")

    def _take(self, rest: Rest) -> None:
        """Goes on from what an earlier capture left."""
        self._known(rest.requests)
        self._files, self._parts, self._ends = dict(rest.files), Counter(rest.parts), dict(rest.ends)
        self._draft |= {"created": rest.created}

    def kv(self, request: int, layer: int, pos0: int, k: Raw, v: Raw, k_pre: Raw | None = None) -> None:
        """The rows of positions pos0, pos0 + 1, ...: k and k_pre [Hkv, n, key_dim], v [Hkv, n, value_dim], raw numbers."""
        _, spec = self._find(request, layer)
        n = k.shape[1]
        vectors = {"k": k, "v": v} | ({} if k_pre is None else {"k_pre": k_pre})
        for name, x in vectors.items():
            self._expect(name, x, (spec.kv_heads, n, spec.value_dim if name == "v" else spec.key_dim))
        self._follow("kv", request, layer, pos0, pos0 + n, vectors)
        schema = kv_schema(*self._widths(spec), k_pre is not None)
        for a in range(0, n, ROWS):
            b = min(n, a + ROWS)
            columns = _grid("kv_head", spec.kv_heads, "pos", np.arange(pos0 + a, pos0 + b))
            columns |= {name: x[:, a:b] for name, x in vectors.items()}
            self._segment("kv", request, layer, columns, schema, group=b - a)

    def q(self, request: int, layer: int, steps: ArrayLike, q: Raw, out: Raw | None = None, lse: ArrayLike | None = None) -> None:
        """Queries of `steps` [n], ascending, -1 the last prompt row: q [n, Hq, key_dim], out [n, Hq, value_dim], lse [n, Hq]."""
        r, spec = self._find(request, layer)
        step = np.asarray(steps, np.int64)
        vectors = {"q": q} | ({} if out is None else {"out": out})
        for name, x in vectors.items():
            self._expect(name, x, (len(step), spec.q_heads, spec.value_dim if name == "out" else spec.key_dim))
        if not len(step) or (np.diff(step) < 1).any() or r.prompt + step[0] < self._ends.get(("q", request, layer), 0):
            raise WrongUse(
                f"q of request {request}, layer {layer}: steps {step.tolist()}; expected ascending ones, after those before"
            )
        self._follow("q", request, layer, None, r.prompt + int(step[-1]) + 1, [*vectors, *([] if lse is None else ["lse"])])
        columns = _grid("q_head", spec.q_heads, "decode_step", step)
        columns |= {"kv_head": columns["q_head"] // spec.group, "pos": columns["decode_step"] + r.prompt}
        columns |= {name: np.swapaxes(x, 0, 1) for name, x in vectors.items()}
        if lse is not None:
            columns["lse"] = np.asarray(lse, np.float32).T.ravel()
        schema = q_schema(*self._widths(spec), out is not None, lse is not None)
        self._segment("q", request, layer, columns, schema, group=len(step) * spec.group)

    def prefill(self, request: int, layer: int, mass: Raw, queries: ArrayLike) -> None:
        """Attention of all prompt queries on each key: mass f32[Hq, prompt]; queries [prompt]: how many could see it."""
        r, spec = self._find(request, layer)
        self._follow("prefill", request, layer, 0, r.prompt)
        columns = _grid("q_head", spec.q_heads, "pos", np.arange(r.prompt))
        columns |= {"mass": np.asarray(mass, np.float32).ravel(), "queries": np.tile(np.asarray(queries), spec.q_heads)}
        self._segment("prefill", request, layer, columns, PREFILL)

    def values(self, request: int, layer: int, pos0: int, wo_norm: Raw) -> None:
        """L1 norms of each head's output projection of v at positions pos0, pos0 + 1, ...: f32[Hq, n]."""
        _, spec = self._find(request, layer)
        positions = np.arange(pos0, pos0 + wo_norm.shape[1])
        self._follow("values", request, layer, pos0, pos0 + len(positions))
        columns = _grid("q_head", spec.q_heads, "pos", positions) | {"wo_norm": np.asarray(wo_norm, np.float32).ravel()}
        self._segment("values", request, layer, columns, VALUES)

    def q_stats(self, request: int, layer: int, stats: QueryStats) -> None:
        """Mean and covariance of the prompt queries before RoPE."""
        r, spec = self._find(request, layer)
        for x, shape in ((stats.mean, (spec.key_dim,)), (stats.covariance, (spec.key_dim,) * 2)):
            if x.dtype != np.float32 or x.shape != (spec.q_heads, *shape):
                raise WrongUse(f"q_stats are {x.dtype}{list(x.shape)}; expected float32{[spec.q_heads, *shape]}")
        self._follow("q_stats", request, layer, 0, r.prompt)
        heads = np.arange(spec.q_heads)
        columns: Columns = {
            "q_head": heads,
            "pos": np.full_like(heads, stats.first),
            "queries": np.full_like(heads, stats.queries),
        }
        columns |= {"mean": stats.mean, "covariance": stats.covariance.reshape(len(heads), -1)}
        self._segment("q_stats", request, layer, columns, q_stats_schema(spec.key_dim))

    def index_k(self, request: int, layer: int, pos0: int, k: Raw) -> None:
        """Keys of a learned indexer at positions pos0, pos0 + 1, ...: raw numbers [n, d], one for all heads of the layer."""
        self._find(request, layer)
        self._expect("index keys", k, (len(k), k.shape[-1]))
        self._follow("index_k", request, layer, pos0, pos0 + len(k), [f"k of {k.shape[1]} numbers"])
        for a in range(0, len(k), ROWS):
            rows = k[a : a + ROWS]
            columns = {"pos": np.arange(pos0 + a, pos0 + a + len(rows)), "k": rows}
            self._segment("index_k", request, layer, columns, index_k_schema(rows[0].nbytes))

    def index_q(self, request: int, layer: int, steps: ArrayLike, q: Raw, w: Raw, score_fn: str) -> None:
        """Queries of a learned indexer of decode `steps` [n], ascending: raw numbers q [n, H, d], weights w [n, H]; score_fn: of
        geometry.SCORE_FNS."""
        r, _ = self._find(request, layer)
        step = np.asarray(steps, np.int64)
        self._expect("index queries", q, (len(step), *q.shape[1:3]))
        if score_fn not in SCORE_FNS or w.shape != q.shape[:2] or (np.diff(step, prepend=-1) < 1).any():
            raise WrongUse(
                f"index_q of request {request}, layer {layer}: score_fn {score_fn!r}, w {list(w.shape)}, steps {step.tolist()}; expected "
                f"{' or '.join(SCORE_FNS)}, {list(q.shape[:2])}, and steps from 0 up, ascending"
            )
        kind = [f"q of {list(q.shape[1:])}", score_fn]
        self._follow("index_q", request, layer, None, r.prompt + int(step[-1]) + 1, kind)
        columns = _grid("index_head", q.shape[1], "decode_step", step)
        columns |= {"pos": columns["decode_step"] + r.prompt, "w": np.asarray(w, np.float32).T.ravel(), "q": np.swapaxes(q, 0, 1)}
        columns |= {"score_fn": np.repeat(score_fn, len(columns["pos"]))}
        self._segment("index_q", request, layer, columns, index_q_schema(q[0, 0].nbytes))

    # -------------------------------------------------------------------------------------------- what a call must be
    def _find(self, request: int, layer: int) -> tuple[Request, Layer]:
        r = next((r for r in self.requests if r.id == request), None)
        spec = next((x for x in self.layers if x.id == layer and x.captured), None)
        if r is None or spec is None:
            raise WrongUse(f"request {request}, layer {layer}: not described as a request and a captured layer of this trace")
        return r, spec

    def _widths(self, spec: Layer) -> tuple[int, int]:
        return spec.key_dim * ITEMSIZE[self.dtype], spec.value_dim * ITEMSIZE[self.dtype]

    def _expect(self, name: str, x: Raw, shape: tuple[int, ...]) -> None:
        if x.shape != shape or x.dtype != RAW[self.dtype]:
            bits = f"{RAW[self.dtype]}{' (the bits of bfloat16)' if self.dtype == 'bfloat16' else ''}"
            raise WrongUse(f"{name} is {x.dtype}{list(x.shape)}; expected {bits}{list(shape)}")

    def _follow(self, table: str, request: int, layer: int, start: int | None, end: int, columns: Iterable[str] = ()) -> None:
        """A segment starts where the one before it ended, with the same columns."""
        key, mine = (table, request, layer), set(columns)
        before = self._ends.get(key, 0)
        if start is not None and start != before:
            raise WrongUse(
                f"{table} of request {request}, layer {layer} starts at position {start}; expected {before}, where it stands"
            )
        if self._columns.setdefault(key, mine) != mine:
            first = sorted(self._columns[key])
            raise WrongUse(f"{table} of request {request}, layer {layer} has {sorted(mine)}; expected {first}, as before")
        self._ends[key] = end

    # -------------------------------------------------------------------------------------------- files
    def _segment(
        self, table: str, request: int, layer: int, columns: Columns, schema: pa.Schema, group: int | None = None
    ) -> None:
        arrays = {f.name: _array(columns[f.name], f.type) for f in schema if f.name in columns}
        folder, pos = f"{table}/request={request}/layer={layer}", columns["pos"]
        rows = pa.Table.from_arrays(list(arrays.values()), schema=pa.schema([schema.field(name) for name in arrays]))
        self._close(f"{folder}/seg-{self._next(folder):05d}.parquet", rows, group, (int(pos.min()), int(pos.max())))

    def _next(self, folder: str) -> int:
        self._parts[folder] += 1
        return self._parts[folder] - 1

    def _close(
        self, name: str, rows: pa.Table, group: int | None = None, span: tuple[int | None, int | None] = (None, None)
    ) -> None:
        """One Parquet file under its name, whole or not at all, then its line in the journal."""
        small = [f.name for f in rows.schema if not pa.types.is_fixed_size_binary(f.type)]
        with replacing(self.path / name, self.durable) as f:
            pq.write_table(rows, f, row_group_size=group, compression=self.compression, write_statistics=small, **_PARQUET)
        with (self.path / name).open("rb") as f:
            entry = {
                "bytes": os.fstat(f.fileno()).st_size,
                "sha256": hashlib.file_digest(f, "sha256").hexdigest(),
                "rows": rows.num_rows,
            }
        self._files[name] = entry
        line = {"path": name, **entry, "first": span[0], "last": span[1]}
        self._journal.write(json.dumps(line).encode() + b"\n")
        self._journal.flush()
        if self.durable:
            os.fsync(self._journal.fileno())

    def _finish(self) -> None:
        for r in self.requests:
            for layer in (x.id for x in self.layers if x.captured):
                ends = {table: self._ends.get((table, r.id, layer)) for table in ("kv", "q", "values", "index_k")}
                if ends["kv"] != r.total or ends["q"] is None or {ends["values"], ends["index_k"]} - {None, r.total}:
                    there = {table: end for table, end in ends.items() if table != "index_k" or end is not None}
                    raise WrongUse(
                        f"request {r.id}, layer {layer}: rows end at {there}; expected kv (and values) to {r.total}, and queries"
                    )
        if self._latest != set(self._rows):
            self.describe([row for _, row in sorted(self._rows.items())])
        *old, _ = [name for name in self._files if name.startswith("requests/")]
        files = {name: entry for name, entry in sorted(self._files.items()) if name not in old}
        with replacing(self.path / "manifest.json", self.durable) as f:
            draft = self._draft | {"capture": {**self._capture, **self._told}, "status": "complete", "files": files}
            f.write(json.dumps(draft, indent=1).encode())
        for name in old:
            (self.path / name).unlink(missing_ok=True)
            del self._files[name]


def _grid(outer: str, heads: int, inner: str, values: Raw) -> Columns:
    """Two columns: every head with every value, heads slowest."""
    return {outer: np.repeat(np.arange(heads), len(values)), inner: np.tile(values, heads)}


def _array(x: Raw, kind: pa.DataType) -> pa.Array:
    """Numbers [rows], or raw vectors [..., d] as the bytes of fixed size that they are."""
    if not pa.types.is_fixed_size_binary(kind):
        return pa.array(x, kind)
    x = np.ascontiguousarray(x)
    return pa.FixedSizeBinaryArray.from_buffers(kind, x.size // x.shape[-1], [None, pa.py_buffer(x)])
