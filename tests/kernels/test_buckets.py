"""Value sums by bucket against one row at a time in float64; and bits that depend on a row and its page alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels.buckets import NEAR, bucket_values
from kvsim.kernels.dense import LOG2E
from tests import naive

BUCKETS = 4


class Scene:
    """`steps` steps of `group` heads over n slots on pages of any length, each step with a window of what it sees."""

    def __init__(self, seed, steps, group, n, dim, pages, cap):
        rng = np.random.default_rng(seed)
        self.steps, self.group, self.unit, self.cap = steps, group, 0.25 * LOG2E, cap * LOG2E
        self.dots = rng.uniform(-9, 9, (n, steps * group + 2)).astype(np.float32)
        self.values = rng.standard_normal((n, dim)).astype(np.float32)
        self.first, self.last = np.sort(rng.integers(0, n, (2, steps)), axis=0)
        self.start = np.sort([0, n, *rng.integers(0, n + 1, pages - 1)])  # some pages are empty
        self.bucket = rng.integers(0, BUCKETS, (steps, group, pages)).astype(np.int32)
        self.logit = naive.bent(self.dots[:, : steps * group].T.astype(float), self.unit, self.cap)
        self.lse = np.array([naive.log_sum(row, -1e300) for row in self.logit])
        self.error = 4e-6 + 5e-7 * np.abs(self.dots).max() * self.unit

    def sums(self, i=0, stop=None, n=None):
        """Of the steps i ... stop - 1 alone, and of a trace cut after n slots."""
        rows = slice(i * self.group, None if stop is None else stop * self.group)
        sums = np.zeros((len(self.lse[rows]), BUCKETS, self.values.shape[1]))
        weight = np.zeros(sums.shape[:2])
        start = self.start if n is None else np.minimum(self.start, n)
        bucket_values(
            self.dots[:n, rows], self.values[:n], self.first[i:stop], self.last[i:stop], start, self.bucket[i:stop],
            np.float32(self.unit), np.float32(self.cap), self.lse[rows], sums, weight,
        )  # fmt: skip
        return sums, weight


scenes = st.builds(
    Scene,
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 4),
    group=st.integers(1, 9),
    n=st.sampled_from([1, 5, 60, NEAR, 2 * NEAR + 50]),
    dim=st.sampled_from([1, 6, 32, 70]),
    pages=st.sampled_from([1, 2, 40, 2 * NEAR]),
    cap=st.sampled_from([0.0, 0.0, 5.0]),
)


@given(scenes)
@settings(deadline=None, max_examples=60)
def test_value_sums_by_bucket(scene):
    of, at = np.repeat(scene.bucket, np.diff(scene.start), axis=2), np.arange(len(scene.dots))
    sums, weight = scene.sums()
    for r, b in np.ndindex(weight.shape):
        i, g = divmod(r, scene.group)
        mine = (of[i, g] == b) & (at >= scene.first[i]) & (at <= scene.last[i])
        p = np.exp2(scene.logit[r, mine] - scene.lse[r])
        assert np.allclose(weight[r, b], p.sum(), rtol=0, atol=scene.error)
        assert np.allclose(sums[r, b], p @ scene.values[mine].astype(float), rtol=0, atol=4 * scene.error)


@given(scenes)
@settings(deadline=None, max_examples=60)
def test_a_step_has_the_same_bits_alone_and_where_the_trace_ends_with_it(scene):
    sums, weight = scene.sums()
    for i in range(scene.steps):
        rows = slice(i * scene.group, (i + 1) * scene.group)
        for mine, z in (scene.sums(i, i + 1), scene.sums(i, i + 1, int(scene.last[i]) + 1)):
            assert (mine == sums[rows]).all()
            assert (z == weight[rows]).all()
