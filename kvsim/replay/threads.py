"""One thread in every worker: workers share the cores between them, and libraries that each take all of them only get in the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

THREADS = (
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Processes started inside have one thread in every library: these read the environment when they are loaded."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def pin() -> None:
    """One thread in this process, whoever started it and whatever is loaded already."""
    import pyarrow as pa
    from threadpoolctl import threadpool_limits

    # Once numba is loaded, a new number in the environment makes it refuse the next thing that it has to compile.
    unread = [name for name in THREADS if name != "NUMBA_NUM_THREADS" or "numba" not in sys.modules]
    os.environ.update(dict.fromkeys(unread, "1"))
    pin_numba()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    threadpool_limits(1)


def pin_numba() -> None:
    """numba keeps the number for each thread that calls it, and a cluster's worker does its tasks in threads of its own."""
    import numba

    numba.set_num_threads(1)
