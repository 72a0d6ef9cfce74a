"""The cut of single slots against sorting them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kernels.evict import survivors
from tests import naive

DRAWS = {
    "plain": lambda rng, s: rng.random(s),
    "ties": lambda rng, s: rng.integers(0, 3, s) / 2,
    "infinite": lambda rng, s: rng.choice([-np.inf, 0.0, np.inf], s),
}


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 40), st.integers(0, 45), st.sampled_from([*DRAWS]))
@settings(deadline=None, max_examples=150)
def test_the_protected_and_then_the_best_survive(seed, heads, n, spare, draw):
    """Limits from nothing to more than is held: one slot to drop, two, many, none."""
    rng = np.random.default_rng(seed)
    score = DRAWS[draw](rng, (heads, n))
    valid, protect = rng.random((heads, n)) < 0.8, rng.random((heads, n)) < 0.3
    limit = np.maximum(valid.sum(1) - rng.integers(0, spare + 1, heads), 0)
    keep = np.ones((heads, n), bool)
    survivors(score, protect, valid, limit, keep)
    for h in range(heads):
        live = np.flatnonzero(valid[h])
        most = max(int(limit[h]), int(protect[h, live].sum()))  # what is protected is not dropped for a limit
        assert np.flatnonzero(keep[h]).tolist() == live[naive.survivors(score[h, live], protect[h, live], most)].tolist()
