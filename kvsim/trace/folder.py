"""A trace as it lies on disk: the manifest or the journal, safe paths, sizes, Parquet footers, columns."""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvsim.errors import BadTrace, in_a_line
from kvsim.places import from_json
from kvsim.tables import TRACE_SCHEMA
from kvsim.trace.bits import RAW, Raw

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

FOOTER = 16 << 10  # bytes read from the end of an object; a longer footer takes a second read
DRAFT = b"kvsim.manifest"  # footer key of the layers table: the manifest as known before the capture completed
AGAIN = "copy or capture it again"
FINITE = "expected finite numbers, capture again"
TABLE = re.compile(
    r"(requests|layers)/part-[^/]*\.parquet|(kv|q|prefill|values|q_stats|index_k|index_q)/request=(\d+)/layer=(\d+)/seg-[^/]*\.parquet"
)

Key = tuple[str, int, int]  # table, request, layer; -1 where a table has none


@dataclass(frozen=True)
class Segment:
    """One closed Parquet file. `name` is its path inside the trace; printed, it is where a reader finds it."""

    name: str
    file: Path | S3Path
    footer: pq.FileMetaData = field(repr=False, compare=False)
    size: int = field(default=0, compare=False)  # in bytes

    def __str__(self) -> str:
        return str(self.file)

    @property
    def rows(self) -> int:
        return int(self.footer.num_rows)

    @cached_property
    def columns(self) -> dict[str, pa.DataType]:
        """Name -> type. Raises BadTrace."""
        with _parquet(self):
            schema = self.footer.schema.to_arrow_schema()
        if twice := {name for name in schema.names if schema.names.count(name) > 1}:
            raise BadTrace(f"{self}: the column {min(twice)!r} is there twice; expected every column once")
        return dict(zip(schema.names, schema.types, strict=True))

    def byte_width(self, column: str) -> int:
        """Of a vector column; 0 when it is not there or not of fixed size."""
        found = self.columns.get(column)
        return found.byte_width if found is not None and pa.types.is_fixed_size_binary(found) else 0

    def chunk(self, group: int, column: str) -> tuple[pq.ColumnChunkMetaData, pq.ColumnSchema]:
        """What the footer says of a column in a row group. Raises BadTrace where asking on would end the process."""
        schema = self.footer.schema
        i = next(i for i in range(len(schema)) if schema.column(i).path == column)
        chunk = self.footer.row_group(group).column(i)
        if chunk.physical_type != schema.column(i).physical_type:
            raise BadTrace(f"{self}: the footer has two types for the column {column!r}: the file was altered; {AGAIN}")
        return chunk, schema.column(i)


@dataclass(frozen=True)
class Listing:
    """What should lie in a trace's folder: a manifest, or in a partial trace one made of its journal."""

    root: Path | S3Path
    manifest: dict[str, Any]
    sha256: str  # of manifest.json; of journal.jsonl when partial
    partial: bool


@dataclass(frozen=True)
class Folder(Listing):
    """The files themselves, footers checked; segments in the order of their names (partial: of the journal)."""

    segments: dict[Key, tuple[Segment, ...]]

    def of(self, table: str, request: int = -1, layer: int = -1) -> tuple[Segment, ...]:
        return self.segments.get((table, request, layer), ())


def list_files(root: Path | S3Path, allow_partial: bool = False) -> Listing:
    """What the manifest, or the journal of a partial trace, lists: every file is inside the trace and of its size. Raises BadTrace."""
    sizes = root.sizes() if not isinstance(root, Path) else {p.name: 0 for p in root.iterdir()} if root.is_dir() else {}
    if not sizes and not (isinstance(root, Path) and root.is_dir()):
        raise BadTrace(f"{root}: no such folder; expected a trace, a folder with manifest.json")
    partial = "manifest.json" not in sizes
    file = root / ("journal.jsonl" if partial else "manifest.json")
    if partial:
        if "run.json" in sizes:
            raise BadTrace(f"{root}: a run, and no trace; kvsim show {root} says what is in it")
        if "journal.jsonl" not in sizes:
            raise BadTrace(f"{root}: not a trace: it has neither manifest.json nor journal.jsonl")
        if not allow_partial:
            raise BadTrace(
                f"{root}: manifest.json is missing, so the capture did not complete and the trace is partial; capture again, "
                "or read its closed segments with allow_partial=True"
            )
    raw = file.read_bytes()
    manifest: dict[str, Any] = {"schema": TRACE_SCHEMA, "status": "partial"}
    manifest = manifest | {"files": read_journal(file, raw)} if partial else _manifest(file, raw)
    home = root.resolve() if isinstance(root, Path) else None
    for name, entry in manifest["files"].items():
        _check_file(root, home, name, entry, "journal" if partial else "manifest", sizes)
    return Listing(root, manifest, hashlib.sha256(raw).hexdigest(), partial)


