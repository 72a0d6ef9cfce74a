"""Who does the tasks: this process, or worker processes that know nothing but kvsim and end with this one."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread, current_thread, main_thread
from types import ModuleType
from typing import Protocol

from kvsim.errors import KvsimError, WrongUse
from kvsim.policies.language import load_file
from kvsim.replay.asked import Asked, Task, modules_of

DIED = "a worker process died, perhaps for want of memory: ask for fewer --workers or set --memory"
Failures = list[tuple[Task, KvsimError]]


class Work(Protocol):
    """What every worker is given once: does a task and writes what comes of it."""

    @property
    def asked(self) -> Asked: ...

    def do(self, task: Task) -> None:
        """Raises KvsimError."""


_work: Work  # in a worker process, what it was given


def do_all(work: Work, tasks: Sequence[Task], workers: int, tick: Callable[[], None]) -> Failures:
    """Does every task, in any order -> those that failed, in the order of `tasks`.

    Raises WrongUse for a policy that another process cannot be given."""
    if workers == 1 or len(tasks) < 2:
        return [(task, e) for task in tasks if (e := _alone(work, task, tick))]
    context = get_context("spawn")
    ends, keeps = context.Pipe(duplex=False)
    with _no_main(), ProcessPoolExecutor(workers, context, _begin, (ends, _packed(work), _policy_files(work))) as pool:
        try:
            with _no_interrupt():
                futures = {pool.submit(_one, task): task for task in tasks}
            return _collected(futures, tasks, tick)
        except BrokenProcessPool:  # while tasks were still being handed out
            return [(task, KvsimError(DIED)) for task in tasks]
        except BaseException:
            keeps.close()
            raise


def _packed(work: Work) -> bytes:
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise WrongUse(
            f"a policy cannot be sent to another process ({e}); put it in a file of its own, or ask for 1 worker"
        ) from None


def _alone(work: Work, task: Task, tick: Callable[[], None]) -> KvsimError | None:
    try:
        work.do(task)
    except KvsimError as e:
        return e
    finally:
        tick()
    return None


def _collected(futures: dict[Future[None], Task], tasks: Sequence[Task], tick: Callable[[], None]) -> Failures:
    failed: dict[Task, KvsimError] = {}
    for future in as_completed(futures):
        try:
            future.result()
        except KvsimError as e:
            failed[futures[future]] = e
        except BrokenProcessPool:
            failed[futures[future]] = KvsimError(DIED)
        tick()
    return [(task, failed[task]) for task in tasks if task in failed]


# ------------------------------------------------------------------------------------------------ in a worker
def _begin(ends: Connection, payload: bytes, files: Sequence[str]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with, args=(ends,), daemon=True).start()
    for file in files:
        load_file(file)
    _work = pickle.loads(payload)


def _end_with(ends: Connection) -> None:
    """Ends this process when the other end of the pipe closes: after an interrupt, or because its owner died."""
    try:
        ends.recv()
    except (EOFError, OSError):
        os._exit(1)


def _one(task: Task) -> None:
    _work.do(task)


# ------------------------------------------------------------------------------------------------ in the parent
def _policy_files(work: Work) -> list[str]:
    """The policy files of a run: a worker must know their classes before it is sent one."""
    modules = {m for e in work.asked.entries for m in modules_of(e.policy) if m.startswith("kvsim_policy_file_")}
    return sorted(str(sys.modules[m].__file__) for m in modules)


@contextmanager
def _no_main() -> Iterator[None]:
    """A worker imports kvsim, not the script that called it, whose top level would run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C from their first line on: it is this process that ends them."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
