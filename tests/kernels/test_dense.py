"""The dense kernels against softmax written out, on every shape; and bits that depend on an element alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels import dense
from kvsim.kernels.dense import LOG2E, NONE, PAGE, ROWS, TILE
from kvsim.kernels.order import FEW
from kvsim.kernels.product import GRID
from tests import naive

NO_SINK = -1e300


class Scene:
    """Dot products of `steps` queries of `group` heads over n tokens, as a block has them: the rows beyond are padding, and each step sees
    a window of tokens with holes in it."""

    def __init__(self, seed, steps, group, n, size, ties, cap, sinks, holes, padding):
        rng = np.random.default_rng(seed)
        self.group, self.rows, self.unit, self.cap = group, steps * group, 0.25 * LOG2E, cap * LOG2E
        shape = (n, self.rows + padding)
        self.dots = (rng.integers(-3, 4, shape) * size / 3 if ties else rng.uniform(-size, size, shape)).astype(np.float32)
        last, window = np.sort(rng.integers(0, n, steps)), int(rng.integers(1, n + 1))
        at = np.arange(n)
        seen = (at <= last[:, None]) & (at > last[:, None] - window) & (rng.random((steps, n)) >= holes * rng.random())
        self.flags, self.every = seen.astype(np.uint8), seen.all(0).astype(np.uint8)
        self.seen = np.repeat(seen, group, 0)
        self.sink = np.where(sinks, rng.uniform(-size, size, shape[1]) * self.unit, NO_SINK)
        cuts = np.sort(rng.choice(np.arange(1, n), min(n - 1, int(rng.integers(0, 6))), replace=False)) if n > 1 else []
        self.start = np.array([0, *cuts, n])

    @property
    def logits(self):
        return naive.logits(self.dots[:, : self.rows], self.seen, self.unit, self.cap)

    @property
    def error(self):
        """What float32 may add to a probability: the last bits of the largest logit, as a factor."""
        most = max(abs(self.unit) * np.abs(self.dots).max(), np.abs(self.sink[self.sink > NO_SINK]).max(initial=0))
        return 2e-6 + 2.5e-7 * most

    def stats(self, kernel=dense.page_stats32, kind=np.float32):
        peak, mass = np.full((2, len(self.start) - 1, self.dots.shape[1]), 7, kind)
        dots = self.dots.astype(kind)
        kernel(dots, self.flags, self.every, self.start, self.group, kind(self.unit), kind(self.cap), peak, mass)
        return peak, mass

    def lse(self):
        out = np.full(self.dots.shape[1], 7.0)
        dense.denominator(*self.stats(), self.sink, np.float32(self.unit), np.float32(self.cap), out)
        return out


def scenes_of(holes=0.2):
    return st.builds(
        Scene,
        seed=st.integers(0, 2**32),
        steps=st.integers(1, 5),
        group=st.integers(1, 9),
        n=st.integers(1, 70),
        size=st.sampled_from([1.0, 8.0, 1600.0]),  # 1600 / 4: logits of +-400
        ties=st.booleans(),
        cap=st.sampled_from([0.0, 0.0, 5.0, 50.0]),
        sinks=st.booleans(),
        holes=st.just(holes),
        padding=st.integers(0, 9),
    )


scenes = scenes_of()


# ------------------------------------------------------------------------------------------------ softmax
@given(scenes)
@settings(deadline=None, max_examples=80)
def test_page_statistics(scene):
    want_peak, want_mass = naive.page_stats(scene.dots[:, : scene.rows], scene.seen, scene.start, scene.unit, scene.cap)
    for kernel, kind, error in ((dense.page_stats32, np.float32, scene.error), (dense.page_stats64, np.float64, 1e-12)):
        peak, mass = (x[:, : scene.rows] for x in scene.stats(kernel, kind))
        assert np.array_equal(np.where(want_peak == None, kind(NONE), want_peak).astype(kind), peak)  # noqa: E711
        assert np.allclose(mass, want_mass, rtol=error, atol=0)


@given(scenes)
@settings(deadline=None, max_examples=80)
def test_denominator_and_probability(scene):
    lse, x = scene.lse(), scene.logits
    want = [naive.log_sum(row, sink) for row, sink in zip(x, scene.sink, strict=False)]
    assert np.allclose(lse[: scene.rows], want, rtol=0, atol=scene.error)
    assert np.isfinite(lse).all()
    peak, mass = scene.stats()
    unit, cap = np.float32(scene.unit), np.float32(scene.cap)
    logit, out = np.full((2, len(peak), scene.rows), 7, np.float32)
    turned = np.full((scene.rows, len(peak)), 7.0)
    dense.probability(peak, mass, lse, unit, cap, logit, out)
    dense.probability_by_row(peak, mass, lse, unit, cap, turned)
    sums = [np.exp2(x[:, a:b] - np.array(want)[:, None]).sum(1) for a, b in zip(scene.start, scene.start[1:], strict=False)]
    assert np.allclose(out, sums, rtol=scene.error, atol=1e-7)
    assert (out == turned.T).all()
    tops = [x[:, a:b].max(1) for a, b in zip(scene.start, scene.start[1:], strict=False)]
    assert np.allclose(logit * dense.LOG2E, tops, rtol=1e-6, atol=1e-6)


@given(scenes_of(holes=0.0), st.integers(1, 9), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_mass_between_positions(scene, page, seed):
    rng, n = np.random.default_rng(seed), len(scene.dots)
    p = np.exp2(scene.logits - scene.lse()[: scene.rows, None])
    steps = scene.seen[:: scene.group]
    low = np.maximum(rng.integers(0, n + 1, len(steps)), steps.argmax(1))
    high = np.minimum(rng.integers(0, n + 1, len(steps)), n - steps[:, ::-1].argmax(1))
    out = np.zeros(scene.dots.shape[1])
    whole = np.add.reduceat(p, np.arange(0, n, page), axis=1)
    dense.range_mass(scene.dots, whole, page, low, high, scene.group, scene.unit, scene.cap, scene.lse(), out)
    want = [p[r, low[r // scene.group] : high[r // scene.group]].sum() for r in range(scene.rows)]
    assert np.allclose(out[: scene.rows], want, rtol=1e-9, atol=1e-12)
    assert not out[scene.rows :].any()


@given(scenes)
@settings(deadline=None, max_examples=60)
def test_weights(scene):
    top, out = scene.lse().astype(np.float32), np.full(scene.dots.shape, 7, np.float32)
    dense.weights(scene.dots, scene.flags, scene.every, scene.group, np.float32(scene.unit), np.float32(scene.cap), top, out)
    want = np.exp2(scene.logits - top[: scene.rows, None].astype(float))
    assert np.allclose(out[:, : scene.rows].T, want, rtol=scene.error, atol=1e-30)
    assert not out[:, scene.rows :][scene.every == 0].any()


def test_bend_is_a_scale_and_a_soft_cap():
    x = np.array([-4.0, 0.0, 4.0])
    assert dense.bend(x, 0.5, 0.0).tolist() == [-2, 0, 2]
    assert np.allclose(dense.bend(x, 0.5, 3.0), 3 * np.tanh(x / 6))


# ------------------------------------------------------------------------------------------------ whole blocks
def tiles(seed, n, rows, dim=8):
    """Keys f32[n padded to TILE, d] and queries f32[rows padded to GRID, d]."""
    rng = np.random.default_rng(seed)
    keys = np.zeros((dense.padded(n, TILE), dim), np.float32)
    keys[:n] = rng.standard_normal((n, dim))
    return keys, dense.block(rng.standard_normal((rows, dim)).astype(np.float32))


@pytest.mark.parametrize(("n", "m", "want"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (513, 512, 1024)])
def test_padded(n, m, want):
    assert dense.padded(n, m) == want


def test_what_is_visible():
    first, last = np.array([0, 2, 5]), np.array([4, 4, 6])
    flags, every = dense.visible(first, last, 8)
    at = np.arange(8)
    want = (first[:, None] <= at) & (at <= last[:, None])
    assert np.array_equal(flags, want)
    assert not every.any()
    flags, every = dense.visible(first[:2], last[:2], 8)
    assert np.array_equal(every, want[:2].all(0))


def test_a_block_is_padded_with_zero_rows():
    rows = np.ones((GRID + 1, 3), np.float32)
    assert dense.block(rows).shape == (2 * GRID, 3)
    assert dense.block(rows, 3 * GRID - 1).shape == (3 * GRID, 3)
    assert dense.block(rows).sum() == rows.sum()
    assert dense.block(rows[:0]).shape == (GRID, 3)


@pytest.mark.parametrize(("n", "rows", "dim"), [(1, 1, 3), (TILE, ROWS, 8), (TILE + 1, 300, 16), (1100, 7, 5)])
def test_a_scan_is_products_and_page_statistics(n, rows, dim):
    keys, q = tiles(0, n, rows, dim)
    flags = (np.arange(len(keys)) < n)[None].astype(np.uint8)
    dots, stats = np.empty((len(keys), len(q)), np.float32), np.empty((2, len(keys) // PAGE, len(q)), np.float32)
    dense.scan(keys, q, flags, flags[0], len(q), 0.3, 0.0, dots, *stats)
    assert np.array_equal(dots, dense.products(keys, q, np.empty_like(dots)))
    assert np.allclose(dots, keys.astype(float) @ q.T.astype(float), atol=1e-5)
    start = np.arange(0, len(keys) + 1, PAGE)
    peak, mass = naive.page_stats(dots[:, :3], np.repeat(flags, 3, 0).astype(bool), start, 0.3, 0.0)
    assert np.array_equal(np.where(peak == None, NONE, peak).astype(np.float32), stats[0][:, :3])  # noqa: E711
    assert np.allclose(stats[1][:, :3], mass, rtol=2e-6)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("n", [1, dense.NEAR, TILE + 17])
def test_a_scan_of_keys_as_stored_is_that_of_padded_ones(n, kind):
    """Products of tokens that are not there are 0, and where products are not kept the statistics are the same."""
    keys, q = tiles(0, n, 5, 8)
    if kind == np.float16:
        keys = keys.astype(kind).astype(np.float32)
    elif kind == np.uint16:
        keys = (keys.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    raw = (keys.view(np.uint32) >> 16).astype(kind)[:n] if kind == np.uint16 else keys[:n].astype(kind)
    flags = (np.arange(len(keys)) < n)[None].astype(np.uint8)
    got = []
    for rows, room in ((keys, len(keys)), (raw, len(keys)), (raw, dense.NEAR)):
        dots, stats = np.full((room, len(q)), np.nan, np.float32), np.empty((2, len(keys) // PAGE, len(q)), np.float32)
        dense.scan(rows, q, flags, flags[0], len(q), 0.3, 0.0, dots, *stats)
        got.append((dots, stats))
    assert not got[1][0][n:].any()
    assert np.array_equal(got[1][0], got[0][0])
    assert np.array_equal(got[1][1], got[0][1])
    assert np.array_equal(got[2][1], got[0][1])


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_an_output_has_the_same_bits_whatever_rows_stand_beside_it(cap):
    keys, q = tiles(3, TILE + 40, ROWS, 64)
    values = np.random.default_rng(3).standard_normal((len(keys), 64)).astype(np.float32)
    flags, every = np.ones((2, ROWS, len(keys)), np.uint8)
    dots, lse = dense.products(keys, q, np.empty((len(keys), len(q)), np.float32)), np.linspace(3.0, 9.0, ROWS)
    whole = dense.output(dots, values, flags, every[0], 1, 0.2, cap, lse)
    some = np.array([0, 5, 6, 7, 100, 250, ROWS - 1])
    few, near = np.zeros((len(keys), GRID), np.float32), np.zeros(GRID)
    few[:, : len(some)], near[: len(some)] = dots[:, some], lse[some]
    got = dense.output(few, values, flags[:GRID], every[0], 1, 0.2, cap, near)
    assert np.array_equal(got[: len(some)], whole[some])


seeds, few, groups, tokens = st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9), st.integers(1, 700)


@given(seeds, few, groups, tokens, st.integers(1, 6), st.sampled_from([0.0, 2.0, 9.0]), st.sampled_from([1, 40]))
@settings(deadline=None, max_examples=25)
def test_output(seed, steps, group, n, value_dim, cap, size):
    keys, q = tiles(seed, n, steps * group)
    q *= size
    rng = np.random.default_rng(seed)
    values = np.zeros((len(keys), value_dim), np.float32)
    values[:n] = rng.standard_normal((n, value_dim))
    last = rng.integers(0, n, steps)
    seen = (np.arange(len(keys)) <= last[:, None]) & (np.arange(len(keys)) > last[:, None] - rng.integers(1, n + 1))
    flags, every, unit, cap = seen.astype(np.uint8), seen.all(0).astype(np.uint8), 0.5 * LOG2E, cap * LOG2E
    dots = dense.products(keys, q, np.empty((len(keys), len(q)), np.float32))
    x = naive.logits(dots[:, : steps * group], np.repeat(seen, group, 0), unit, cap)
    lse = np.zeros(len(q))
    lse[: steps * group] = [naive.log_sum(row, NO_SINK) for row in x]
    got = dense.output(dots, values, flags, every, group, unit, cap, lse)[: steps * group]
    want = np.exp2(x - lse[: steps * group, None]) @ values.astype(float)
    assert np.allclose(got, want, atol=1e-5 + 1e-6 * np.abs(x[np.isfinite(x)]).max())


# ------------------------------------------------------------------------------------------------ the strongest tokens
@pytest.mark.parametrize("pages", [10, 65, FEW, 2 * FEW - 1, 2 * FEW, 5 * FEW + 3])
@pytest.mark.parametrize("keep", [1, 10, 64])
@pytest.mark.parametrize("kind", ["plain", "ties", "together"])
def test_the_floor_of_many_pages(pages, keep, kind):
    rng = np.random.default_rng(pages)
    peak = rng.standard_normal((pages, 40)).astype(np.float32)
    if kind == "ties":
        peak = np.sign(peak)
    if kind == "together":  # the largest are neighbours, which count as one at first
        peak = np.sort(peak, axis=0)
    error = np.full(40, 0.25, np.float32)
    found = dense.floors(peak, keep, error)
    if pages <= keep:
        assert (found == NONE / 2).all()
        return
    want = np.sort(peak, axis=0)[-keep] - 2 * error
    assert (found <= want).all()
    if pages < 2 * FEW:
        assert (found == want).all()
    assert (found > want - 3).all()


@given(seeds, few, groups, tokens, st.sampled_from([1, 10, 64]), st.sampled_from(["plain", "ties", "close"]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_the_strongest_tokens_are_those_of_float64(seed, steps, group, n, many, kind, whole):
    """Random keys, keys that tie, and keys so close that float32 products swap them; over tokens, or over a part of them as slots."""
    rng = np.random.default_rng(seed)
    keys, q = tiles(seed, n, steps * group)
    if kind == "ties":
        keys[:n], q[: steps * group] = rng.integers(-1, 2, keys[:n].shape), rng.integers(-1, 2, q[: steps * group].shape)
    if kind == "close":
        keys[:n] = keys[0] * (1 + rng.integers(-4, 5, (n, 1)) * np.float32(2**-22))
    last, window, at = rng.integers(0, n, steps), rng.integers(1, n + 1), np.arange(len(keys))
    flags = ((at <= last[:, None]) & (at > last[:, None] - window)).astype(np.uint8)
    dots = dense.products(keys, q, np.empty((len(keys), len(q)), np.float32))
    longest = float(np.linalg.norm(keys, axis=1).max())
    if not whole:
        pos = np.flatnonzero((rng.random(len(keys)) < 0.6) & flags.any(0))
        keys, dots, flags = keys[pos], dots[pos], np.ascontiguousarray(flags[:, pos])
    every, start = flags.all(0).astype(np.uint8), np.append(np.arange(0, len(keys), PAGE), len(keys))
    stats = np.empty((2, len(start) - 1, len(q)), np.float32)
    dense.page_stats32(dots, flags, every, start, group, np.float32(1), np.float32(0), *stats)
    best, count = dense.best_tokens(dots, flags, every, start, stats[0], keys, q, group, longest, many)
    value = dense.true_dots(keys, q, best)
    for r in range(steps * group):
        score = keys.astype(float) @ q[r].astype(float)
        want, got = naive.best_tokens(score, flags[r // group], many), best[r, : count[r]].tolist()
        assert len(got) == len(want)
        assert np.allclose(score[got], score[want], rtol=0, atol=1e-13)
        assert np.allclose(value[r, : count[r]], score[want], rtol=0, atol=1e-13)
        if kind != "close":  # of nearer ties than this a sum in another order swaps two
            assert got == want


def test_no_token_below_the_floor_is_among_the_best():
    peak = np.array([[3.0], [1.0], [2.0], [NONE]], np.float32)
    assert dense.floors(peak, 2, np.array([0.25], np.float32)).tolist() == [1.5]
    assert dense.floors(peak, 1, np.array([0.0], np.float32)).tolist() == [3]
    assert dense.floors(peak, 4, np.array([0.25], np.float32)) == np.float32(NONE / 2)