def open_folder(listing: Listing) -> Folder:
    """The footers of the files listed. Raises BadTrace."""
    root, manifest, partial, files = listing.root, listing.manifest, listing.partial, listing.manifest["files"]
    segments: dict[Key, list[Segment]] = {}
    for name in files if partial else sorted(files):
        if match := TABLE.fullmatch(name):
            one, table, request, layer = match.groups()
            key = (one, -1, -1) if one else (table, int(request), int(layer))
            segments.setdefault(key, []).append(segment_of(name, root / name, files[name]))
    for table in ("requests", "layers"):
        if (table, -1, -1) not in segments:
            raise BadTrace(f"{root}: the table {table} is missing: no {table}/part-*.parquet is listed; {AGAIN}")
    if partial:
        manifest = draft_of(segments["layers", -1, -1][0]) | manifest
    return Folder(root, manifest, listing.sha256, partial, {k: tuple(s) for k, s in segments.items()})


def _manifest(file: Path | S3Path, raw: bytes) -> dict[str, Any]:
    try:
        manifest = from_json(raw)
    except ValueError as e:
        raise BadTrace(f"{file}: not JSON ({e}): the file was altered; {AGAIN}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise BadTrace(f"{file}: expected an object with schema, kind, status, dtype and files; {AGAIN}")
    schema = manifest.get("schema")
    if schema != TRACE_SCHEMA and not str(schema).startswith(f"{TRACE_SCHEMA}."):
        raise BadTrace(
            f"{file}: schema is {schema!r}; this kvsim reads {TRACE_SCHEMA!r}: convert the trace or use another version of kvsim"
        )
    for name, expected in (
        ("kind", ("attention",)),
        ("status", ("complete",)),
        ("byte_order", ("little",)),
        ("dtype", tuple(RAW)),
    ):
        if manifest.get(name) not in expected:
            raise BadTrace(f"{file}: {name} is {manifest.get(name)!r}; expected {' or '.join(map(repr, expected))}")
    return manifest


def read_journal(file: Path | S3Path, raw: bytes) -> dict[str, Any]:
    """path -> {bytes, sha256, rows}; a last line without its end was being written when the capture was killed."""
    files = {}
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            entry = from_json(line)
            files[str(entry["path"])] = entry
        except (ValueError, KeyError, TypeError):
            raise BadTrace(
                f"{file}: line {number} is not a segment (path, bytes, sha256, rows): the journal was altered; capture again"
            ) from None
    return files


def draft_of(layers: Segment) -> dict[str, Any]:
    draft = (layers.footer.metadata or {}).get(DRAFT, b"{}")
    with _parquet(layers):
        manifest = dict(from_json(draft))
    if manifest.get("dtype", "float16") not in RAW:
        raise BadTrace(f"{layers}: dtype is {manifest['dtype']!r}; expected {' or '.join(map(repr, RAW))}")
    return manifest


def _check_file(root: Path | S3Path, home: Path | None, name: str, entry: Any, lister: str, sizes: dict[str, int]) -> None:
    """A listed path leads to a file inside the trace, of the listed size. home: where the trace's folder really is; sizes: of all objects,
    on object storage."""
    path = root / name
    strange = name.startswith("/") or "\0" in name or ".." in re.split(r"[/\\]", name)
    try:
        if strange or (home and isinstance(path, Path) and not path.resolve().is_relative_to(home)):
            raise BadTrace(f"{root}: the {lister} lists {name!r}, which leaves the trace's folder; list paths inside it")
        size = sizes.get(name) if not isinstance(path, Path) else path.stat().st_size if path.is_file() else None
    except (OSError, RuntimeError) as e:  # a name that is too long, links in a circle
        raise BadTrace(
            f"{root}: the {lister} lists {name!r}: {getattr(e, 'strerror', None) or e}; list paths inside it"
        ) from None
    if size is None:
        raise BadTrace(f"{path}: the {lister} lists it and it is missing; {AGAIN}")
    listed = entry.get("bytes") if isinstance(entry, dict) else None
    if size != listed:
        what = "truncated" if isinstance(listed, int) and size < listed else "altered"
        raise BadTrace(f"{path}: {size} bytes, the {lister} says {listed}: the file is {what}; {AGAIN}")


def segment_of(name: str, path: Path | S3Path, entry: dict[str, Any]) -> Segment:
    with _parquet(path):
        footer = pq.read_metadata(path, memory_map=True) if isinstance(path, Path) else _footer(path, entry["bytes"])
    rows = sum(footer.row_group(g).num_rows for g in range(footer.num_row_groups))
    if not rows == footer.num_rows == entry.get("rows", rows):
        listed = f"listed as {entry.get('rows')}"
        raise BadTrace(f"{path}: {footer.num_rows} rows, {rows} in its row groups, {listed}: the file was altered; {AGAIN}")
    return Segment(name, path, footer, entry["bytes"])


def _footer(path: S3Path, size: int) -> pq.FileMetaData:
    """From the end of an object, which says how long its footer is: no more than that is read."""
    end = path.read_range(max(0, size - FOOTER), min(size, FOOTER))
    length = int.from_bytes(end[-8:-4], "little") + 8
    if len(end) < length <= size:
        end = path.read_range(size - length, length)
    return pq.read_metadata(pa.BufferReader(end))


@contextmanager
def _parquet(where: object) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError) as e:  # pyarrow raises all of these on altered files
        raise BadTrace(f"{where}: cannot be read as Parquet ({in_a_line(e)}): the file was altered; {AGAIN}") from None


