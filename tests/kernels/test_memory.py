from __future__ import annotations

import threading

import numpy as np
import pytest

from kvsim.kernels import memory
from kvsim.kernels.memory import CACHE_LINE, NOTHING, empty, leave, room


@pytest.fixture(autouse=True)
def none_spare(monkeypatch):
    monkeypatch.setattr(memory._spare, "memory", NOTHING)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 7, 33), (512, 256)])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_an_array_starts_a_cache_line(shape, kind):
    for _ in range(3):
        x = empty(shape, kind)
        assert (x.shape, x.dtype, x.flags.c_contiguous) == (shape, kind, True)
        assert x.ctypes.data % CACHE_LINE == 0
        x[...] = 1  # all of it is its own


def test_what_was_left_is_the_next_room_of_the_thread():
    first = room(1000)
    assert len(first) == 1000
    leave(first)
    again = room(900)
    assert again is first
    other = room(900)  # while the first is in use
    assert not np.shares_memory(other, again)
    leave(again)
    leave(other)
    assert room(1000) is first  # the larger of both is kept


def test_too_little_was_left():
    leave(room(10))
    assert len(room(11)) == 11


def test_no_thread_sees_the_room_of_another():
    mine, theirs = room(100), []
    leave(mine)
    other = threading.Thread(target=lambda: theirs.append(room(100)))
    other.start()
    other.join()
    assert not np.shares_memory(mine, theirs[0])
    assert room(100) is mine
