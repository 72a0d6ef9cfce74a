"""A replay: policies over a trace, task by task, into a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvsim.errors import KvsimError, WrongUse
from kvsim.places import place
from kvsim.replay.asked import AnyPolicy, about, resolve
from kvsim.replay.folder import complete, draft, partial
from kvsim.replay.memory import Lot, at_once, workers_of
from kvsim.replay.needs import check_needs
from kvsim.replay.neighbours import Reuse
from kvsim.replay.parts import finished
from kvsim.replay.pool import do_all
from kvsim.replay.result import Run
from kvsim.replay.share import shared_limits
from kvsim.replay.supervise import Failures
from kvsim.replay.work import Work
from kvsim.trace.open import Trace, open_trace

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

__all__ = ["Run", "replay"]


def replay(
    trace: Trace | str | Path,
    policies: AnyPolicy | Iterable[AnyPolicy],
    out: str | Path | None = None,
    *,
    layers: Iterable[int] | None = None,
    requests: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    workers: int | None = None,
    memory: int | str | None = None,
    plans: bool = False,
    explain: bool = False,
    baselines: bool = False,
    kv_dtype: str | None = None,
    allocator: str = "head",
    strict: bool = False,
    progress: Callable[[int, int], None] = lambda done, tasks: None,
    also: Callable[[Path], None] = lambda folder: None,
) -> Run:
    """Replays policies on a trace into the new directory `out` (None: a temporary one that the Run owns).

    plans: the pages read, too; explain: counterfactuals beside every step, too; also: called with the folder before it gets its name.

    The tables do not depend on workers, memory or strict. A replay that was interrupted goes on where it stopped when it is
    repeated. A policy given twice is replayed once. Raises WrongUse for what cannot be carried out as asked, BadTrace for a
    trace that is not what its format says, BrokenLaw (strict) for a table that cannot be true, KvsimError for a task that failed."""
    owned = TemporaryDirectory(prefix="kvsim-") if out is None else None
    target = Path(owned.name) / "run" if owned else place(out or "")
    if (target.exists() if isinstance(target, Path) else complete(target)) or not target.name:
        raise WrongUse(f"{target}: exists already, and a run is never overwritten; choose another -o, or remove it")
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    asked = resolve(
        opened,
        policies,
        layers=layers,
        requests=requests,
        steps=steps,
        plans=plans,
        explain=explain,
        baselines=baselines,
        kv_dtype=kv_dtype,
        allocator=allocator,
    )
    check_needs(opened, asked)
    tasks = asked.tasks
    with draft(target, about(opened, asked, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))) as mine:
        done = finished(mine.parts, tasks)
        left = [t for t in tasks if t not in set(done)]
        lot = Lot(opened, asked, left)
        many, some = workers_of([lot], workers, memory), at_once(lot, memory)
        work = Work(opened, asked, mine.parts, strict, shared_limits(opened, asked, mine.path / "limits.json"), some)
        if strict:
            for task in done:
                work.check(task)
        count = iter(range(len(done) + 1, len(tasks) + 1))
        progress(len(done), len(tasks))
        failures = do_all(work, left, many, lambda: progress(next(count), len(tasks)))
        if failures:
            raise _told(failures, len(tasks), target)
        again = Reuse(opened, asked, mine.parts)
        failures = do_all(again, again.left(), many, lambda: None)
        if failures:
            raise _told(failures, len(tasks), target)
        mine.finish(tasks, asked.ids, also)
    return Run(target, owned)


def _told(failures: Failures, tasks: int, out: Path | S3Path) -> KvsimError:
    """One error for all that failed, of the first one's kind."""
    first = failures[0][1]
    kept = tasks - len(failures)
    more = f" (and {len(failures) - 1} more of {tasks} tasks failed)" if len(failures) > 1 else ""
    note = f"; the {kept} finished tasks are kept in {partial(out)}, repeat the replay to go on" if kept else ""
    error = type(first)(f"{first}{more}{note}")
    error.__cause__ = first.__cause__ or first
    return error
