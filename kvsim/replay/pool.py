"""Who does the tasks: this process, or worker processes that know nothing but kvsim and end with this one."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread, current_thread, main_thread
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from kvsim.errors import KvsimError, WrongUse
from kvsim.policies.language import load_file
from kvsim.replay.asked import Asked, modules_of
from kvsim.replay.supervise import Failures, supervise
from kvsim.replay.threads import one_thread, pin, pin_numba

if TYPE_CHECKING:
    from kvsim.replay.cluster import Cluster


class Work(Protocol):
    """What every worker is given once: does a task and writes what comes of it."""

    @property
    def asked(self) -> Asked: ...

    def do(self, task: Any) -> None:
        """Raises KvsimError."""

    def name(self, task: Any) -> str:
        """As a message calls it."""


_works: dict[str, Work] = {}  # in a worker process, what it was given; a cluster's may serve several sweeps


def do_all(work: Work, tasks: Sequence[Any], workers: int, tick: Callable[[], None], cluster: Cluster | None = None) -> Failures:
    """Does every task, in any order -> those that failed, in the order of `tasks`. cluster: whose workers do them; None: this machine's.

    Raises WrongUse for a policy that another process cannot be given."""
    if cluster is not None and tasks:
        with cluster.given(work) as engine:
            return supervise(engine, tasks, tick, work.name)
    if workers == 1 or len(tasks) < 2:
        return [(task, e) for task in tasks if (e := _alone(work, task, tick))]
    with Pool(work, workers) as pool:
        return supervise(pool, tasks, tick, work.name)


def _alone(work: Work, task: Any, tick: Callable[[], None]) -> KvsimError | None:
    try:
        work.do(task)
    except KvsimError as e:
        return e
    finally:
        tick()
    return None


class Pool:
    """Processes of this machine. When one dies, the executor has lost all that was out; `renew` makes another one."""

    crash = (BrokenProcessPool,)
    tries = 3

    def __init__(self, work: Work, workers: int) -> None:
        self.workers = workers
        self._given = "this", packed(work), policy_files(work)
        self._context = get_context("spawn")

    def __enter__(self) -> Pool:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if kind is not None:
            self._keeps.close()  # the workers end, whatever they are at
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._keeps.close()
        self._ends.close()

    def submit(self, task: Any) -> Future[None]:
        with ExitStack() as stack:  # a process may be started by this
            for state in (_no_main(), _no_interrupt(), one_thread()):
                stack.enter_context(state)
            return self._executor.submit(do_one, "this", task)

    def renew(self) -> None:
        self.__exit__(BrokenProcessPool, None, None)
        self._open()

    def _open(self) -> None:
        self._ends, self._keeps = self._context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(self.workers, self._context, _begin, (self._ends, *self._given))


def packed(work: Work) -> bytes:
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise WrongUse(
            f"a policy cannot be sent to another process ({e}); put it in a file of its own, or ask for 1 worker"
        ) from None


def policy_files(work: Work) -> list[str]:
    """The policy files of a run: a worker must know their classes before it is sent one."""
    modules = {m for e in work.asked.entries for m in modules_of(e.policy) if m.startswith("kvsim_policy_file_")}
    return sorted(str(sys.modules[m].__file__) for m in modules)


# ------------------------------------------------------------------------------------------------ in a worker
def _begin(ends: Connection, what: str, payload: bytes, files: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with, args=(ends,), daemon=True).start()
    take(what, payload, files)


def take(what: str, payload: bytes, files: Sequence[str]) -> None:
    """What a worker does before its first task: `what` names the work."""
    pin()
    for file in files:
        load_file(file)
    _works[what] = pickle.loads(payload)


def forget(what: str) -> None:
    _works.pop(what, None)


def _end_with(ends: Connection) -> None:
    """Ends this process when the other end of the pipe closes: after an interrupt, or because its owner died."""
    try:
        ends.recv()
    except (EOFError, OSError):
        os._exit(1)


def do_one(what: str, task: Any) -> None:
    pin_numba()
    _works[what].do(task)


# ------------------------------------------------------------------------------------------------ in the parent
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
