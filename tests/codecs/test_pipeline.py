"""The pipeline of stages: what every combination of them must keep, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.codecs.clip import quantile
from kvsim.codecs.coded import encode, nominal_bits
from kvsim.codecs.floats import e4m3
from kvsim.codecs.lloyd_max import lloyd_max
from kvsim.codecs.minmax import minmax, uniform, zero_point
from kvsim.codecs.pipeline import grouped, pipeline
from kvsim.codecs.rotate import basis, hadamard
from kvsim.codecs.scale import channel_divisor, token_norm
from kvsim.kernels.rotate import drawn

D = 8


@dataclass(frozen=True)
class nothing:
    """A grid that loses nothing: what the other stages do alone."""

    bits = 16
    scale_bytes = 0

    def code(self, x, group):
        return x, 0


ROTATE = st.sampled_from([None, hadamard(), basis(drawn(D), 2)])
SCALE = st.sampled_from([None, token_norm(), token_norm(renormalise=True), channel_divisor()])
CLIP = st.sampled_from([None, quantile(0.96), quantile(0.5)])
GROUP = st.sampled_from([grouped(), grouped("channels", 3), grouped("tokens", 4), grouped("tokens")])
GRID = st.sampled_from(
    [uniform(2), uniform(4), zero_point(2), zero_point(3, "float16"), lloyd_max(3), e4m3(), e4m3(scaled=False)]
)
PACK = st.sampled_from([1, 8, 32])
STAGES = ("rotate", "scale", "clip", "group", "grid", "pack")
pipelines = st.builds(lambda *x: pipeline(**dict(zip(STAGES, x, strict=True))), ROTATE, SCALE, CLIP, GROUP, GRID, PACK)


def rows(m=3, many=4, seed=0):
    x = np.random.default_rng(seed).standard_normal((m, many, D))
    x[..., 2] *= 6
    return x


@given(ROTATE, SCALE)
@settings(deadline=None, max_examples=30)
def test_without_a_grid_every_number_comes_back(rotate, scale):
    """But for a norm that fp16 rounds."""
    x = rows()
    back = pipeline(rotate=rotate, scale=scale, grid=nothing()).roundtrip(x)
    off = 2.0**-11 if isinstance(scale, token_norm) else 1e-13
    assert (np.abs(back - x).max(axis=-1) <= off * np.linalg.norm(x, axis=-1)).all()


@given(ROTATE, SCALE, st.sampled_from([uniform, zero_point]))
@settings(deadline=None, max_examples=40)
def test_finer_grids_come_to_the_rows_themselves(rotate, scale, grid):
    x = rows()
    error = [np.abs(pipeline(rotate=rotate, scale=scale, grid=grid(bits)).roundtrip(x) - x).max() for bits in (2, 5, 8, 11)]
    assert error[0] > 4 * error[1] > 0
    assert error[1] > 2 * error[2] > 0
    assert error[3] <= 0.005 * np.abs(x).max()


@given(pipelines, st.integers(0, 9))
@settings(deadline=None, max_examples=150)
def test_encoding_is_a_pure_function_of_each_group(codec, seed):
    x = rows(seed=seed)
    x.setflags(write=False)
    together, again = codec.encode(x), codec.encode(x)
    assert together.values.shape == x.shape
    assert np.array_equal(together.values, again.values)
    alone = [codec.encode(x[i : i + 1]) for i in range(len(x))]
    assert np.array_equal(together.values, np.concatenate([c.values for c in alone]))
    for name in ("bits", "row_meta", "group_meta"):
        assert np.array_equal(getattr(together, name), np.concatenate([getattr(c, name) for c in alone]))


@given(pipelines)
@settings(deadline=None, max_examples=150)
def test_bytes_are_those_of_the_stages(codec):
    """Codes in whole words; a zero and a step, or what the grid has, for every group of numbers; what the scale keeps; the basis once."""
    coded = codec.encode(rows())
    words = {"channels": [3, 3, 2] if codec.group.size == 3 else [D], "tokens": [4] * D}[codec.group.axis]
    packed = sum(-(-n * codec.grid.bits // codec.pack) * codec.pack for n in words)
    scales = len(words) * codec.grid.scale_bytes
    own = {None: (0, 0), token_norm: (2, 0), channel_divisor: (0, 2 * D)}[codec.scale and type(codec.scale)]
    many = 1 if codec.group.axis == "tokens" else 4  # groups of numbers lie in a row, or across all four
    total = coded.bits.sum(axis=1) + 8 * (coded.row_meta.sum(axis=1) + coded.group_meta)
    assert (total == many * (packed + 8 * scales) + 8 * (4 * own[0] + own[1])).all()
    assert codec.once(D) == (4 * D * D // 2 if isinstance(codec.rotate, basis) else 0)
    assert nominal_bits(codec, D) == D * codec.grid.bits


@given(pipelines)
@settings(deadline=None, max_examples=60)
def test_layout_is_what_encoding_costs(codec):
    if codec.tokens:
        coded = codec.encode(rows(1, codec.tokens))
        unfilled = 0 if codec.group.axis == "channels" else codec._unfilled(codec.tokens, D)
        bits, meta = codec.layout(D)
        assert (coded.bits == bits).all()
        assert int(coded.row_meta.sum() + coded.group_meta[0]) == meta + unfilled
    assert encode(codec, rows()).values.shape == (3, 4, D)


def test_the_error_is_known_of_plain_steps_alone():
    """What an index of widened boxes rests on."""
    plain = minmax(2, "channels")
    assert plain.error is not None
    for name, stage in {"rotate": hadamard(), "scale": token_norm(), "clip": quantile(0.5), "grid": lloyd_max(2)}.items():
        assert replace(plain, **{name: stage}).error is None


def test_a_rotation_spreads_a_loud_channel_over_the_row():
    """What it is for: one step serves all numbers of a row."""
    x = np.random.default_rng(0).standard_normal((1, 64, 64))
    x[..., 5] *= 40
    plain, turned = (pipeline(rotate=r, grid=uniform(2)).roundtrip(x) for r in (None, hadamard()))
    assert ((turned - x) ** 2).mean() < ((plain - x) ** 2).mean() / 2


def test_zero_point_worked_by_hand():
    """The row of eight of OSCAR's card; with half of the sizes kept, -.4 lies on the middle of two codes, and either is as far off."""
    x = np.array([3, -0.4, 0.9, -1.1, 0.2, 0.6, -0.3, 0.1]).reshape(1, 1, 8)
    step, codes = 4.1 / 3, np.array([3, 1, 1, 0, 1, 1, 1, 1])
    for clip in (None, quantile(0.96)):  # int(.96 * 8) is the last: nothing is clipped
        coded = pipeline(clip=clip, grid=zero_point(2)).encode(x)
        assert coded.values.ravel() == pytest.approx(codes * step - 1.1, abs=1e-6)
        assert ((coded.values - x) ** 2).mean() == pytest.approx(0.16375, abs=1e-6)
    half = pipeline(clip=quantile(0.5), grid=zero_point(2)).roundtrip(x)
    assert ((half - x) ** 2).mean() == pytest.approx(0.77, abs=1e-6)
    assert half.ravel()[[0, 2, 3, 4, 5, 6, 7]] == pytest.approx([0.6, 0.6, -0.6, 0.2, 0.6, -0.2, 0.2], abs=1e-6)


