"""The parts of an unfinished run: a folder for each finished (request, layer), and how they become the tables of the run.

A part is named by its task and by a hash of all that decides what stands in it. It holds one Parquet file per table, the rows of one
policy after those of another, and is there when its receipt is, which is written last: what its files are, with their sha256, and the
noise floor of its outputs where the trace has them. Nothing of it is ever written twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvsim.errors import BadTrace
from kvsim.places import from_json, names_in, write_once
from kvsim.replay.asked import Task
from kvsim.tables import RUN_TABLES

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

ALWAYS = ("ledger", "heads")
MAIN, SECOND = "part", "second"  # receipts: of the pass over the trace, and of one that needs the parts of several layers
ROWS = 1 << 16  # at least so many rows make a row group, while there are more of the same policy

Found = Sequence[Mapping[str, pa.Table]]  # of every policy, its tables that have rows


@dataclass(frozen=True)
class Parts:
    """Where the parts of a run lie; `key`: the hash of what they all depend on (trace, policies, options, version)."""

    root: Path | S3Path
    key: str

    def folder(self, task: Task) -> Path | S3Path:
        return self.root / self.name(task)

    def name(self, task: Task) -> str:
        return f"request={task[0]},layer={task[1]},{self.key[:16]}"


def write_part(
    parts: Parts, task: Task, batches: Iterable[Found], floor: Mapping[str, float] | None = None, receipt: str = MAIN
) -> None:
    """Tables of the policies, some policies at a time -> a part that appears whole or not at all."""
    tables: dict[str, _Table] = {}
    before = 0
    for batch in batches:
        for name in RUN_TABLES:
            if any(name in by_name for by_name in batch):
                tables.setdefault(name, _Table(name)).add([by_name.get(name) for by_name in batch], before)
        before += len(batch)
    told: dict[str, Any] = {"tables": {}}
    for name, table in tables.items():
        content, rows = table.close(before)
        write_once(parts.folder(task) / f"{name}.parquet", content)
        told["tables"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "rows": rows}
    if floor:
        told["noise_floor"] = dict(floor)
    write_once(parts.folder(task) / f"{receipt}.json", json.dumps(told | {"sha256": _hash(told)}).encode())


class _Table:
    """A Parquet file in memory, with a checksum on every page: one row group for each batch of policies."""

    def __init__(self, name: str) -> None:
        self.sink = pa.BufferOutputStream()
        self.rows: list[int] = []
        self.writer = pq.ParquetWriter(self.sink, RUN_TABLES[name], compression="zstd", write_page_checksum=True)

    def add(self, found: Sequence[pa.Table | None], before: int) -> None:
        """before: how many policies came before these, whether or not they had rows."""
        self.rows += [0] * (before - len(self.rows)) + [0 if rows is None else rows.num_rows for rows in found]
        whole = pa.concat_tables([rows for rows in found if rows is not None]).unify_dictionaries().combine_chunks()
        self.writer.write_table(whole, row_group_size=max(1, whole.num_rows))

    def close(self, policies: int) -> tuple[bytes, list[int]]:
        self.writer.close()
        return self.sink.getvalue().to_pybytes(), self.rows + [0] * (policies - len(self.rows))


def finished(parts: Parts, tasks: Sequence[Task], receipt: str = MAIN) -> list[Task]:
    """The tasks whose part is there, or what a second pass adds to it."""
    there = names_in(parts.root)
    return [task for task in tasks if f"{parts.name(task)}/{receipt}.json" in there]


def read_table(parts: Parts, task: Task, name: str, receipt: str = MAIN) -> list[pa.Table]:
    """The rows of each policy in one table of a part, without the policy's name; nothing where the part has no such table.

    Raises BadTrace for a part that is not what was written."""
    return _rows(parts.folder(task), name, _receipt(parts, task, receipt))


def read_part(parts: Parts, task: Task) -> list[dict[str, pa.Table]]:
    """Of each policy, its tables that have rows."""
    receipt = _receipt(parts, task)
    by_name = {name: _rows(parts.folder(task), name, receipt) for name in RUN_TABLES if name in receipt["tables"]}
    many = max((len(rows) for rows in by_name.values()), default=0)
    return [{name: rows[place] for name, rows in by_name.items() if rows[place].num_rows} for place in range(many)]


def _receipt(parts: Parts, task: Task, name: str = MAIN) -> dict[str, Any]:
    file = parts.folder(task) / f"{name}.json"
    try:
        found = from_json(file.read_bytes())
        said = found.pop("sha256")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise _altered(file) from None
    if said != _hash(found):
        raise _altered(file)
    return dict(found)


def _hash(receipt: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest()


def _rows(folder: Path | S3Path, name: str, receipt: Mapping[str, Any]) -> list[pa.Table]:
    if name not in receipt["tables"]:
        return []
    told, file = receipt["tables"][name], folder / f"{name}.parquet"
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise _altered(file) from None
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise _altered(file)
    bare = pq.read_table(pa.BufferReader(content), page_checksum_verification=True, use_threads=False).drop_columns(["policy"])
    starts = np.append(0, np.cumsum(told["rows"])).tolist()
    return [bare.slice(start, rows) for start, rows in zip(starts[:-1], told["rows"], strict=True)]


def _altered(file: Path | S3Path) -> BadTrace:
    return BadTrace(f"{file}: cut short or altered; remove {file.parent} and repeat the replay")


def merge(parts: Parts, into: Path, tasks: Sequence[Task], ids: Sequence[str]) -> list[dict[str, Any]]:
    """All parts -> the Parquet tables of a run: by policy as asked, then by task; a table without rows is not written. -> the noise
    floors of the tasks that have one.

    Each table is read once and laid in a scratch file, from where the rows of one policy, which all parts have some of, are gathered; two
    tables at a time, the largest first, because this is all that a sweep does while its workers have nothing left to do."""
    there = names_in(parts.root)
    receipts = [(t, _receipt(parts, t, r)) for t in tasks for r in (MAIN, SECOND) if f"{parts.name(t)}/{r}.json" in there]

    def rows(name: str) -> int:
        return sum(sum(r["tables"][name]["rows"]) for _, r in receipts if name in r["tables"])

    def write(name: str) -> None:
        having = [(task, receipt) for task, receipt in receipts if name in receipt["tables"]]
        if name in ALWAYS or having:
            _write(parts, having, into, name, ids)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, sorted(RUN_TABLES, key=rows, reverse=True)))
    return [{"request": t[0], "layer": t[1]} | r["noise_floor"] for t, r in receipts if "noise_floor" in r]


def _write(parts: Parts, having: Sequence[tuple[Task, Mapping[str, Any]]], into: Path, name: str, ids: Sequence[str]) -> None:
    schema = RUN_TABLES[name]
    tables = (_rows(parts.folder(task), name, receipt) for task, receipt in having)
    with TemporaryDirectory(dir=into, prefix=".") as aside, (into / f"{name}.parquet").open("wb") as f:
        with pq.ParquetWriter(f, schema, compression="zstd") as writer:
            for group in _groups(_laid(tables, Path(aside) / name, _bare(schema)), ids, schema):
                writer.write_table(group, row_group_size=max(1, group.num_rows))
        f.flush()
        os.fsync(f.fileno())


def _laid(tables: Iterable[list[pa.Table]], file: Path, schema: pa.Schema) -> list[list[pa.Table]]:
    """The same tables, mapped from a file."""
    shape = []
    with pa.OSFile(str(file), "wb") as f, pa.ipc.new_file(f, schema) as writer:
        for found in tables:
            for rows in found:
                writer.write_batch(rows.combine_chunks().to_batches()[0] if rows.num_rows else _nothing(schema))
            shape.append(len(found))
    with pa.memory_map(str(file)) as f:
        mapped = pa.ipc.open_file(f)
        batches = iter([pa.Table.from_batches([mapped.get_batch(i)]) for i in range(mapped.num_record_batches)])
    return [[next(batches) for _ in range(many)] for many in shape]


def _groups(tables: list[list[pa.Table]], ids: Sequence[str], schema: pa.Schema) -> Iterator[pa.Table]:
    """Row groups: the rows of one policy, cut between tasks."""
    for place in range(len(ids)):
        waiting: list[pa.Table] = []
        for found in tables:
            waiting.append(found[place])
            if sum(t.num_rows for t in waiting) >= ROWS:
                yield _named(pa.concat_tables(waiting), place, ids, schema)
                waiting = []
        if sum(t.num_rows for t in waiting):
            yield _named(pa.concat_tables(waiting), place, ids, schema)


def _named(rows: pa.Table, place: int, ids: Sequence[str], schema: pa.Schema) -> pa.Table:
    policy = pa.DictionaryArray.from_arrays(np.full(rows.num_rows, place, np.int32), pa.array(ids, pa.string()))
    return rows.combine_chunks().add_column(schema.get_field_index("policy"), schema.field("policy"), policy)


def _bare(schema: pa.Schema) -> pa.Schema:
    return schema.remove(schema.get_field_index("policy"))


def _nothing(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
