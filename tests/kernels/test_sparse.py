"""Attention over what was read, and what is counted of it, against one row at a time in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels import sparse
from kvsim.kernels.dense import LOG2E
from kvsim.kernels.sparse import ALIVE, KEY_BLUR, KEY_CODED, VALUE_BLUR, VALUE_CODED
from tests import naive

NO_SINK = -1e300


class Scene:
    """Slots at scattered positions, some of them dead at a step, some coded; pages over them; what every head chose."""

    def __init__(self, seed, steps, group, n, dim, size, cap, sinks, coded, ties):
        rng = np.random.default_rng(seed)
        self.rng, self.steps, self.group, self.rows, self.dim = rng, steps, group, steps * group, dim
        self.unit, self.cap = 0.25 * LOG2E, cap * LOG2E
        total = n + int(rng.integers(0, 20))
        self.pos = np.sort(rng.choice(total, n, replace=False))
        shape = (n, self.rows + 2)
        draw = (lambda: rng.integers(-3, 4, shape) * size / 3) if ties else (lambda: rng.uniform(-size, size, shape))
        self.dots, self.blurred = draw().astype(np.float32), draw().astype(np.float32)
        self.values, self.own_values = rng.standard_normal((2, total, dim)).astype(np.float32)
        self.flags = (rng.random((steps, n)) < 0.8).astype(np.uint8) * ALIVE
        if coded:
            for bit in (KEY_CODED, VALUE_CODED, KEY_BLUR, VALUE_BLUR):
                self.flags |= (rng.random((steps, n)) < 0.4).astype(np.uint8) * bit
        self.marks = (rng.random(n) < 0.3).astype(np.uint8)
        self.far = np.sort(rng.integers(0, total + 1, (steps, 2)), axis=1)
        cuts = np.sort(rng.choice(np.arange(1, n), min(n - 1, int(rng.integers(0, 6))), replace=False)) if n > 1 else []
        self.start = np.array([0, *cuts, n])
        self.page = np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))
        self.chosen = rng.random((steps, group, len(self.start) - 1)) < 0.7
        self.sink = np.where(sinks, rng.uniform(-size, size, shape[1]) * self.unit, NO_SINK)
        self.coded = coded
        seen = np.concatenate([np.repeat((self.flags & ALIVE) > 0, group, 0), np.zeros((2, n), bool)])
        x = naive.logits(self.dots, seen, self.unit, self.cap)
        self.lse = np.array([naive.log_sum(row, sink) for row, sink in zip(x, self.sink, strict=True)])
        self.error = 4e-6 + 5e-7 * max(np.abs(self.dots).max() * self.unit, np.abs(self.sink[self.sink > NO_SINK]).max(initial=0))

    def read(self, r):
        """The slots that row r reads."""
        i, g = divmod(r, self.group)
        return [s for s in range(len(self.pos)) if self.flags[i, s] & ALIVE and self.chosen[i, g, self.page[s]]]

    def attend(self):
        sums, out = np.zeros((self.rows, sparse.SUMS)), np.full((self.rows, self.dim), 7.0)
        exact, mixed = np.full((2, self.rows if self.coded else 0, self.dim), 7.0)
        sparse.attend(
            self.dots, self.blurred if self.coded else self.dots, self.values, self.own_values if self.coded else self.values,
            self.pos, self.flags, self.marks, self.far, self.start, self.chosen,
            np.float32(self.unit), np.float32(self.cap), self.lse, self.sink, sums, out, exact, mixed,
        )  # fmt: skip
        return sums, out, exact, mixed


scenes = st.builds(
    Scene,
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 4),
    group=st.integers(1, 9),
    n=st.integers(1, 60),
    dim=st.integers(1, 9),
    size=st.sampled_from([1.0, 8.0, 1600.0]),
    cap=st.sampled_from([0.0, 0.0, 5.0, 50.0]),
    sinks=st.booleans(),
    coded=st.booleans(),
    ties=st.booleans(),
)


@given(scenes)
@settings(deadline=None, max_examples=150)
def test_attention_over_what_was_read(scene):
    sums, out, exact, mixed = scene.attend()
    for r in range(scene.rows):
        i, slots = r // scene.group, np.array(scene.read(r), int)
        assert sums[r, sparse.TOKENS] == len(slots)
        if not len(slots) and scene.sink[r] == NO_SINK:
            assert not out[r].any()  # attention over nothing is nothing
            continue
        flags, pos = scene.flags[i, slots], scene.pos[slots]
        true = naive.bent(scene.dots[slots, r].astype(float), scene.unit, scene.cap)
        own = naive.bent(
            np.where(flags & KEY_BLUR, scene.blurred[slots, r], scene.dots[slots, r]).astype(float), scene.unit, scene.cap
        )
        values = scene.values[pos].astype(float)
        own_values = np.where((flags & VALUE_BLUR)[:, None] > 0, scene.own_values[pos], scene.values[pos]).astype(float)
        dense, own, *want = naive.attend(true, own, values, own_values, scene.lse[r], scene.sink[r])
        far, marked = (pos >= scene.far[i, 0]) & (pos < scene.far[i, 1]), scene.marks[slots] > 0
        masses = dense.sum(), dense[far].sum(), dense[marked].sum(), dense[(flags & KEY_CODED) > 0].sum(), own[marked].sum()
        assert np.allclose(sums[r, : sparse.TOKENS], masses, rtol=0, atol=scene.error)
        if own.sum() > 1e-20:
            read = own / own.sum()
            entropy = -(read * np.log2(np.where(read > 0, read, 1))).sum()
            assert sums[r, sparse.ENTROPY] == pytest.approx(entropy, abs=float(40 * scene.error))
        for got, x in zip((out, exact, mixed)[: 3 if scene.coded else 1], want, strict=False):
            assert np.allclose(got[r], x, rtol=0, atol=4 * scene.error)


# ------------------------------------------------------------------------------------------------ a policy's own softmax
@given(
    st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40),
    st.sampled_from([1.0, 2000.0]), st.sampled_from([0.0, 30.0]), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_own_softmax(seed, heads, group, n, size, cap, sinks, each):
    rng, width = np.random.default_rng(seed), -(-n // 8) * 8
    dots = rng.uniform(-size, size, (heads, 2 * group + 1, width))
    live = (rng.random((heads, width)) < 0.8) & (np.arange(width) < n)
    read = rng.random((heads, group if each else 1, width)) < 0.8
    sink = rng.uniform(-size, size, (heads, group)) if sinks else np.full((heads, group), NO_SINK)
    at = np.array([rng.permutation(width) for _ in range(heads)])
    a = np.full((heads, group, width), 7.0)
    sparse.own_softmax(dots, at, group, live, read, LOG2E / 4, cap, sink, a)
    for h, g in np.ndindex(heads, group):
        mine = live[h] & read[h, g if each else 0]
        x = naive.bent(dots[h, group + g, at[h]], LOG2E / 4, cap)
        z = naive.log_sum(x[mine], sink[h, g])
        assert np.allclose(a[h, g], np.where(mine, np.exp2(np.minimum(x - z, 0)), 0), rtol=1e-11, atol=1e-300)
        assert not a[h, g, ~mine].any()


# ------------------------------------------------------------------------------------------------ counts
@given(scenes)
@settings(deadline=None, max_examples=60)
def test_tally(scene):
    """Groups lie anywhere among each other; what a group shares is the same for all its rows."""
    union, n = scene.chosen.any(1), len(scene.pos)
    keys, values = scene.rng.integers(0, 9, (2, sparse.COSTS, n))
    for cost in (keys, values):
        cost[sparse.GROUP_META] = scene.rng.integers(0, 99, 9)[cost[sparse.GROUP]]
    flags = scene.flags | scene.rng.choice([0, sparse.KEY_KEPT, sparse.VALUE_KEPT], scene.flags.shape).astype(np.uint8)
    counts = np.zeros((scene.steps, sparse.COUNTS), np.int64)
    sparse.tally(flags, scene.start, union, keys, values, counts)
    want = [naive.tally(f, u, scene.page, keys.T.tolist(), values.T.tolist()) for f, u in zip(flags, union, strict=True)]
    assert counts.tolist() == want
