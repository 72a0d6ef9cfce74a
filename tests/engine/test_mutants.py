"""The engine is broken on purpose, one way at a time, and must then disagree with the engine written out (twin.py)."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.engine import account, attend, evolve, reads
from kvsim.engine.bank import Bank
from tests.engine.lanes import chain, lane, run
from tests.engine.test_twin import compare
from tests.engine.twin import Twin

H2O = "h2o(hold=tokens(20), recent=0.3)"
QUEST = f"{H2O} >> quest(read=pages(2), page=4)"
KIVI = "tova(hold=tokens(24)) >> kivi(group=4, residual=4, bits=2) >> oracle(read=pages(3), page=4)"


def shifted_position(monkeypatch):
    """A new token joins one position early."""
    append = Bank.append
    monkeypatch.setattr(Bank, "append", lambda self, t: append(self, t - (t == 45)))


def dead_score_kept(monkeypatch):
    """When slots close ranks, scores stay where they were."""
    compact = Bank.compact

    def stale(self, room):
        state, n = dict(self.state.slots), int(self.valid[:, : self.n].sum(1).max())
        compact(self, room)
        self.state.slots = {name: x[:, :n] for name, x in state.items()}

    monkeypatch.setattr(Bank, "compact", stale)


def stale_page_map(monkeypatch):
    """Pages are those of the first call, as far as slots still fit them."""
    pages_of, first = reads.pages_of, {}

    def stale(pos, size):
        old, now = first.setdefault(size, pages_of(pos, size)), pages_of(pos, size)
        start = np.minimum(old.start, len(pos))
        return type(now)(old.id, np.append(start[:-1], len(pos)), size)

    monkeypatch.setattr(reads, "pages_of", stale)


def row_that_stays(monkeypatch):
    """One row is never dropped."""
    drop = Bank.drop
    monkeypatch.setattr(Bank, "drop", lambda self, gone: drop(self, gone & (self.pos[:, : self.n] != 11)))


def read_not_observed(monkeypatch):
    """A keep sees attention over all it holds, though its read part loaded some of it."""
    watch = evolve.Watch.__init__

    def unaware(self, *args):
        watch(self, *args)
        self.readers = None

    monkeypatch.setattr(evolve.Watch, "__init__", unaware)


def codes_of_the_wrong_rows(monkeypatch):
    """Decoded keys are those of the position before."""
    encode = Bank._encode

    def moved(self, side, *args):
        encode(self, side, *args)
        self.record.decoded[side] = np.roll(self.record.decoded[side], 1, axis=1)

    monkeypatch.setattr(Bank, "_encode", moved)


def scale_forgotten(monkeypatch):
    """Groups cost their codes, not their scales."""
    row_bytes = account.row_bytes
    monkeypatch.setattr(account, "row_bytes", lambda *args: (lambda rows, meta: (rows, 0 * meta))(*row_bytes(*args)))


def denominator_without_the_sink(monkeypatch):
    """A learned sink takes no part of the softmax."""
    attended = attend.attend

    def drained(block, *args):
        block.sink = np.full_like(block.sink, attend.NO_SINK)
        return attended(block, *args)

    monkeypatch.setattr("kvsim.engine.run.attend", drained)


MUTANTS = [
    (shifted_position, H2O),
    (dead_score_kept, H2O),
    (stale_page_map, QUEST),
    (row_that_stays, H2O),
    (read_not_observed, QUEST),
    (codes_of_the_wrong_rows, KIVI),
    (scale_forgotten, KIVI),
    (denominator_without_the_sink, H2O),
]


def agrees(policy):
    source = lane(prompt=40, steps=40, kv_heads=2, group=2, size=3.0, sinks=True)
    twin = Twin(source, chain(policy))
    assert twin.margin > 1e-9
    compare(source, twin, run(source, policy, plans=True))


@pytest.mark.parametrize("policy", sorted({policy for _, policy in MUTANTS}))
def test_the_engine_agrees(policy):
    agrees(policy)


@pytest.mark.parametrize(("mutate", "policy"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_a_broken_engine_does_not(monkeypatch, mutate, policy):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        agrees(policy)
