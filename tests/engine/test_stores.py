"""What the engine promises a store: its state beside the live slots, its attention, its widths, a bill of every row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvsim import kivi, qevict
from kvsim.codecs.coded import Coded
from kvsim.engine import evolve
from kvsim.errors import WrongUse
from kvsim.geometry import ATTENTION
from kvsim.policies.keep.h2o import h2o
from kvsim.policies.keep.streaming_llm import streaming_llm
from kvsim.policies.language import parse
from kvsim.policies.protocol import Codecs, State, Store
from kvsim.units import tokens
from tests.engine.lanes import by_step, lane, run


@dataclass(frozen=True)
class uneven:
    """Rows that cost as many bits as the size of their first number says, groups of whatever is coded at once."""

    factor: int = 1
    tokens = 0
    bits = 3

    def encode(self, x):
        bits = self.factor * (1 + np.abs(x[..., 0]).astype(np.int64))
        return Coded(x / 2, bits, np.full(bits.shape, 2), np.full(len(x), 100 * self.factor))

    def once(self, dim):
        return 7


@dataclass(frozen=True)
class watcher(Store):
    """Remembers where it first saw each row and all attention that it was shown; codes nothing."""

    codecs = Codecs(uneven(), None)
    needs = frozenset({ATTENTION})

    def start(self, prefix, seen):
        return State({"born": seen.pos + 1, "mass": np.zeros(seen.pos.shape)}, {"seen": []})

    def place(self, seen):
        slots = seen.state.slots
        new = seen.valid & (slots["born"] == 0)
        slots["born"][new] = seen.pos[new] + 1
        assert np.array_equal(slots["born"][seen.valid], seen.pos[seen.valid] + 1)
        assert (seen.a is None) == (seen.step < 0)
        if seen.a is not None:
            slots["mass"] += seen.a.sum(axis=1)
            seen.state.other["seen"].append(float(seen.a.sum()))
            assert (slots["mass"][seen.valid & (seen.pos != seen.t)] >= 0).all()
        none = np.zeros(seen.valid.shape, bool)
        return none, none


@pytest.mark.parametrize("keep", [streaming_llm(hold=tokens(9)), h2o(hold=tokens(12))])
def test_state_stays_beside_its_rows_through_evictions(keep, monkeypatch):
    monkeypatch.setattr(evolve, "OBSERVED_ROWS", 6)  # slots close ranks every third step
    got = run(lane(prompt=21, steps=10), keep >> watcher())
    assert (got["ledger"]["score_bytes"] > 0).all()


def test_attention_is_shown_and_billed_only_where_it_is_looked_at():
    @dataclass(frozen=True)
    class seldom(watcher):
        def looks(self, step):
            return step % 3 == 1

        def place(self, seen):
            assert (seen.a is None) == (seen.step % 3 != 1)
            return np.zeros((2, *seen.valid.shape), bool)

    run(lane(steps=7), h2o(hold=tokens(12)) >> seldom())  # beside one that looks at every step
    ledger = run(lane(steps=7), seldom())["ledger"]
    assert (by_step(ledger, "score_bytes") > 0).tolist() == [[False, True, False, False, True, False, False]] * 2


@dataclass(frozen=True)
class odd_even(Store):
    """After the prompt: even positions in the first width, odd ones in the second; every fourth step what waits, in the first."""

    codecs = Codecs((uneven(), uneven(2)), uneven())

    def place(self, seen):
        if seen.step >= 0 and seen.step % 4:
            return seen.k == 1, seen.v == 1
        return np.where(seen.valid, 1 + (seen.pos % 2 if seen.step < 0 else 0 * seen.pos), 0).astype(np.uint8), seen.valid


def test_rows_and_groups_cost_what_they_say():
    source = lane(prompt=11, steps=9, size=3.0, key_dim=4)
    ledger = run(source, odd_even() >> parse("recency(read=pages(2), page=3)").part("read"))["ledger"]
    lay = source.layer
    for h in range(lay.kv_heads):
        events = [
            [p for p in range(11) if p % 2 == 0],
            [p for p in range(11) if p % 2],
            [11],
            list(range(12, 16)),
            list(range(16, 20)),
        ]
        for i in range(9):
            t = 11 + i
            held = [*range(t + 1)]
            coded = [(e, 2 if n == 1 else 1) for n, e in enumerate(events) if e[-1] <= t]
            flat = {p for e, _ in coded for p in e}
            key_bits = sum(f * (1 + int(abs(source.k[h, p, 0]))) for e, f in coded for p in e)
            value_bits = sum(1 + int(abs(source.v[h, p, 0])) for p in flat)
            exact = len(set(held) - flat) * lay.row_bytes
            assert by_step(ledger, "resident_bytes")[h, i] == exact + key_bits // 8 + value_bits // 8
            shared = sum(100 * f for _, f in coded) + 100 * (len(coded) - 1)  # the values of the prompt are one group
            assert by_step(ledger, "meta_resident_bytes")[h, i] == 2 * 2 * len(flat) + shared + 2 * 7
            assert by_step(ledger, "coded_numbers")[h, i] == len(flat) * (lay.key_dim + lay.value_dim)
            assert by_step(ledger, "coded_nominal_bits")[h, i] == len(flat) * 3 * (lay.key_dim + lay.value_dim)


def test_tiers_tell_the_width_of_each_row():
    tiers = run(lane(prompt=4, steps=1), odd_even())["tiers"]
    first = tiers["runs"][0]
    assert [(r["start"], r["stop"], r["tier"], r["level"]) for r in first] == [
        (0, 1, 1, 1),
        (1, 2, 1, 2),
        (2, 3, 1, 1),
        (3, 4, 1, 2),
    ]


def test_a_width_that_is_not_there_is_refused():
    @dataclass(frozen=True)
    class third(odd_even):
        def place(self, seen):
            return np.full(seen.valid.shape, 3, np.uint8), np.zeros(seen.valid.shape, bool)

    with pytest.raises(WrongUse, match="a plan codes k rows at level 3, but the policy declares 2 codecs for them"):
        run(lane(), third())


def test_who_decides_itself_what_is_coded_has_no_store_beside_it():
    with pytest.raises(WrongUse, match="because it codes rows itself; leave out kivi"):
        qevict() >> kivi()
