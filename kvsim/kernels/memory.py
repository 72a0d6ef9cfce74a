"""Memory on cache lines, and memory that lasts from one block of a thread to the next."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

CACHE_LINE = 64  # bytes, and of a 512-bit register, which takes two lines where numpy's own large arrays begin

Array = NDArray[Any]


def empty(shape: tuple[int, ...], kind: DTypeLike = np.float32) -> Array:
    """numpy's, from the start of a cache line on."""
    size, item = math.prod(shape), np.dtype(kind).itemsize
    memory = np.empty(size + CACHE_LINE // item, kind)
    first = -(memory.ctypes.data // item) % (CACHE_LINE // item)
    return memory[first : first + size].reshape(shape)


class _Spare(threading.local):
    memory = np.empty(0, np.float32)


_spare = _Spare()
NOTHING = _spare.memory


def room(size: int) -> NDArray[np.float32]:
    """f32[size or more], what was left if that is enough. The system clears what is new, which takes a tenth of the time of whole curves
    without output errors (benchmarks/budgets.py)."""
    memory, _spare.memory = _spare.memory, NOTHING
    return memory if len(memory) >= size else empty((size,))


def leave(memory: NDArray[np.float32]) -> None:
    """Nobody looks at it any more: the next `room` of this thread is there."""
    if len(memory) > len(_spare.memory):
        _spare.memory = memory
