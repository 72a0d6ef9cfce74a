"""Stored bits become float32 exactly: every one of the 65 536 patterns, in any memory order."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvsim.kernels.numbers import to_float32, to_float64

ROOT = Path(__file__).parents[2]
BITS = np.arange(2**16, dtype=np.uint16).reshape(-1, 16)


def test_every_half():
    with np.errstate(invalid="ignore"):
        want = BITS.view(np.float16).astype(np.float32)
    assert np.array_equal(to_float32(BITS.view(np.float16)), want, equal_nan=True)
    assert np.array_equal(np.signbit(to_float32(BITS.view(np.float16))), np.signbit(want))  # the sign of zero


GENERIC = """
import numpy as np
from kvsim.kernels.numbers import has_halves, to_float32, to_float64

bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 16).view(np.float16)
want, got = bits.astype(np.float32), to_float32(bits)
assert np.array_equal(got, want, equal_nan=True)
assert np.array_equal(np.signbit(got), np.signbit(want))
assert np.array_equal(to_float64(bits, np.arange(len(bits))), want.astype(float), equal_nan=True)
print(has_halves())
"""


def test_every_half_on_a_cpu_that_has_none(tmp_path):
    """An x86 without F16C, which compiled code for a generic CPU is for: LLVM's own conversion ends the process there."""
    env = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", GENERIC], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(platform.machine().lower() not in ("x86_64", "amd64"))


def test_every_bfloat16_is_the_upper_half_of_a_float32():
    got = to_float32(BITS)
    assert np.array_equal(got.view(np.uint32), BITS.astype(np.uint32) << 16)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.uint16])
def test_rows_are_padded_with_zeros_and_may_lie_apart(kind):
    raw = BITS[1016:1024].view(np.float16).astype(kind) if kind != np.uint16 else BITS[1016:1024]
    whole = to_float32(raw)
    assert whole.dtype == np.float32
    assert whole.flags.c_contiguous
    padded = to_float32(raw, 13)
    assert np.array_equal(padded[:8], whole)
    assert padded.shape == (13, 16)
    assert not padded[8:].any()
    assert np.array_equal(to_float32(raw[::3, 1::2]), whole[::3, 1::2])
    assert np.array_equal(to_float32(raw.T.copy().T), whole)
    assert to_float32(raw[:0]).shape == (0, 16)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.uint16])
def test_some_rows_in_float64_are_those_of_all_in_float32(kind):
    raw = BITS[1000:1024].view(np.float16).astype(kind) if kind != np.uint16 else BITS[1000:1024]
    rows = np.array([3, 0, 23, 3])
    for x in (raw, raw[:, ::2], np.asfortranarray(raw)):
        got = to_float64(x, rows)
        assert got.dtype == np.float64
        assert np.array_equal(got, to_float32(x)[rows].astype(np.float64), equal_nan=True)
    assert to_float64(raw, rows[:0]).shape == (0, 16)


def test_every_half_in_float64():
    with np.errstate(invalid="ignore"):
        want = BITS.view(np.float16).astype(np.float64)
    assert np.array_equal(to_float64(BITS.view(np.float16), np.arange(len(BITS))), want, equal_nan=True)


def test_room_that_is_given_is_filled_to_its_end():
    room = np.full((5, 16), 7, np.float32)
    assert to_float32(BITS[:3], out=room) is room
    assert np.array_equal(room, to_float32(BITS[:3], 5), equal_nan=True)


def test_rows_in_float64_fill_the_room_they_are_given():
    out = np.full((3, 16), 7.0)
    assert to_float64(BITS, np.array([5, 2, 5]), out) is out
    assert np.array_equal(out, to_float64(BITS, np.array([5, 2, 5])), equal_nan=True)
