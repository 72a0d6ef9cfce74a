"""Policies that differ only in their budget rank once, and get the rows they get alone; blocks share memory one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.conformance import lane
from kvsim.engine.attend import Dense
from kvsim.engine.reads import Reader
from kvsim.engine.run import Job, run_layer
from kvsim.policies.language import parse

SAME = (
    "quest(read=pages(2), page=4)",
    "quest(read=pages(5), page=4)",
    "quest(read=exact(r=3), page=4)",
    "quest(read=share(0.3), page=4)",
)


@pytest.fixture
def scored(monkeypatch):
    calls, inner = [], Reader.score
    monkeypatch.setattr(Reader, "score", lambda self, *args: calls.append(self.head) or inner(self, *args))
    return calls


def test_one_ranking_serves_every_budget_and_rule(scored):
    source = lane()
    together = run_layer(source, [Job(parse(p)) for p in SAME])
    assert scored == [0, 1, 2]  # once per kv head and block
    for policy, found in zip(SAME, together, strict=True):
        [alone] = run_layer(lane(), [Job(parse(policy))])
        for name in ("ledger", "heads", "curves"):
            for a, b in zip(alone[name], found[name], strict=True):
                assert a.keys() == b.keys()
                for column in a:
                    np.testing.assert_array_equal(a[column], b[column], err_msg=f"{policy} {name}.{column}")


@pytest.mark.parametrize(
    "other",
    ["quest(read=pages(2), page=8)", "quest(read=pages(2), page=4, sinks=4)", "quest(read=pages(2), page=4, index=boxes(n=2))"],
)
def test_what_ranks_otherwise_ranks_by_itself(scored, other):
    run_layer(lane(), [Job(parse(SAME[0])), Job(parse(other))])
    assert scored == [0, 0, 1, 1, 2, 2]


def test_nothing_of_a_block_is_used_once_it_has_left(monkeypatch):
    policies = (*SAME, "h2o(hold=tokens(12))", "streaming_llm(hold=tokens(12)) >> quest(read=pages(2), page=4)")
    want = [run_layer(lane(), [Job(parse(p)) for p in policies], explain=True, plans=True) for _ in range(2)][1]
    inner, where = Dense.leave, []

    def leave(block):
        where.append(block.memory.ctypes.data)
        block.memory[:] = np.nan
        inner(block)

    monkeypatch.setattr(Dense, "leave", leave)
    found = run_layer(lane(), [Job(parse(p)) for p in policies], explain=True, plans=True)
    assert len(where) > 1
    assert len(set(where)) == 1
    np.testing.assert_equal(found, want)
