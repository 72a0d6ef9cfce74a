"""Nsight Compute's `--csv`: the long form (a metric a row; 2023 and 2025 columns) and `--page raw` (a metric a column).

Columns are read by name. Rows are ragged: those of rules have more cells than those of metrics. The profiler's own lines (`==PROF==`) and
the program's output may stand anywhere. Durations are of caches that were flushed and of locked clocks, unless told otherwise."""

from __future__ import annotations

import csv
import re
from typing import Any

from kvsim.cost.classes import symbol
from kvsim.cost.numbers import microseconds, number, scaled
from kvsim.cost.readers.found import Found, Told
from kvsim.errors import BadProfile

Metrics = dict[tuple[str, str], list[tuple[str, str, str]]]  # (section, metric) -> [(unit, value, where)]
RAW = "raw"
SECOND = re.compile("combine|reduce")  # the other launch of split-KV: its reads are not those of the cache


def knows(head: str) -> bool:
    """Whether the beginning of a file is this format's."""
    return ('"Kernel Name"' in head and '"ID"' in head) or head.lstrip().startswith(("==PROF==", "==ERROR==", "==WARNING=="))


def read(text: str, told: Told) -> Found:
    """Raises BadProfile when there is no table, or a number or unit that is needed does not parse."""
    found = Found()
    lines = list(csv.reader(text.splitlines()))
    start = next((i for i, cells in enumerate(lines) if cells and cells[0] == "ID" and "Kernel Name" in cells), None)
    if start is None:
        raise BadProfile(
            f"{told.label}: no row that begins with ID, so no table; the profiler's own lines say why (profile again with --csv)"
        )
    header = lines[start]
    launches: dict[str, tuple[str, Metrics]] = {}
    found.left_out["line of the profiler or the program"] += sum(bool(cells) for cells in lines[:start])
    long = "Metric Name" in header
    for i, cells in enumerate(lines[start + 1 :], start + 2):
        if not cells or not cells[0].isdigit() or len(cells) <= header.index("Kernel Name"):
            units = not long and i == start + 2 and cells and not cells[0]
            found.left_out["line of the profiler or the program"] += bool(cells) and not units
            continue
        row = dict(zip(header, cells, strict=False))
        name, metrics = launches.setdefault(cells[0], (row["Kernel Name"], {}))
        where = f"{told.label}, row {i}"
        if long:
            key = (row.get("Section Name", ""), row.get("Metric Name", ""))
            metrics.setdefault(key, []).append(
                (row.get("Metric Unit", ""), row.get("Metric Value", ""), f"{where}, column Metric Value")
            )
        else:
            units_row = dict(zip(header, lines[start + 1], strict=False))
            for column, value in row.items():
                metrics.setdefault((RAW, column), []).append((units_row.get(column, ""), value, f"{where}, column {column}"))
    for launch, (name, metrics) in launches.items():
        _add(found, name, metrics, launch, told)
    return found


def _add(found: Found, name: str, metrics: Metrics, launch: str, told: Told) -> None:
    times = _times(metrics)
    if not times:
        found.left_out["launch without a duration"] += 1
        return
    cls = found.add(name, times[0], told.rules)
    if cls is None:
        return
    moved = _dram(metrics)
    row: dict[str, Any] = told.shape() | {
        "class": cls,
        "variant": symbol(name),
        "t_us": times[0],
        "n": 1,
        "source": f"{told.label}:{launch}",
    }
    row |= {"cache": told.cache or "cold", "bytes_measured": None if moved is None else round(moved)}
    if cls == "dense_attn" and not SECOND.search(name):
        row |= {"bytes": told.layer_bytes()}
    if times[0] <= 0:
        row["status"] = "impossible"
    elif max(times) > 1.05 * min(times):
        row["status"] = "conflicting"
    found.rows.append(row)


def _times(metrics: Metrics) -> list[float]:
    """Every duration the launch states, microseconds: the first is the one to believe."""
    times = [_time(cell) for cell in _named(metrics, "gpu__time_duration.sum")]
    times += [_time(cell) for cell in metrics.get(("GPU Speed Of Light Throughput", "Duration"), [])]
    if not any(t is not None for t in times):
        cycles = [_rated(cell, "cycle") for cell in _named(metrics, "sm__cycles_elapsed.avg")]
        clock = [_per_second(cell) for cell in _named(metrics, "sm__cycles_elapsed.avg.per_second")]
        times = [c / hz * 1e6 for c, hz in zip(cycles, clock, strict=False) if c is not None and hz]
    return [t for t in times if t is not None]


def _dram(metrics: Metrics) -> float | None:
    """Bytes between L2 and memory: both directions, or their sum."""
    for names in (["dram__bytes.sum"], ["dram__bytes_read.sum", "dram__bytes_write.sum"]):
        cells = [_named(metrics, n) for n in names]
        values = [_rated(c[0], "byte") for c in cells if c]
        if len(values) == len(names) and None not in values:
            return sum(v for v in values if v is not None)
    return None


def _named(metrics: Metrics, name: str) -> list[tuple[str, str, str]]:
    """A metric whatever its section: full names mean one thing, friendly ones such as `Memory Throughput` several."""
    return [cell for (_, metric), cells in metrics.items() if metric == name for cell in cells]


def _time(cell: tuple[str, str, str]) -> float | None:
    unit, text, where = cell
    value = number(text, where)
    return None if value is None else microseconds(value, unit, where)


def _rated(cell: tuple[str, str, str], base: str) -> float | None:
    unit, text, where = cell
    value = number(text, where)
    return None if value is None else scaled(value, unit or base, base, where)


def _per_second(cell: tuple[str, str, str]) -> float | None:
    """`1.29 cycle/nsecond` and `1.29 Gcycle/second` -> 1.29e9."""
    unit, text, where = cell
    counted, _, time = unit.partition("/")
    value = _rated((counted, text, where), "cycle")
    return None if value is None else value * 1e6 / microseconds(1.0, time, where)