@contextmanager
def _reading(segment: Segment) -> Iterator[pq.ParquetFile]:
    file = segment.file
    source, mapped = (file, True) if isinstance(file, Path) else (file.reader(segment.size), False)
    with _parquet(segment), pq.ParquetFile(source, metadata=segment.footer, memory_map=mapped) as f:
        yield f


# ------------------------------------------------------------------------------------------------ columns
def check_columns(segment: Segment, schema: pa.Schema) -> None:
    """Every required column of `schema` is there and each has its type; unknown columns are ignored. Raises BadTrace."""
    columns = segment.columns
    for f in schema:
        if f.name not in columns:
            if not f.nullable:
                raise BadTrace(f"{segment}: the column {f.name!r} is missing; expected {f.type}")
        elif not _same(columns[f.name], f.type):
            raise BadTrace(f"{segment}: the column {f.name!r} is {columns[f.name]}; expected {f.type}")


def _same(a: pa.DataType, b: pa.DataType) -> bool:
    """Equal types, whatever the offsets' width, the children's names or whether they may be null."""
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        return {f.name for f in b} <= {f.name for f in a} and all(_same(a.field(f.name).type, f.type) for f in b)
    if pa.types.is_list(b):
        return (pa.types.is_list(a) or pa.types.is_large_list(a)) and _same(a.value_type, b.value_type)
    return bool(a == b or (pa.types.is_large_string(a) and pa.types.is_string(b)))


def read_rows(segments: Sequence[Segment], schema: pa.Schema) -> list[dict[str, Any]]:
    """A small table as Python rows, missing optional columns as None, lists of whole numbers as arrays. Raises BadTrace."""
    rows: list[dict[str, Any]] = []
    for s in segments:
        check_columns(s, schema)
        long = [n for n in schema.names if n in s.columns and _holds_integers(s.columns[n])]
        with _reading(s) as f:
            table = f.read(columns=[n for n in schema.names if n in s.columns], use_threads=False)
            found = table.drop_columns(long).to_pylist()
        arrays = {n: [_array(s, n, x) for x in table[n]] for n in long}
        for i, row in enumerate(found):
            row |= {n: each[i] for n, each in arrays.items()}
            for column in schema:
                if row.setdefault(column.name, None) is None and not column.nullable:
                    raise BadTrace(f"{s}: row {i}: {column.name} is null; expected {column.type}")
        rows += found
    return rows


