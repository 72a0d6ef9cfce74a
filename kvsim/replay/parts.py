"""The parts of an unfinished run: a folder for each finished (request, layer), and how they become the tables of the run.

A part holds one Arrow file per table with one batch per policy, without the policy's name: it is written once, by its place. Beside
them is the noise floor of its outputs, where the trace has them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvsim.errors import BadTrace
from kvsim.replay.asked import Task
from kvsim.tables import RUN_TABLES

ALWAYS = ("ledger", "heads")
FLOOR = "floor.json"
ROWS = 1 << 16  # at least so many rows make a row group, while there are more of the same policy


def write_part(parts: Path, task: Task, found: Sequence[dict[str, pa.Table]], floor: Mapping[str, float] | None = None) -> None:
    """Tables of every policy -> a folder that appears whole or not at all."""
    aside = parts / f".{folder(task)}.{os.getpid()}"
    aside.mkdir()
    if floor:
        with (aside / FLOOR).open("w", encoding="utf-8") as text:
            json.dump(floor, text)
            text.flush()
            os.fsync(text.fileno())
    for name, schema in RUN_TABLES.items():
        if any(name in by_name for by_name in found):
            _write(
                aside / f"{name}.arrow", schema, [by_name[name] if name in by_name else schema.empty_table() for by_name in found]
            )
    if (parts / folder(task)).exists():
        shutil.rmtree(aside)
    else:
        aside.rename(parts / folder(task))


def add_table(parts: Path, task: Task, name: str, found: Sequence[pa.Table]) -> None:
    """One more table of every policy, into the finished part of a task."""
    aside = parts / f".{folder(task)}.{name}.{os.getpid()}"
    aside.mkdir()
    _write(aside / name, RUN_TABLES[name], found)
    (aside / name).replace(parts / folder(task) / f"{name}.arrow")
    aside.rmdir()


def has_table(parts: Path, task: Task, name: str) -> bool:
    return (parts / folder(task) / f"{name}.arrow").exists()


def _write(file: Path, schema: pa.Schema, found: Sequence[pa.Table]) -> None:
    """One batch per policy, without its name."""
    bare = _bare(schema)
    with file.open("wb") as f, pa.ipc.new_file(f, bare) as writer:
        for table in found:
            rows = table.drop_columns(["policy"]).combine_chunks()
            writer.write_batch(rows.to_batches()[0] if rows.num_rows else _nothing(bare))
        f.flush()
        os.fsync(f.fileno())


def folder(task: Task) -> str:
    return f"request={task[0]},layer={task[1]}"


def finished(parts: Path, tasks: Sequence[Task]) -> list[Task]:
    """The tasks whose part is there; what a killed worker left behind is removed."""
    for left in parts.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)
    return [task for task in tasks if (parts / folder(task)).is_dir()]


def read_part(parts: Path, task: Task, place: int) -> dict[str, pa.Table]:
    """The tables, as far as they have rows, of the policy at `place`."""
    found = {name: _rows(parts, task, name, place) for name in RUN_TABLES}
    return {name: rows for name, rows in found.items() if rows.num_rows}


def _rows(parts: Path, task: Task, name: str, place: int) -> pa.Table:
    file = parts / folder(task) / f"{name}.arrow"
    if not file.exists():
        return _bare(RUN_TABLES[name]).empty_table()
    try:
        with pa.memory_map(str(file)) as f:
            return pa.Table.from_batches([pa.ipc.open_file(f).get_batch(place)])
    except (pa.ArrowInvalid, OSError) as e:
        raise BadTrace(
            f"{file}: cut short or altered ({str(e).splitlines()[0]}); remove {file.parent} and repeat the replay"
        ) from None


def _bare(schema: pa.Schema) -> pa.Schema:
    return schema.remove(schema.get_field_index("policy"))


def floors(parts: Path, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """The noise floors of the tasks that have one."""
    files = {task: parts / folder(task) / FLOOR for task in tasks}
    return [
        {"request": task[0], "layer": task[1]} | json.loads(file.read_text("utf-8"))
        for task, file in files.items()
        if file.is_file()
    ]


def merge(parts: Path, into: Path, tasks: Sequence[Task], ids: Sequence[str]) -> None:
    """All parts -> the Parquet tables of a run: by policy as asked, then by task; a table without rows is not written."""
    for name, schema in RUN_TABLES.items():
        if name not in ALWAYS and not any((parts / folder(task) / f"{name}.arrow").exists() for task in tasks):
            continue
        file = into / f"{name}.parquet"
        with file.open("wb") as f:
            with pq.ParquetWriter(f, schema, compression="zstd") as writer:
                for group in _groups(parts, tasks, ids, name, schema):
                    writer.write_table(group, row_group_size=max(1, group.num_rows))
            f.flush()
            os.fsync(f.fileno())


def _groups(parts: Path, tasks: Sequence[Task], ids: Sequence[str], name: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Row groups: the rows of one policy, cut between tasks."""
    for place in range(len(ids)):
        waiting: list[pa.Table] = []
        for task in tasks:
            waiting.append(_rows(parts, task, name, place))
            if sum(t.num_rows for t in waiting) >= ROWS:
                yield _named(pa.concat_tables(waiting), place, ids, schema)
                waiting = []
        if sum(t.num_rows for t in waiting):
            yield _named(pa.concat_tables(waiting), place, ids, schema)


def _named(rows: pa.Table, place: int, ids: Sequence[str], schema: pa.Schema) -> pa.Table:
    policy = pa.DictionaryArray.from_arrays(np.full(rows.num_rows, place, np.int32), pa.array(ids, pa.string()))
    return rows.combine_chunks().add_column(schema.get_field_index("policy"), schema.field("policy"), policy)


def _nothing(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
