"""The workers of a Dask cluster that is there already, as an engine of a sweep: through its futures, and nothing else of it.

The scheduler tries a task again when its worker died, and gives it up after some deaths (KilledWorker); whether it was the task's fault
is for `supervise` to find out. Workers read the trace and write parts themselves: both must lie where every worker finds them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import kvsim
from kvsim.errors import KvsimError, WrongUse
from kvsim.replay.pool import Work, do_one, packed, policy_files, take

try:
    from distributed import Client, KilledWorker, WorkerPlugin
    from distributed.scheduler import KilledWorker as _SchedulersKilledWorker
except ModuleNotFoundError:
    raise WrongUse("--engine dask needs distributed: pip install 'kvsim[cluster]'") from None

PATIENCE = 10  # seconds for a scheduler to answer
ARRIVAL = 60  # seconds for its first worker to be there
