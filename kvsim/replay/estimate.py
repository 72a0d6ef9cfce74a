"""What a sweep will take, said before it starts: tasks, time, memory of a worker, bytes of its tables.

Time and size are orders of magnitude: a policy costs more or less than another, and tables compress more or less."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsim.geometry import Layer, Request
from kvsim.replay.memory import Lot, at_once

# CPU seconds for a logit of one policy, and bytes of a query head's row in all tables: between 4e-8 and 2e-7, and 115 and 270, for the
# policies of the demo and long contexts on one core of 2026.
LOGIT = 1e-7
ROW = 200
USED = 0.8  # of the memory that is free


@dataclass(frozen=True)
class Estimate:
    """runs, tasks: layers of requests; seconds: of all workers together; task_bytes: memory of the largest task."""

    runs: int
    tasks: int
    policies: int
    workers: int
    seconds: float
    task_bytes: int
    table_bytes: int

    def __str__(self) -> str:
        what = f"{_many(self.policies, 'policy', 'policies')} on {_many(self.tasks, 'layer')} of {_many(self.runs, 'trace')}"
        return (
            f"{what}, {_many(self.workers, 'worker')}: about {duration(self.seconds)}, {self.task_bytes / 2**30:.1f} GiB a worker at "
            f"most, {size(self.table_bytes)} of tables"
        )


def estimate(lots: Sequence[Lot], workers: int, memory: int | str | None) -> Estimate:
    """Of the tasks of some traces. Raises WrongUse when they cannot be had in this memory."""
    lots = [lot for lot in lots if lot.tasks]
    work = [(lot, r, x) for lot in lots for r, x in lot.units()]
    logits = sum((r.total - r.prompt) * r.total * x.q_heads * len(lot.asked.entries) for lot, r, x in work)
    rows = sum(_steps(lot, r, x) * x.q_heads * len(lot.asked.entries) for lot, r, x in work)
    return Estimate(
        runs=len(lots),
        tasks=len(work),
        policies=max((len(lot.asked.entries) for lot in lots), default=0),
        workers=workers,
        seconds=logits * LOGIT / workers,
        task_bytes=max((lot.largest(at_once(lot, memory))[0] for lot in lots), default=0),
        table_bytes=rows * ROW,
    )


def _steps(lot: Lot, r: Request, layer: Layer) -> int:
    """How many are written."""
    captured = lot.asked.supplies[r.id, layer.id].steps
    return len(captured) if lot.asked.steps is None else sum(int(step) in set(lot.asked.steps) for step in captured)


def available() -> int | None:
    """Bytes that processes may take now: of the memory that is free, and of what a container has left; None where nobody says."""
    found = [n for n in (_free(), _contained()) if n is not None]
    return int(min(found) * USED) if found else None


def _free() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _contained() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or "max": no limit
        return None


def duration(seconds: float) -> str:
    """90 -> "2 min": two units are never needed."""
    for unit, length in (("day", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}{'s' if unit == 'day' else ''}"
    return f"{max(1, seconds):.0f} s"


def size(many: float) -> str:
    for unit, n in (("GiB", 30), ("MiB", 20)):
        if many >= 2**n:
            return f"{many / 2**n:.1f} {unit}"
    return f"{many / 2**10:.0f} KiB"


def _many(n: int, one: str, more: str = "") -> str:
    return f"{n:,} {one if n == 1 else more or one + 's'}"
