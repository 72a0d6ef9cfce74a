"""What commands print: results to stdout, progress and complaints to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

EVERY = 30.0  # seconds between two lines of progress


def complain(line: str) -> None:
    print(f"kvsim: {' '.join(line.split())}", file=sys.stderr)


def print_json(found: Any) -> None:
    print(json.dumps(found, indent=1, ensure_ascii=False))


def print_plain(found: dict[str, Any], indent: str = "") -> None:
    """Plain data as lines: one per entry, rows of a table one per row."""
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{indent}{key}{'' if value else ': none'}")
            print_plain(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"{indent}{key}")
            for row in value:
                print(f"{indent}  " + "  ".join(f"{k} {v}" for k, v in row.items() if v not in (None, [])))
        else:
            print(f"{indent}{key:16} {'—' if value is None else value}")


def load_files(files: Sequence[str]) -> None:
    from kvsim.policies.language import load_file

    for file in files:
        load_file(file)


@contextmanager
def progress_bar(what: str = "replay") -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr when a person is looking; of a sweep, else, a line now and then."""
    if not sys.stderr.isatty():
        yield _lines() if what == "sweep" else lambda done, tasks: None
        return
    from kvsim.kernels import compiled

    if not compiled():
        complain("kernels are compiled first, once: later runs start at once")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, tasks: bar.update(task, completed=done, total=tasks)


def _lines() -> Callable[[int, int], None]:
    from time import monotonic

    from kvsim.replay.estimate import duration

    begun: list[tuple[float, int]] = []  # the time and count of the start, and of the last line

    def tick(done: int, tasks: int) -> None:
        now = monotonic()
        if not begun:
            begun.extend([(now, done)] * 2)
        elif now - begun[1][0] >= EVERY and done < tasks:
            rest = (now - begun[0][0]) / (done - begun[0][1]) * (tasks - done)
            begun[1] = now, done
            complain(f"{done} of {tasks} layers done, about {duration(rest)} left")

    return tick
