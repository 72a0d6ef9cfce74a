"""Races in one process: CPU time, every thread count pinned to one, rounds interleaved, medians and spreads."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"


@dataclass(frozen=True)
class Entry:
    """run: the work; scale: how many times that work stands for (a peer too slow to run whole runs a part and says so); elsewhere: the work is
    done by another process, and `run` gives the CPU seconds that it took there."""

    name: str
    run: Callable[[], Any]
    scale: float = 1.0
    elsewhere: bool = False


def pinned() -> None:
    """One thread for every library that is loaded."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


def race(entries: list[Entry], rounds: int = 5) -> dict[str, list[float]]:
    """CPU seconds of every entry in every round. Each time it runs once before that, uncounted: what the entry before it gave back to the
    system is dear to ask for again, and virtual machines whose hosts take free memory away make it ten times dearer."""
    pinned()
    gc.freeze()  # to look through all that the race and its peers imported takes as long as three short lanes
    times: dict[str, list[float]] = {e.name: [] for e in entries}
    for _ in range(rounds):
        for e in entries:
            e.run()
            start = time.process_time()
            told = e.run()
            took = told if e.elsewhere else time.process_time() - start
            times[e.name].append(took * e.scale)
    return times


def ratio(times: dict[str, list[float]], peer: str, ours: str) -> tuple[float, float, float]:
    """(median, least, most) of peer / ours, round by round."""
    all_ = [a / b for a, b in zip(times[peer], times[ours], strict=True)]
    return statistics.median(all_), min(all_), max(all_)


def show(times: dict[str, list[float]], ours: str) -> None:
    for name, all_ in times.items():
        middle, low, high = ratio(times, name, ours)
        print(
            f"  {name:58s} {statistics.median(all_) * 1e3:10.1f} ms [{min(all_) * 1e3:.1f} .. {max(all_) * 1e3:.1f}]"
            f"   {middle:7.2f} x [{low:.2f} .. {high:.2f}]"
        )


def machine() -> str:
    import numpy

    with open("/proc/cpuinfo") as f:
        cpu = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.processor())
    return f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, numpy {numpy.__version__}"


def peak_memory(run: Callable[[], object]) -> float:
    """MB that a run needs at its peak above what the process held before it (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before is not ours to use for nothing
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # forget the process's earlier peak
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field + ":"))


GATES: dict[
    str, tuple[float, float | None]
] = {}  # what this process has measured and what was asked, by the words of `gate` or `note`


def gate(text: str, value: float, least: float) -> bool:
    """One line: what was asked, what was measured. -> passed"""
    ok = value >= least
    GATES[text] = value, least
    print(f"  {'ok  ' if ok else 'MISS'} {text}: {value:.2f} (asked: {least:g})")
    return ok


def note(text: str, value: float) -> None:
    """One line of what was measured, where nothing was asked."""
    GATES[text] = value, None
    print(f"       {text}: {value:.2f}")
