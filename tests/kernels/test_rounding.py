"""Narrow formats: the nearest numbers around x, against a list of all the numbers there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels.rounding import E4M3, LARGEST, above, holds, rounded, stored
from tests import naive

PATTERNS = np.arange(2**16, dtype=np.uint16)
BITS: dict[str, Any] = {
    "float16": PATTERNS.view(np.float16),
    "bfloat16": (PATTERNS.astype(np.uint32) << 16).view(np.float32),
    "fp8": np.array([naive.e4m3(code) for code in range(256)]),
}
NUMBERS = {dtype: np.unique(x[np.isfinite(x)].astype(float) + 0.0) for dtype, x in BITS.items()}
EVERY = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.floats(-500, 500),
    st.sampled_from(
        [65504.0, 65519.9, 65520.0, -65520.0, 1e5, 3.4e38, 3.5e38, -3.5e38, 5e-324, -6e-8, 1e-45, 0.0, -0.0, 1.00048, -2.07]
    ),
    st.sampled_from([448.0, 464.0, -464.0, 464.1, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-6, 1.9 * 2.0**-7]),
)


def kept(x, dtype, side):
    return float(stored(np.array([x]), dtype, side)[0])


@given(EVERY, st.sampled_from(sorted(NUMBERS)))
@settings(deadline=None, max_examples=600)
def test_outward_is_the_nearest_number_that_encloses(x, dtype):
    numbers = NUMBERS[dtype]
    assert kept(x, dtype, -1) == numbers[numbers <= x].max(initial=-LARGEST)
    assert kept(x, dtype, +1) == numbers[numbers >= x].min(initial=LARGEST)


@given(EVERY)
def test_float32_encloses_within_one_number(x):
    lo, hi = kept(x, "float32", -1), kept(x, "float32", +1)
    assert lo <= x <= hi
    if max(-lo, hi) < LARGEST:
        assert (np.float32(lo), np.float32(hi)) == (lo, hi)
        assert hi in (lo, np.nextafter(np.float32(lo), np.float32(np.inf)))
    else:
        assert abs(x) > float(np.finfo(np.float32).max)


@given(st.one_of(st.floats(-500, 500), st.integers(-(2**14), 2**14).map(lambda n: n * 2.0**-10)))
@settings(deadline=None, max_examples=400)
def test_the_nearest_fp8_number_halves_to_even(x):
    codes = min(range(127), key=lambda code: (abs(abs(x) - naive.e4m3(code)), code % 2))
    want = naive.e4m3(codes) if abs(x) <= 464 else LARGEST  # halfway to where 480 would be
    assert kept(x, "fp8", 0) == np.copysign(want, x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_lies_between_two_numbers_is_not_held(dtype):
    numbers = NUMBERS[dtype]
    between = (numbers[:-1] + numbers[1:]) / 2
    assert all(holds(dtype, numbers[i : i + 9]) for i in range(0, len(numbers), 9))
    assert not any(holds(dtype, x) for x in between[:, None])
    assert not any(holds(dtype, np.array([x])) for x in (np.inf, -np.inf, np.nan, 2 * numbers[-1]))


@pytest.mark.parametrize("dtype", sorted(NUMBERS))
def test_numbers_of_the_dtype_stay_and_the_next_follows(dtype):
    numbers = NUMBERS[dtype]
    for side in (-1, 0, 1):
        assert np.array_equal(stored(numbers, dtype, side), numbers)
    assert np.array_equal(above(numbers[:-1], dtype), numbers[1:])
    assert above(numbers[-1:], dtype)[0] == np.inf


def test_fp8_is_e4m3():
    assert (len(E4M3), E4M3[1], E4M3[8], E4M3[-1]) == (127, 2.0**-9, 2.0**-6, 448)
    assert [kept(x, "fp8", -1) for x in (-2.07, 3.17, 449)] == [-2.25, 3, 448]
    assert [kept(x, "fp8", +1) for x in (-2.07, 3.17, 449)] == [-2, 3.25, LARGEST]
    assert [kept(x, "fp8", 0) for x in (-2.07, 3.17, 449)] == [-2, 3.25, 448]


def test_rounding_by_hand():
    assert [kept(1.00048, "float16", side) for side in (-1, 0, 1)] == [1.0, 1.0, 1.0009765625]
    assert (kept(-2.07, "bfloat16", -1), kept(3.17, "bfloat16", 1)) == (-2.078125, 3.171875)
    assert rounded(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8]), "bfloat16").tolist() == [1, 1 + 2.0**-6, -1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("side", [-1, 0, 1])
def test_numbers_of_the_dtype_stay_as_they_are(dtype, side):
    """All alone, where nothing is rounded, and beside one that is."""
    x = NUMBERS[dtype] if dtype in NUMBERS else np.float32([0, 1.5, -3e38, 1e-40, 2.0**-149, 2.0**-126]).astype(float)
    for other in ([], [1 + 2.0**-40]):
        assert np.array_equal(stored(np.append(x, other), dtype, side)[: len(x)], x)
    normal = x[(np.abs(x) >= 2.0**-14) | (x == 0)]
    assert np.array_equal(stored(normal, dtype, side), normal)
