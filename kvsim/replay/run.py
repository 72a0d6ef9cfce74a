"""A replay: policies over a trace, task by task, into a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from kvsim.errors import KvsimError, WrongUse
from kvsim.policies.language import Policy, parse_policy
from kvsim.policies.protocol import Chain, Part
from kvsim.replay.asked import ALLOCATORS, Asked, Entry, about, chosen
from kvsim.replay.baselines import with_baselines
from kvsim.replay.folder import Draft, partial
from kvsim.replay.memory import workers_for
from kvsim.replay.needs import check_needs
from kvsim.replay.parts import finished
from kvsim.replay.pool import Failures, do_all
from kvsim.replay.result import Run
from kvsim.replay.work import Work
from kvsim.trace.open import Trace, open_trace

__all__ = ["Run", "replay"]

AnyPolicy = str | Part | Chain | Policy


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
    baselines: bool = False,
    kv_dtype: str | None = None,
    allocator: str = "head",
    strict: bool = False,
    progress: Callable[[int, int], None] = lambda done, tasks: None,
) -> Run:
    """Replays policies on a trace into the new directory `out` (None: a temporary one that the Run owns).

    The tables do not depend on workers, memory or strict. A replay that was interrupted goes on where it stopped when it is
    repeated. A policy given twice is replayed once. Raises WrongUse for what cannot be carried out as asked, BadTrace for a
    trace that is not what its format says, BrokenLaw (strict) for a table that cannot be true, KvsimError for a task that failed."""
    owned = TemporaryDirectory(prefix="kvsim-") if out is None else None
    target = Path(owned.name) / "run" if owned else Path(out or "")
    if target.exists() or not target.name:
        raise WrongUse(f"{target}: exists already, and a run is never overwritten; choose another -o, or remove it")
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    asked = _asked(opened, policies, layers, requests, steps, kv_dtype, allocator, plans, baselines)
    check_needs(opened, asked)
    tasks = asked.tasks
    with Draft(target, about(opened, asked, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))) as draft:
        work = Work(opened, asked, draft.parts, strict)
        done = finished(draft.parts, tasks)
        left = [t for t in tasks if t not in set(done)]
        many = workers_for(opened, asked, left, workers, memory)
        count = iter(range(len(done) + 1, len(tasks) + 1))
        progress(len(done), len(tasks))
        failures = do_all(work, left, many, lambda: progress(next(count), len(tasks)))
        if failures:
            raise _told(failures, len(tasks), target)
        draft.finish(tasks, asked.ids)
    return Run(target, owned)


def _asked(
    trace: Trace,
    policies: AnyPolicy | Iterable[AnyPolicy],
    layers: Iterable[int] | None,
    requests: Iterable[int] | None,
    steps: Iterable[int] | None,
    kv_dtype: str | None,
    allocator: str,
    plans: bool,
    baselines: bool,
) -> Asked:
    several = [policies] if isinstance(policies, (str, Part, Chain, Policy)) else list(policies)
    resolved = list({p.id: p for p in map(parse_policy, several)}.values())
    if not resolved:
        raise WrongUse("no policy to replay; give at least one, for example quest(read=tokens(512))")
    if allocator not in ALLOCATORS:
        raise WrongUse(f"allocator {allocator!r}: expected {' or '.join(map(repr, ALLOCATORS))}, whose rows keep a physical page")
    dtype = trace.kv_dtype(kv_dtype)
    mine = set(chosen("layers", layers, [x.id for x in trace.captured_layers], trace))
    whose = set(chosen("requests", requests, [r.id for r in trace.requests], trace))
    asked_requests = tuple(r for r in trace.requests if r.id in whose)
    asked_layers = tuple(x for x in trace.captured_layers if x.id in mine)
    written = None
    if steps is not None:
        there = {int(s) for r in asked_requests for x in asked_layers for s in trace.supplies(r, x).steps}
        written = tuple(chosen("steps", steps, sorted(there), trace))
    return Asked(
        entries=tuple(with_baselines(resolved) if baselines else map(Entry, resolved)),
        requests=asked_requests,
        layers=tuple(x.billed(dtype, trace.dtype) for x in asked_layers),
        steps=written,
        kv_dtype=dtype,
        allocator=allocator,
        plans=plans,
        baselines=baselines,
    )


def _told(failures: Failures, tasks: int, out: Path) -> KvsimError:
    """One error for all that failed, of the first one's kind."""
    first = failures[0][1]
    kept = tasks - len(failures)
    more = f" (and {len(failures) - 1} more of {tasks} tasks failed)" if len(failures) > 1 else ""
    note = f"; the {kept} finished tasks are kept in {partial(out)}, repeat the replay to go on" if kept else ""
    error = type(first)(f"{first}{more}{note}")
    error.__cause__ = first.__cause__ or first
    return error
