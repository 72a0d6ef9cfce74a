"""Logits that observers share: each element is q·k of its row and position, and has the same bits whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import everything, qevict
from kvsim.engine import evolve
from kvsim.engine.bank import Bank
from kvsim.engine.evolve import Watch, share
from kvsim.engine.logits import Logits
from tests.engine.lanes import differing, lane, run

ROWS = 64


@pytest.fixture(scope="module")
def source():
    return lane(prompt=1100, steps=20, kv_heads=2, group=4, key_dim=64, dtype="float16")


def logits(source, wanted, start=3, count=16):
    found = Logits(source, ROWS)
    found.gather(start, count, wanted)
    for h in range(len(wanted)):
        found.multiply(h)
    return found


def some(source, part, seed):
    return np.random.default_rng(seed).random((2, source.request.total)) < part


def test_an_element_is_the_product_of_its_query_and_key(source):
    wanted = some(source, 0.3, 0)
    found = logits(source, wanted)
    for h, mine in enumerate(wanted):
        pos = np.flatnonzero(mine)
        q = source.queries(h, slice(3, 19)).reshape(-1, 64).astype(np.float64)
        want = q @ source.rows("k", h, pos).T
        assert np.allclose(found.dots[h][: len(q)][:, found.column[h, pos]], want, rtol=1e-12, atol=1e-12)


def test_an_element_has_the_same_bits_beside_more_positions(source):
    few, more = some(source, 0.05, 1), some(source, 0.9, 2)
    alone, beside = logits(source, few), logits(source, few | more)
    for h, mine in enumerate(few):
        pos = np.flatnonzero(mine)
        assert np.array_equal(alone.dots[h][:, alone.column[h, pos]], beside.dots[h][:, beside.column[h, pos]])


def test_a_block_leaves_nothing_behind_for_the_next(source):
    """Fewer positions and steps than the block before, whose arrays are used again."""
    again = logits(source, some(source, 0.9, 2))
    wanted = some(source, 0.4, 3)
    again.gather(7, 5, wanted)
    again.multiply(0)
    again.multiply(1)
    anew = logits(source, wanted, 7, 5)
    assert again.width == anew.width
    assert np.array_equal(again.column[wanted], anew.column[wanted])
    assert np.array_equal(again.dots[..., : anew.width], anew.dots)


def test_a_coded_row_that_died_changes_no_other(source):
    """Its column is that of no position."""
    bank = Bank(source, qevict().codecs)
    bank.valid[1, 5], bank.pos[1, 5], bank.key_blur[1, 4:6] = False, -1, True
    bank.record.decoded["k"] = np.full((2, source.request.total, 64), 99.0, np.float32)
    found = Logits(source, ROWS)
    bank.compact(16)
    share(found, [Watch(source, bank, everything())], 0, source.t[:16])
    want = source.rows("k", 1, np.arange(10))
    want[4] = 99
    live = [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert np.array_equal(found.keys[1, found.column[1, live]], want[live])


def test_nested_and_foreign_observers_decide_as_they_would_alone(source):
    policies = [
        *(f"h2o(hold=tokens({c}))" for c in (300, 90, 620)),
        "tova(hold=tokens(200))",
        "pools(hold=tokens(120), sinks=2, recent=50, heavy=68)",
        "h2o(hold=tokens(240)) >> quest(read=pages(3), page=16)",
        "h2o(hold=tokens(240)) >> kivi(group=16, residual=32)",
    ]
    for policy, tables in zip(policies, run(source, *policies, plans=True), strict=True):
        assert differing(run(source, policy, plans=True), tables) == [], policy


def test_tokens_between_captured_steps_are_there(monkeypatch):
    """Those born after the last step of one block and before the first of the next, too."""
    source, policy = lane(prompt=60, steps=120, kv_heads=2, group=4, key_dim=64, stride=3), "tova(hold=tokens(60))"
    blocks = run(source, policy)
    monkeypatch.setattr(evolve, "OBSERVED_ROWS", 640)  # all steps in one
    assert differing(blocks, run(source, policy)) == []
