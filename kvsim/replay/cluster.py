"""The workers of a Dask cluster that is there already, as an engine of a sweep: through its futures, and nothing else of it.

The scheduler tries a task again when its worker died, and gives it up after some deaths (KilledWorker); whose fault it was is for
`supervise` to find out. Workers read traces and write parts themselves: both must lie where every worker finds them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvsim
from kvsim.errors import KvsimError, WrongUse, in_a_line
from kvsim.replay.pool import Work, do_one, forget, packed, policy_files, take

try:
    from distributed import Client, KilledWorker, WorkerPlugin
except ModuleNotFoundError:
    raise WrongUse("--engine dask needs distributed: pip install 'kvsim[cluster]'") from None

ANSWER = 10  # seconds for a scheduler to answer
ARRIVAL = 60  # seconds for its first worker to be there
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h; the largest that glibc itself would come to on 64 bits


class Cluster:
    """An open connection. workers: threads of all workers, each of which does a task at a time; memory: bytes of the smallest one."""

    crash = (KilledWorker,)
    tries = 1  # the scheduler tried before it said so

    def __init__(self, scheduler: str) -> None:
        """scheduler: an address such as tcp://host:8786, or a file that the scheduler wrote. Raises WrongUse."""
        self.scheduler = scheduler
        self.client = _client(scheduler)
        try:
            self.client.wait_for_workers(1, timeout=ARRIVAL)
        except TimeoutError:
            self.client.close()
            raise WrongUse(
                f"scheduler {scheduler}: no worker came within {ARRIVAL} s; start some: dask worker {scheduler}"
            ) from None
        self.workers = sum(self.client.nthreads().values())
        limits = [w.get("memory_limit") for w in self.client.scheduler_info(n_workers=-1)["workers"].values()]
        self.memory = min((n for n in limits if n), default=None)

    def close(self) -> None:
        self.client.close()

    @contextmanager
    def given(self, work: Work) -> Iterator[Cluster]:
        """While inside, every worker has the work, also one that comes later."""
        plugin = _Given(packed(work), policy_files(work))
        self.client.register_plugin(plugin)
        self._what = plugin.what
        executor = self._executor = self.client.get_executor(pure=False, retries=0)
        try:
            yield self
        except CancelledError as e:
            raise KvsimError(f"scheduler {self.scheduler} went away; the same sweep goes on when there is one again") from e
        finally:
            executor.shutdown(wait=False)
            if self.client.status == "running":
                self.client.unregister_worker_plugin(plugin.name)

    def submit(self, task: Any) -> Future[None]:
        return self._executor.submit(do_one, self._what, task)

    def renew(self) -> None:
        """Nothing: the cluster starts its workers anew."""


class _Given(WorkerPlugin):  # type: ignore[misc]  # its module is not read by mypy, installed or not
    """Hands the work to a worker process as it starts."""

    def __init__(self, payload: bytes, files: list[str]) -> None:
        from hashlib import sha256

        self.payload, self.files, self.version = payload, files, kvsim.__version__
        self.what = sha256(payload).hexdigest()
        self.name = f"kvsim-{self.what[:16]}"

    def setup(self, worker: Any) -> None:
        if kvsim.__version__ != self.version:
            raise WrongUse(f"worker {worker.address} has kvsim {kvsim.__version__}; expected {self.version}, as the driver has")
        take(self.what, self.payload, self.files)
        keep_memory()

    def teardown(self, worker: Any) -> None:
        forget(self.what)


def keep_memory() -> None:
    """Lets this process use again what it has freed, as any process does by default. A nanny starts workers with MALLOC_TRIM_THRESHOLD_, with
    which glibc gives every larger array back at once and the next one is cleared anew: a seventh of a replay's time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)


def _client(scheduler: str) -> Client:
    logging.getLogger("distributed").setLevel(logging.ERROR)
    if ":" not in scheduler and not Path(scheduler).is_file():
        raise WrongUse(
            f"scheduler {scheduler}: no such file, and no address such as tcp://HOST:8786; dask scheduler --scheduler-file {scheduler} writes it"
        )
    how = {"scheduler_file": scheduler} if Path(scheduler).is_file() else {"address": scheduler}
    try:
        return Client(timeout=ANSWER, set_as_default=False, **how)
    except (OSError, ValueError, KeyError) as e:  # OSError: also the TimeoutError of one that does not answer
        raise WrongUse(f"scheduler {scheduler}: nobody answers ({in_a_line(e)[:120]}); start one with: dask scheduler") from None
