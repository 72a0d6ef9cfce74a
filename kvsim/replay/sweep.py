"""A sweep: the policies of a study over its traces, all tasks on the same workers, into one run directory per trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import KvsimError, WrongUse
from kvsim.places import from_json, place, write_once
from kvsim.policies.language import load_file
from kvsim.replay.asked import Asked, about, resolve
from kvsim.replay.estimate import available, estimate
from kvsim.replay.folder import Draft, complete, draft
from kvsim.replay.memory import Lot, at_once, workers_of
from kvsim.replay.needs import check_needs
from kvsim.replay.neighbours import Reuse
from kvsim.replay.parts import finished
from kvsim.replay.pool import do_all
from kvsim.replay.result import Run
from kvsim.replay.share import shared_limits
from kvsim.replay.study import Study, read_study
from kvsim.replay.supervise import Failures
from kvsim.replay.work import Work
from kvsim.trace.bundled import trace_place
from kvsim.trace.open import Trace, open_trace

if TYPE_CHECKING:
    from kvsim.replay.cluster import Cluster
    from kvsim.s3 import S3Path

STUDY = "study.json"  # in the folder of a sweep: what it is of
SWEEP_SCHEMA = "kvsim.sweep/1"
ENGINES = ("local", "dask")
MOST_TASKS = 1_000_000


@dataclass(frozen=True, eq=False)
class Member:
    """A trace of a study, with what is asked of it."""

    trace: Trace
    asked: Asked


@dataclass(frozen=True, eq=False)
class Together:
    """The work on several traces as one: a task is the place of its trace, then the task there."""

    works: Sequence[Work | Reuse]

    @property
    def asked(self) -> Asked:
        return self.works[0].asked  # the policies are the same for all

    def name(self, task: Any) -> str:
        return self.works[task[0]].name(task[1])

    def do(self, task: Any) -> None:
        self.works[task[0]].do(task[1])


def sweep(
    study: Study | str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    memory: int | str | None = None,
    engine: str = "local",
    scheduler: str | None = None,
    max_tasks: int = MOST_TASKS,
    strict: bool = False,
    dry_run: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, tasks: None,
    also: Callable[[Path], None] = lambda folder: None,
) -> list[Run]:
    """Replays the policies of a study on its traces: a folder of runs, one per trace, named as the trace.

    tell: called with what is about to be done, how long it may take and every failure; also: with the folder of each run before it
    gets its name; dry_run: nothing is done after the estimate. A layer is read once for all policies. What is done is not done again
    when the sweep is repeated, however it ended; a task that fails stops no other.

    Raises WrongUse, before anything is done, for a study that cannot be carried out or a folder of another one; KvsimError at the end
    when tasks failed."""
    found = study if isinstance(study, Study) else read_study(study, max_tasks)
    with _cluster(engine, scheduler, workers) as cluster:
        members = _members(found, everywhere=cluster is not None)
        _few_enough(members, max_tasks)
        target = _absolute(place(out)) if cluster else place(out)
        identity = _identity(members)
        _same_study(target, identity)
        left = [m for m in members if not complete(target / m.trace.id)]
        ways = Ways(workers, memory or (cluster.memory if cluster else available()), cluster, strict, progress, also)
        tell(_foretold(left, len(members), ways))
        if dry_run:
            return []
        if isinstance(target, Path):
            target.mkdir(parents=True, exist_ok=True)
        write_once(target / STUDY, json.dumps(identity, indent=1, ensure_ascii=False).encode())
        failures = _replayed(left, target, ways)
    for (i, _), error in failures:
        tell(f"failed: {left[i].trace.id}, {error}")
    if failures:
        raise _summary(failures, left, len(members), target)
    return [Run(target / m.trace.id) for m in members]


@contextmanager
def _cluster(engine: str, scheduler: str | None, workers: int | None) -> Iterator[Cluster | None]:
    """The connection to a cluster, or None for the processes of this machine. Raises WrongUse."""
    if engine not in ENGINES:
        raise WrongUse(f"engine {engine!r}: expected {' or '.join(ENGINES)}")
    if engine == "local":
        if scheduler:
            raise WrongUse(f"scheduler {scheduler}: the local engine has none; ask for --engine dask")
        yield None
        return
    if not scheduler or workers is not None:
        wrong = "it needs --scheduler ADDRESS or FILE" if not scheduler else "--workers is of this machine; a cluster has its own"
        raise WrongUse(f"engine dask: {wrong}")
    from kvsim.replay.cluster import Cluster

    cluster = Cluster(scheduler)
    try:
        yield cluster
    finally:
        cluster.close()


def _absolute(there: Path | S3Path) -> Path | S3Path:
    """As every worker finds it, in whichever folder it was started."""
    return there.absolute() if isinstance(there, Path) else there


def _foretold(left: Sequence[Member], runs: int, ways: Ways) -> str:
    """What is about to be done. Raises WrongUse for too little memory or too few workers."""
    lots = [Lot(m.trace, m.asked, m.asked.tasks) for m in left]
    told = str(estimate(lots, _workers(lots, ways), ways.memory)) if left else "no run is missing"
    return f"{runs - len(left)} of {runs} runs are done; {told}" if len(left) < runs else told


def _workers(lots: Sequence[Lot], ways: Ways) -> int:
    return ways.cluster.workers if ways.cluster else workers_of(lots, ways.workers, ways.memory)


def _summary(failures: Failures, members: Sequence[Member], runs: int, out: Path | S3Path) -> KvsimError:
    (i, _), first = failures[0]
    whole = runs - len({i for (i, _), _ in failures})
    tasks = sum(len(m.asked.tasks) for m in members)
    more = f" (and {len(failures) - 1} more of {tasks} tasks)" if len(failures) > 1 else f" (1 of {tasks} tasks)"
    return KvsimError(
        f"failed: {members[i].trace.id}, {first}{more}; {whole} of {runs} runs are whole in {out}, and the same sweep goes on there"
    )


def _members(study: Study, everywhere: bool) -> list[Member]:
    """Every trace open and every policy resolved. Raises WrongUse, BadTrace."""
    for file in study.policy_files:
        load_file(file)
    members: dict[str, Member] = {}
    for path in study.traces:
        trace = open_trace(_absolute(trace_place(path)) if everywhere else path)
        asked = resolve(trace, study.policies, **study.options)
        check_needs(trace, asked)
        if trace.id in members:
            raise WrongUse(f"{path}: a second trace with the name {trace.id!r}, which names its run; rename one of the folders")
        members[trace.id] = Member(trace, asked)
    return list(members.values())


def _few_enough(members: Sequence[Member], most: int) -> None:
    many = sum(len(m.asked.tasks) * len(m.asked.entries) for m in members)
    if many > most:
        tasks = sum(len(m.asked.tasks) for m in members)
        raise WrongUse(
            f"{many:,} replays of a layer ({tasks:,} layers of requests, up to {max(len(m.asked.entries) for m in members):,} policies), "
            f"more than {most:,}; ask for fewer policies, layers or requests, or allow more with --max-tasks"
        )


def _identity(members: Sequence[Member]) -> dict[str, Any]:
    """study.json: all that the runs of a folder depend on, by the name a user knows it by."""
    abouts = [about(m.trace, m.asked, "") for m in members]
    runs = [{"trace": a["trace"]["id"], "sha256": a["trace"]["sha256"]} for a in abouts]
    chosen = [{name: a["options"].pop(name) for name in ("requests", "layers", "steps")} for a in abouts]
    return {
        "schema": SWEEP_SCHEMA,
        "version of kvsim": abouts[0]["kvsim"],
        "set of traces": runs,
        "set of policies": [[p["id"], p["version"]] for p in abouts[0]["policies"]],
        "requests, layers or steps": chosen,
        "kv_dtype": [a["kv_dtype"] for a in abouts],
    } | abouts[0]["options"]


def _same_study(out: Path | S3Path, identity: dict[str, Any]) -> None:
    """Raises WrongUse unless the folder is new, or begun with this study."""
    file = out / STUDY
    if not file.is_file():
        if not _new(out):
            raise WrongUse(f"{out}: exists already and is no sweep that can go on; choose another -o, or remove it")
        return
    try:
        begun = from_json(file.read_bytes())
        differ = [name for name in identity if begun.get(name) != identity[name]]
    except (ValueError, AttributeError):
        raise WrongUse(f"{file}: altered, so nothing can go on from it; choose another -o, or remove {out}") from None
    if differ:
        raise WrongUse(
            f"{out}: belongs to another study, with another {', another '.join(differ)}; repeat that one to finish it, choose another "
            "-o, or remove it"
        )


def _new(out: Path | S3Path) -> bool:
    if not isinstance(out, Path):
        return not out.names()
    return not out.exists() or (out.is_dir() and not any(out.iterdir()))


@dataclass(frozen=True)
class Ways:
    """How a sweep is carried out; nothing in its tables depends on it. memory: of all workers here, of one in a cluster."""

    workers: int | None
    memory: int | str | None
    cluster: Cluster | None
    strict: bool
    progress: Callable[[int, int], None]
    also: Callable[[Path], None]


def _replayed(members: Sequence[Member], out: Path | S3Path, ways: Ways) -> Failures:
    """Makes every run that can be made whole -> what failed: ((place of its trace, task), why)."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with ExitStack() as stack:
        drafts = [stack.enter_context(draft(out / m.trace.id, about(m.trace, m.asked, now))) for m in members]
        lots = [_left(m, its) for m, its in zip(members, drafts, strict=True)]
        works = [_work(lot, its, ways) for lot, its in zip(lots, drafts, strict=True)]
        workers = _workers(lots, ways)
        every = sum(len(m.asked.tasks) for m in members)
        tasks = [(i, task) for i, lot in enumerate(lots) for task in lot.tasks]
        count = iter(range(every - len(tasks), every + 1))
        ways.progress(next(count), every)
        failures = do_all(Together(works), tasks, workers, lambda: ways.progress(next(count), every), ways.cluster)
        second = [Reuse(m.trace, m.asked, its.parts) for m, its in zip(members, drafts, strict=True)]
        bad = {i for (i, _), _ in failures}
        again = [(i, task) for i, reuse in enumerate(second) if i not in bad for task in reuse.left()]
        failures += do_all(Together(second), again, workers, lambda: None, ways.cluster)
        bad = {i for (i, _), _ in failures}
        for i, (m, its) in enumerate(zip(members, drafts, strict=True)):
            if i not in bad:
                its.finish(m.asked.tasks, m.asked.ids, ways.also)
    return failures


def _left(member: Member, its: Draft) -> Lot:
    done = set(finished(its.parts, member.asked.tasks))
    return Lot(member.trace, member.asked, [t for t in member.asked.tasks if t not in done])


def _work(lot: Lot, its: Draft, ways: Ways) -> Work:
    limits = shared_limits(lot.trace, lot.asked, its.path / "limits.json")
    work = Work(lot.trace, lot.asked, its.parts, ways.strict, limits, at_once(lot, ways.memory))
    if ways.strict:
        for task in set(lot.asked.tasks) - set(lot.tasks):
            work.check(task)
    return work
