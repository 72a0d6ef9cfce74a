"""Nsight Systems: the `cuda_gpu_kern_sum` CSV, and the SQLite export.

The CSV has no shapes: batch and context must be told. In SQLite a table is absent when nothing was recorded, text may be no UTF-8, and
the tables about the system hold user names, hosts and paths: only kernels, copies and the GPU's figures are read."""

from __future__ import annotations

import csv
import re
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from kvsim.cost.classes import symbol
from kvsim.cost.numbers import microseconds, number
from kvsim.cost.readers.found import Found, Told
from kvsim.errors import BadProfile

SQLITE = b"SQLite format 3\x00"
COPIES = {1: "host_fetch", 2: "tier_move"}  # CUPTI's copyKind: host to device, device to host


def knows(head: str) -> bool:
    """Whether the beginning of a file is the CSV's."""
    return "Total Time (" in head and "Instances" in head


def read(text: str, told: Told) -> Found:
    """The kernel summary. Raises BadProfile for a missing column, or a number or unit that does not parse."""
    found = Found()
    lines = list(csv.reader(text.splitlines()))
    start = next((i for i, cells in enumerate(lines) if any(c.startswith("Total Time (") for c in cells)), None)
    if start is None:
        raise BadProfile(f"{told.label}: no column Total Time; expected the report cuda_gpu_kern_sum as CSV")
    header = lines[start]
    if missing := [c for c in ("Instances", "Name") if c not in header]:
        raise BadProfile(f"{told.label}, row {start + 1}: no column {missing[0]}; expected the report cuda_gpu_kern_sum")
    total = next(c for c in header if c.startswith("Total Time ("))
    unit = re.sub(r".*\((.*)\)", r"\1", total)
    found.left_out["line of the profiler"] += sum(bool(cells) for cells in lines[:start])
    for i, cells in enumerate(lines[start + 1 :], start + 2):
        if len(cells) != len(header):
            found.left_out["line of the profiler"] += bool(cells)
            continue
        row, where = dict(zip(header, cells, strict=True)), f"{told.label}, row {i}"
        time, n = number(row[total], f"{where}, column {total}"), number(row["Instances"], f"{where}, column Instances")
        if time is None or not n:
            found.left_out["kernel without a time"] += 1
            continue
        t_us = microseconds(time, unit, f"{where}, column {total}")
        if cls := found.add(row["Name"], t_us, told.rules):
            found.rows.append(_row(cls, row["Name"], t_us, int(n), f"{told.label}:{i}", told))
    found.notes.append("a kernel summary has no shapes: bytes stay empty")
    return found


def _row(cls: str, name: str, t_us: float, n: int, source: str, told: Told) -> dict[str, Any]:
    row = told.shape() | {"class": cls, "variant": symbol(name), "t_us": t_us, "n": n, "source": source}
    return row | ({"status": "impossible"} if t_us <= 0 else {})


def read_sqlite(path: Path, told: Told) -> Found:
    """Kernels by name and copies by size. Raises BadProfile when the file is no readable export."""
    found = Found()
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            db.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            _facts(db, tables, found)
            _kernels(db, tables, found, told)
            _copies(db, tables, found, told)
    except (sqlite3.Error, UnicodeDecodeError) as e:  # the second from within a complaint of the first kind
        raise BadProfile(f"{told.label}: not a readable Nsight Systems export ({e})") from None
    return found


def _facts(db: sqlite3.Connection, tables: set[str], found: Found) -> None:
    wanted = {
        "name": "name",
        "memoryBandwidth": "bandwidth_bytes_s",
        "l2CacheSize": "l2_bytes",
        "totalMemory": "memory_bytes",
        "smCount": "processors",
    }
    if "TARGET_INFO_GPU" in tables:
        there = {row[1] for row in db.execute("PRAGMA table_info(TARGET_INFO_GPU)")}
        columns = [c for c in wanted if c in there]
        for values in db.execute(f"SELECT {', '.join(columns)} FROM TARGET_INFO_GPU LIMIT 1"):
            found.facts = {wanted[c]: v for c, v in zip(columns, values, strict=True)}


def _kernels(db: sqlite3.Connection, tables: set[str], found: Found, told: Told) -> None:
    if "CUPTI_ACTIVITY_KIND_KERNEL" not in tables or "StringIds" not in tables:
        found.notes.append("no kernel table: nothing ran on the GPU while it was recorded, or --trace=cuda was not given")
        return
    query = "SELECT s.value, k.start, k.end FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN StringIds s ON s.id = k.demangledName ORDER BY k.start"
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, start, end in db.execute(query):
        if not (isinstance(start, int | float) and isinstance(end, int | float) and start < end):
            found.left_out["kernel that ends before it starts, or has no times"] += 1
        else:
            spans[name or "?"].append((start / 1e3, end / 1e3))
    for name, ran in spans.items():
        t_us = union(ran)
        if cls := found.add(name, t_us, told.rules):
            found.rows.append(_row(cls, name, t_us, len(ran), f"{told.label}:{symbol(name)}", told))


def _copies(db: sqlite3.Connection, tables: set[str], found: Found, told: Told) -> None:
    if "CUPTI_ACTIVITY_KIND_MEMCPY" not in tables:
        return
    query = "SELECT copyKind, bytes, COUNT(*), SUM(end - start) FROM CUPTI_ACTIVITY_KIND_MEMCPY GROUP BY 1, 2 ORDER BY 1, 2"
    for kind, size, n, time in db.execute(query):
        if kind not in COPIES or not isinstance(size, int) or size <= 0 or not isinstance(time, int | float) or time <= 0:
            found.left_out["copy of another kind, or of nothing"] += n
            continue
        row = {"class": COPIES[kind], "variant": "memcpy", "bytes": size * n, "t_us": time / 1e3, "n": n, "cache": "unknown"}
        found.rows.append(row | {"source": f"{told.label}:memcpy {size}"})


def union(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one of the spans (sorted by start) runs: kernels of one stream may overlap."""
    whole, last = 0.0, float("-inf")
    for start, end in spans:
        whole += max(0.0, end - max(start, last))
        last = max(last, end)
    return whole
