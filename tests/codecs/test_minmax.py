"""Min-max codes: the worked channel, the error law, idempotence, groups, sizes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvsim.codecs.minmax import minmax
from kvsim.errors import WrongUse

FINE = 2.0**-14  # the smallest step that fp16 holds in full precision
halves = st.floats(-1000, 1000, width=16)
groups = arrays(np.float64, st.tuples(st.integers(1, 3), st.just(8), st.integers(1, 4)), elements=halves)


def test_the_channel_worked_by_hand():
    x = np.array([-1, -0.2, 0.4, 2.0])
    coded = minmax(2, "tokens", 4).roundtrip(x.reshape(1, 4, 1)).ravel()
    assert coded.tolist() == [-1, 0, 0, 2]
    assert np.abs(coded - x).max() == pytest.approx(0.4)


def test_a_constant_group_comes_back_as_its_zero():
    x = np.full((1, 4, 3), 0.1)
    assert (minmax(2, "tokens", 4).roundtrip(x) == float(np.float16(0.1))).all()


@given(groups, st.integers(1, 8))
@settings(deadline=None)
def test_the_error_is_half_a_step_and_what_was_clipped(x, bits):
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    zero = low.astype(np.float16).astype(float)
    step = ((high - low) / (2**bits - 1)).astype(np.float16).astype(float)
    outside = np.maximum(x - (zero + step * (2**bits - 1)), zero - x).clip(min=0)
    error = np.abs(minmax(bits, "tokens", 8).roundtrip(x) - x)
    assert (error <= step / 2 + outside + 1e-12 * np.abs(x).max()).all()


@given(
    arrays(np.float64, (2, 8, 3), elements=st.one_of(st.floats(-1000, 1000), st.floats(0, 2.0**-13), st.just(0.1))),
    st.integers(1, 8),
    st.sampled_from([("tokens", 8), ("channels", 2), ("channels", None)]),
)
@settings(deadline=None, max_examples=300)
def test_no_number_moves_farther_than_its_group_says(x, bits, grouping):
    codec = minmax(bits, *grouping)
    error = codec.error(x)
    assert error.shape == x.shape
    assert (np.abs(codec.roundtrip(x) - x) <= error * (1 + 1e-12) + 1e-15 * np.abs(x)).all()


def test_how_far_by_hand():
    assert minmax(2, "tokens", 4).error(np.array([-1, -0.2, 0.4, 2.0]).reshape(1, 4, 1)).ravel().tolist() == [0.5] * 4
    off = 0.1 - float(np.float16(0.1))
    assert minmax(2, "tokens", 4).error(np.full((1, 4, 1), 0.1)).ravel() == pytest.approx(
        [off] * 4
    )  # no step, and a rounded zero
    x = np.array([0.3, -0.7, 1.2, 0.55]).reshape(1, 1, 4)
    assert minmax(2, "channels", 4).error(x).ravel() == pytest.approx([1.9 / 6] * 4, abs=1e-3)


@given(groups, st.integers(1, 8))
@settings(deadline=None)
def test_coding_again_changes_nothing(x, bits):
    spread = (x.max(axis=1) - x.min(axis=1)) / (2**bits - 1)
    x = np.where(((spread > 0) & (spread < FINE))[:, None], 0.0, x)
    codec = minmax(bits, "tokens", 8)
    once = codec.roundtrip(x)
    assert np.array_equal(codec.roundtrip(once), once)


@given(groups)
@settings(deadline=None)
def test_groups_do_not_touch(x):
    per_channel, per_token = minmax(2, "tokens", 8), minmax(2, "channels", 2)
    for i, c in np.ndindex(len(x), x.shape[2]):
        assert np.array_equal(per_channel.roundtrip(x)[i, :, c], per_channel.roundtrip(x[i : i + 1, :, c : c + 1]).ravel())
    assert np.array_equal(per_token.roundtrip(x)[:, 3], per_token.roundtrip(x[:, 3:4])[:, 0])


def test_channels_are_grouped_within_a_token_and_the_last_group_may_be_short():
    x = np.array([0.0, 3.0, 10.0, 13.0, 7.0]).reshape(1, 1, 5)
    assert minmax(1, "channels", 2).roundtrip(x).ravel().tolist() == [0, 3, 10, 13, 7]
    assert minmax(1, "channels").roundtrip(x).ravel().tolist() == [0, 0, 13, 13, 13]


def test_sizes():
    assert minmax(2, "tokens", 32).tokens == 32
    assert minmax(2, "channels", 32).tokens == 1
    assert minmax(2, "tokens", 32).layout(128) == (256, 512)  # 2 bits x 128 a row; fp16 zero and step per channel
    assert minmax(4, "channels", 32).layout(100) == (400, 16)  # 3 whole groups and a short one
    assert minmax(4, "channels").layout(100) == (400, 4)


def test_words_that_a_group_does_not_fill_are_paid():
    """Eight tokens of 2 bits are half a word of 32 bits, 32 tokens are two whole ones; a row of 5 channels of 2 bits is one word."""
    short, whole = (minmax(2, "tokens", n, pack=32).encode(np.ones((1, n, 128))) for n in (8, 32))
    assert (short.bits.tolist(), short.group_meta.tolist()) == ([[256] * 8], [512 + 128 * 2])
    assert (whole.bits.tolist(), whole.group_meta.tolist()) == ([[256] * 32], [512])
    assert minmax(2, "channels", 5, pack=32).layout(10) == (64, 8)
    assert minmax(2, "tokens", 8).encode(np.ones((1, 8, 128))).group_meta.tolist() == [
        512
    ]  # packed along channels, nothing is wasted


@pytest.mark.parametrize("x", [[70000.0, 0.0], [-70000.0, -69990.0], [-60000.0, 60000.0]])
def test_what_fp16_cannot_hold_is_refused(x):
    with pytest.raises(WrongUse, match="fp16 zero or step"):
        minmax(1, "tokens", 2).roundtrip(np.array(x).reshape(1, 2, 1))
