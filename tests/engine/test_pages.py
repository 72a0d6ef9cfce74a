"""Page tables: counts and states of pages over a block of steps, looked up slot by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.engine.pages import pages_of, versions
from kvsim.kernels.sparse import ALIVE, KEY_BLUR


@st.composite
def blocks(draw):
    """(slots at pos [n], flags u8[N, n], t [N], page size): steps that change everything, a little, or nothing."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    total, steps, size = draw(st.integers(1, 60)), draw(st.integers(1, 9)), draw(st.integers(1, 6))
    pos = np.sort(rng.choice(total, int(rng.integers(1, total + 1)), replace=False))
    flags = rng.integers(0, 128, (steps if draw(st.booleans()) else 1, len(pos))).astype(np.uint8)
    flags = np.broadcast_to(flags, (steps, len(pos))).copy()
    for _ in range(draw(st.integers(0, 3))):
        flags[rng.integers(steps) :, rng.integers(len(pos))] = rng.integers(0, 128)
    return pos, flags, np.sort(rng.choice(total + steps + 3, steps, replace=False)), size


def state(pos, flags, t, size, page, matter):
    """What a page is at a step: its rows (position, read decoded), and whether it is closed."""
    rows = [(int(p), bool(f & matter & KEY_BLUR)) for p, f in zip(pos, flags, strict=True) if p // size == page and f & ALIVE]
    return rows, (page + 1) * size - 1 <= t


@given(blocks())
@settings(deadline=None, max_examples=80)
def test_live_rows_are_counted_slot_by_slot(block):
    pos, flags, _, size = block
    pages = pages_of(pos, size)
    want = [
        [sum(1 for p, f in zip(pos, row, strict=True) if p // size == page and f & ALIVE) for page in pages.id] for row in flags
    ]
    assert pages.rows(flags).tolist() == want


@pytest.mark.parametrize("matter", [ALIVE, ALIVE | KEY_BLUR])
@given(block=blocks())
@settings(deadline=None, max_examples=80)
def test_a_version_is_the_state_of_its_page(matter, block):
    pos, flags, t, size = block
    pages = pages_of(pos, size)
    seen = versions(pages, flags, t, matter)
    assert seen.page[: len(pages.id)].tolist() == [*range(len(pages.id))]  # the states at the first step come first
    of = seen.by_step(np.arange(len(seen.page)))
    for i, now in enumerate(t):
        for p, page in enumerate(pages.id):
            v = of[i, p]
            valid = seen.valid[v]
            told = [(int(a), bool(b)) for a, b in zip(pos[seen.slot[v][valid]], seen.blurred[v][valid], strict=True)]
            assert (told, bool(seen.closed[v])) == state(pos, flags[i], now, size, page, matter)
            assert seen.page[v] == p
            if i and state(pos, flags[i], now, size, page, matter) == state(pos, flags[i - 1], t[i - 1], size, page, matter):
                assert v == of[i - 1, p] or (flags[i] != flags[i - 1])[pos // size == page].any()
    assert len(seen.page) == len(np.unique(of))  # none that no step is in
    assert (np.diff(of, axis=0) >= 0).all()
