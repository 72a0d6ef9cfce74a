"""Every task once, on workers that may die: what was out when one died is suspect, and a suspect is tried again with nothing beside it.

An engine whose worker died often cannot tell at which task. So at most 2W + 2 tasks are out at a time, and of those that were lost the
guilty one is known by the crashes that it has alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from kvsim.errors import KvsimError

PATIENCE = 0.2  # seconds of one wait: polars, once imported, has the system begin a wait again that Ctrl-C interrupted
IN_A_ROW = 3  # tasks given up with none done between them, after which it is not the tasks
DIED = "its worker process died each time it was tried with nothing beside it, perhaps for want of memory: set --memory"
Failures = list[tuple[Any, KvsimError]]


class Engine(Protocol):
    """Workers that take tasks. crash: what a future raises when a worker died under it; tries: of a task alone, before it is given up."""

    workers: int
    tries: int

    @property
    def crash(self) -> tuple[type[BaseException], ...]: ...

    def submit(self, task: Any) -> Future[None]: ...

    def renew(self) -> None:
        """Makes it take tasks again after a crash; all that is out is lost."""


def supervise(engine: Engine, tasks: Sequence[Any], tick: Callable[[], None], name: Callable[[Any], str] = str) -> Failures:
    """Does every task -> those that failed, in the order of `tasks`. tick: called as each is done with, well or not.

    Raises KvsimError when workers die whatever they are given."""
    waiting, suspects = deque(tasks), deque[Any]()
    out = _Out(engine)
    crashes, failed, in_a_row = Counter[Any](), dict[Any, KvsimError](), 0
    while waiting or suspects or out.tasks:
        alone = bool(suspects)
        if not alone:
            out.fill(waiting, 2 * engine.workers + 2)
        elif not out.tasks:
            out.fill(suspects, 1)
        else:
            alone = False  # not before those that are out are done
        done, lost = out.collect()
        for task, error in done:
            in_a_row = 0
            failed |= {task: error} if error else {}
            tick()
        crashes.update(lost if alone else ())
        for task in lost:
            if crashes[task] < engine.tries:
                suspects.append(task)
                continue
            failed[task] = KvsimError(f"{name(task)}: {DIED}")
            in_a_row += 1
            tick()
        if in_a_row == IN_A_ROW:
            raise KvsimError(f"{IN_A_ROW} tasks in a row failed, so it is not the tasks: {failed[lost[-1]]}")
    return [(task, failed[task]) for task in tasks if task in failed]


class _Out:
    """What an engine has been given and has not given back."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.age = engine, 0  # how often the engine was renewed
        self.tasks: dict[Future[None], tuple[Any, int]] = {}

    def fill(self, queue: deque[Any], most: int) -> None:
        while queue and len(self.tasks) < most:
            try:
                future = self.engine.submit(queue[0])
            except self.engine.crash:  # since the last result
                self._renew()
                future = self.engine.submit(queue[0])
            self.tasks[future] = queue.popleft(), self.age

    def collect(self) -> tuple[list[tuple[Any, KvsimError | None]], list[Any]]:
        """Waits for one at least -> those that are done, with what went wrong; those that were lost in a crash."""
        done: list[tuple[Any, KvsimError | None]] = []
        lost = []
        ended: Collection[Future[None]] = ()
        while not ended:
            ended = wait(self.tasks, PATIENCE, FIRST_COMPLETED).done
        for future in ended:
            task, age = self.tasks.pop(future)
            try:
                future.result()
                done.append((task, None))
            except KvsimError as e:
                done.append((task, e))
            except self.engine.crash:
                lost.append(task)
                if age == self.age:
                    self._renew()
        return done, lost

    def _renew(self) -> None:
        self.engine.renew()
        self.age += 1