@given(st.floats(-1000, 1000), st.floats(0, 1e-3), st.sampled_from(["float32", "float16"]))
@settings(deadline=None, max_examples=100)
def test_a_row_that_hardly_varies_comes_back(middle, width, store):
    """A point of -min / step that no float16 would hold, and a step that it would round to 0."""
    x = (middle + width * np.linspace(-1, 1, 8)).reshape(1, 1, 8)
    off = np.abs(pipeline(grid=zero_point(2, store)).roundtrip(x) - x)
    assert (off <= (2.0**-10 if store == "float16" else 2.0**-20) * np.abs(middle) + width + 1e-6).all()


def test_the_clip_moves_the_five_largest_of_128():
    x = np.random.default_rng(1).permutation(np.arange(1.0, 129)).reshape(1, 1, 128) * np.resize([1, -1], 128)
    got = quantile(0.96).apply(x)
    assert (got != x).sum() == 5
    assert np.abs(got).max() == 123
    assert np.array_equal(np.sign(got), np.sign(x))


def test_a_row_of_zeros_stays_one():
    for rotate in (None, hadamard()):
        codec = pipeline(rotate=rotate, scale=token_norm(), group=grouped("tokens", 2), grid=uniform(2))
        assert not codec.roundtrip(np.zeros((1, 2, 8))).any()