def _holds_integers(kind: pa.DataType) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type)


def _array(segment: Segment, column: str, numbers: pa.ListScalar) -> Raw | None:
    if not numbers.is_valid:
        return None
    if numbers.values.null_count:
        raise BadTrace(f"{segment}: {column} has {numbers.values.null_count} nulls among its numbers; expected none")
    return numbers.values.to_numpy()


def read_columns(segment: Segment, names: Sequence[str]) -> list[Raw]:
    """Small columns of one file as numpy arrays. Raises BadTrace."""
    with _reading(segment) as f:
        table = f.read(columns=list(names), use_threads=False)
    if table.num_rows != segment.rows:
        raise BadTrace(f"{segment}: {table.num_rows} rows where the footer says {segment.rows}: the file was altered; {AGAIN}")
    for name in names:
        if table[name].null_count and name != "lse":
            raise BadTrace(f"{segment}: the column {name!r} has {table[name].null_count} nulls; expected none")
    with _parquet(segment):  # a text may not be one
        return [table[name].to_numpy() for name in names]


def vectors(segment: Segment, group: int, column: str, dtype: str) -> Raw:
    """A row group of a vector column, [rows, d]; a view of the mapped file where its bits lie there plainly. Raises BadTrace."""
    width = segment.byte_width(column)
    rows, raw = segment.footer.row_group(group).num_rows, RAW[dtype]
    if not rows:
        return np.empty((0, width // raw.itemsize), raw)
    offset = plain_offset(segment, group, column)
    if offset is not None:
        values = np.frombuffer(mapped(segment), raw, rows * width // raw.itemsize, offset)
        return values.reshape(rows, -1)
    with _reading(segment) as f:
        array = f.read_row_group(group, columns=[column], use_threads=False)[column].combine_chunks()
    if array.null_count or len(array) != rows:
        found = f"{len(array)} values, {array.null_count} of them null"
        raise BadTrace(f"{segment}: the column {column!r} has {found} in row group {group}; expected {rows} and no null")
    values = np.frombuffer(array.buffers()[1], raw, rows * width // raw.itemsize, array.offset * width)
    return values.reshape(rows, -1)


def mapped(segment: Segment) -> mmap.mmap:
    assert isinstance(segment.file, Path)
    with segment.file.open("rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def plain_offset(segment: Segment, group: int, column: str) -> int | None:
    """Where in the file the values of a row group lie one after the other, or None when they have to be decoded.

    That is so for an uncompressed chunk of one PLAIN page of a column without nulls: its values end the chunk. The page's size is
    the second field of its header (Thrift compact protocol, https://parquet.apache.org/docs/file-format/data-pages/)."""
    chunk, described = segment.chunk(group, column)
    if not isinstance(segment.file, Path):
        return None
    if described.max_definition_level or chunk.has_dictionary_page or not set(chunk.encodings) <= {"PLAIN", "RLE", "BIT_PACKED"}:
        return None
    values, start = chunk.num_values * segment.byte_width(column), chunk.data_page_offset
    end = start + chunk.total_compressed_size
    if not 0 < start < end <= segment.file.stat().st_size:
        return None
    with segment.file.open("rb") as f:
        f.seek(start)
        head = f.read(16)
    if head[:3] != b"\x15\x00\x15" or _zigzag(head[3:]) != values:
        return None
    with _reading(segment) as f:  # refuses a codec that does not exist, whose name pyarrow ends the process for
        next(f.iter_batches(1, row_groups=[group], columns=[column], use_threads=False), None)
    return end - values if chunk.compression == "UNCOMPRESSED" else None


def _zigzag(data: bytes) -> int:
    """The signed number that starts `data`: seven bits a byte, the sign in the lowest bit."""
    n = 0
    for i, byte in enumerate(data):
        n |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            break
    return n >> 1 ^ -(n & 1)
