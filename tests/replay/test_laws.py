"""Every law of --strict holds for real tables, and each is noticed when it is broken."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from kvsim.errors import BadTrace, BrokenLaw
from kvsim.policies.language import parse_policy
from kvsim.replay import laws
from kvsim.replay.asked import resolve
from kvsim.replay.laws import Rows, check_laws, check_masses
from kvsim.replay.run import replay
from kvsim.replay.work import Work
from kvsim.synth.generate import synthesize
from tests.replay.conftest import POLICIES
from tests.trace import forge

QUEST, _, CHAIN, TOVA, STREAM, KIVI = POLICIES
FULL, MOMENTS = "full()", "h2o(hold=tokens(12)) >> evicted_moments()"


@pytest.fixture(scope="module")
def tables(trace, tmp_path_factory):
    """{policy: its Arrow tables of request 0, layer 0}"""
    from kvsim.replay.parts import Parts, read_part

    policies = (*POLICIES, FULL, MOMENTS)
    parts = Parts(tmp_path_factory.mktemp("parts"), "key")
    Work(trace, resolve(trace, policies, plans=True, explain=True), parts).do((0, 0))
    return dict(zip(policies, read_part(parts, (0, 0)), strict=True))


def check(trace, tables, policy, monkeypatch=None, broken=None, shared=False):
    """Checks the tables of a policy after `broken` = (table, {column: change}) was applied to them; shared: rows are those of all heads."""
    if broken is not None:
        name, changes = broken
        read = laws.rows_of

        def altered(policy, table, rows):
            found = read(policy, table, rows)
            if table == name:
                changed = {column: change(found.columns[column]) for column, change in changes.items()}
                found = Rows(policy, table, {**found.columns, **changed})
            return found

        monkeypatch.setattr(laws, "rows_of", altered)
    layer = trace.layers[0].billed("float16", "float16")
    if shared:
        layer = replace(layer, shared_row_bytes=layer.kv_heads * layer.row_bytes)
    check_laws(parse_policy(policy), trace.requests[0], layer, tables[policy])


@pytest.mark.parametrize("policy", [*POLICIES, FULL, MOMENTS])
def test_the_laws_hold(trace, tables, policy):
    check(trace, tables, policy)


def test_strict_checks_while_replaying(trace, monkeypatch):
    seen = []
    monkeypatch.setattr("kvsim.replay.work.check_laws", lambda *args: seen.append(args))
    replay(trace, POLICIES[:2], strict=True, workers=1)
    assert len(seen) == 2 * 4
    seen.clear()
    replay(trace, POLICIES[:2], workers=1)
    assert not seen


ROW = 5


def plus(by, rows=slice(ROW, ROW + 1)):
    """Adds to one row, or to several."""

    def change(x):
        x = x.copy()
        x[rows] += by
        return x

    return change


def put(value):
    """Replaces one row."""

    def change(x):
        x = list(x)
        x[ROW] = value
        return x if isinstance(value, list) else np.array(x, float)

    return change


RUN = {"start": 0, "stop": 4, "tier": 2, "level": None}
FROM = slice(ROW, None)
BROKEN = [
    (QUEST, "ledger", {"evicted_tokens": plus(1)}, "visible = held + evicted + tokens only on the host"),
    (QUEST, "ledger", {"evicted_tokens": plus(-1)}, "visible = held + evicted + tokens only on the host"),
    (QUEST, "ledger", {"full_tokens": plus(-1)}, "held = full + quantised"),
    (QUEST, "ledger", {"read_tokens": put(0)}, "a step reads at least one token, and none that is not visible"),
    (QUEST, "ledger", {"read_tokens": put(90)}, "a step reads at least one token, and none that is not visible"),
    (QUEST, "ledger", {"index_bytes": put(-1)}, "no count of bytes is negative"),
    (
        STREAM,
        "ledger",
        {"held_tokens": plus(2, FROM), "full_tokens": plus(2, FROM), "evicted_tokens": plus(-2, FROM)},
        "only the new token joins what is held",
    ),
    (STREAM, "ledger", {"read_tokens": put(30)}, "a step reads what was held and its own token"),
    (
        STREAM,
        "ledger",
        {"held_tokens": plus(-5), "full_tokens": plus(-5), "evicted_tokens": plus(5), "visible_tokens": plus(0)},
        "only the new token joins what is held",
    ),
    (KIVI, "ledger", {"evicted_tokens": plus(5), "visible_tokens": plus(5)}, "what is gone stays gone"),
    (
        STREAM,
        "ledger",
        {"held_tokens": plus(1, slice(None)), "full_tokens": plus(1, slice(None)), "evicted_tokens": plus(-1, slice(None))},
        "no more is held than the budget",
    ),
    (QUEST, "ledger", {"resident_bytes": plus(64)}, "held rows cost no more than exact ones"),
    (QUEST, "ledger", {"resident_bytes": plus(-64)}, "held rows cost row_bytes each"),
    (QUEST, "ledger", {"read_bytes": plus(64)}, "rows read cost no more than exact ones"),
    (QUEST, "ledger", {"read_bytes": plus(-64)}, "rows read cost row_bytes each"),
    (QUEST, "ledger", {"write_bytes": put(63)}, "every step writes its own row"),
    (QUEST, "ledger", {"meta_bytes": plus(1)}, "without a codec nothing is quantised"),
    (QUEST, "ledger", {"read_pages": put(1)}, "pages read hold the tokens read"),
    (QUEST, "ledger", {"page_bytes": plus(1)}, "page_bytes = pages read, whole"),
    (QUEST, "ledger", {"read_runs": put(0)}, "runs are made of pages"),
    (QUEST, "heads", {"mass_unread": plus(1e-3)}, "the four masses sum to 1"),
    (QUEST, "heads", {"far_mass": put(1.5)}, "far_mass is between 0 and 1"),
    (QUEST, "heads", {"mass_recall": plus(-2), "mass_unread": plus(2)}, "mass_recall is between 0 and 1"),
    (KIVI, "heads", {"mass_host": put(0.9), "mass_quant": put(0.9)}, "quantised and host mass are parts of what is recalled"),
    (QUEST, "heads", {"far_recall": put(1.01)}, "far recall is at most 1"),
    (QUEST, "heads", {"evidence_read": put(1)}, "evidence read is a part of the evidence"),
    (QUEST, "heads", {"mass_evicted": put(0.01), "mass_unread": plus(-0.01)}, "without a hold budget no mass is evicted"),
    (QUEST, "heads", {"read_tokens": put(61)}, "a head reads no more than its group"),
    (FULL, "heads", {"mass_recall": plus(-0.1), "mass_unread": plus(0.1)}, "who reads all that is visible misses nothing"),
    (FULL, "heads", {"top64_recall": put(0.5)}, "who reads all that is visible has every top token"),
    (FULL, "heads", {"rel_l2": put(0.01)}, "who reads all that is visible, exactly, has the dense output"),
    (QUEST, "heads", {"eps_hat": put(0)}, "eps_hat bounds the mass not read"),
    (QUEST, "curves", {"tokens": plus(1)}, "tokens = pages * page size"),
    (QUEST, "curves", {"union_pages_mean": put(1)}, "the group reads at least what one head reads"),
    (
        QUEST,
        "curves",
        {"pages": plus(2), "tokens": plus(16), "union_pages_mean": plus(9)},
        "every budget from 1 page on is there",
    ),
    (QUEST, "curves", {"mass_recall_mean": put(0)}, "mass_recall_mean never falls as the budget grows"),
    (QUEST, "curves", {"read_bytes_mean": put(0)}, "read_bytes_mean never falls as the budget grows"),
    (QUEST, "plans", {"pages": put([3, 2, 7])}, "pages are in ascending order, each once"),
    (QUEST, "plans", {"pages": put([1, 2, 99])}, "a step reads pages it can see, at least one"),
    (QUEST, "plans", {"pages": put([])}, "a step reads pages it can see, at least one"),
    (QUEST, "plans", {"pages": put([2])}, "heads counts the pages of the plan"),
    (MOMENTS, "heads", {"mass_estimated": put(1.5)}, "the estimated part of a softmax is between 0 and 1"),
    (QUEST, "heads", {"read_pages": put(99)}, "a head reads no more pages than are held"),
    (QUEST, "plans", {"exists": put(1)}, "no more pages are read than there are"),
    (QUEST, "plans", {"forced": put([77])}, "what is forced is read"),
    (QUEST, "explain", {"step": plus(1)}, "explain has one row for every row of heads"),
    (QUEST, "explain", {"step": plus(90)}, "explain has one row for every row of heads"),
    (CHAIN, "explain", {"role": plus(1)}, "explain has the roles of heads"),
    (QUEST, "explain", {"exact_pages_r1": put(0)}, "exact_pages_r1 is between 1 and the pages there are"),
    (CHAIN, "explain", {"k_needed": put(99)}, "k_needed is between 1 and the pages there are"),
    (QUEST, "explain", {"exact_pages_r10": put(1)}, "a proof of more tokens is no shallower"),
    (QUEST, "explain", {"mass_pages_02": put(8), "mass_pages_01": put(7)}, "a proof of more of the mass is no shallower"),
    (QUEST, "evidence", {"step": plus(1)}, "every row of heads has its spans of evidence"),
    (QUEST, "evidence", {"read": put(0.5), "dense": put(0.4)}, "what is read of a span is a part of it"),
    (TOVA, "evidence", {"read": put(-0.01)}, "what is read of a span is a part of it"),
    (QUEST, "evidence", {"dense": put(1.5)}, "a span holds no more than all the evidence"),
    (TOVA, "tiers", {"runs": put([RUN | {"stop": 999}])}, "runs are ranges of positions up to the step's own, in order"),
    (TOVA, "tiers", {"runs": put([RUN, RUN])}, "runs are ranges of positions up to the step's own, in order"),
    (TOVA, "tiers", {"runs": put([RUN | {"tier": 3}])}, "a tier is 0, 1 or 2, with 4, 8 and 16 for copies"),
    (TOVA, "events", {"aged_in": put(-1)}, "no count is negative"),
    (TOVA, "events", {"churn": put(1.5)}, "churn is a share"),
    (TOVA, "events", {"evicted": plus(1)}, "evictions add up to what is gone"),
]


@pytest.mark.parametrize(("policy", "table", "changes", "law"), BROKEN)
def test_a_broken_law_is_named_with_its_row(trace, tables, monkeypatch, policy, table, changes, law):
    with pytest.raises(BrokenLaw) as broken:
        check(trace, tables, policy, monkeypatch, (table, changes))
    told = str(broken.value)
    assert told.endswith(f"broken law: {law}")
    assert told.startswith(f"{table} of {parse_policy(policy).id}, row request=0 layer=0")


SHARED = [
    (FULL, "ledger", {"resident_bytes": plus(-1)}, "heads that share rows pay for all that one of them has"),
    (FULL, "ledger", {"read_bytes": plus(-1)}, "heads that share rows pay for all that one of them has"),
    (STREAM, "ledger", {"resident_bytes": put(1e9)}, "heads that share rows pay no more than if they shared none"),
    (STREAM, "ledger", {"read_bytes": put(1e9)}, "heads that share rows pay no more than if they shared none"),
]


@pytest.mark.parametrize("policy", [FULL, STREAM])
def test_the_laws_of_shared_rows_hold(trace, tables, policy):
    """Heads that hold the same tokens: the parts of all are the row."""
    check(trace, tables, policy, shared=True)


@pytest.mark.parametrize(("policy", "table", "changes", "law"), SHARED)
def test_a_broken_law_of_shared_rows_is_named(trace, tables, monkeypatch, policy, table, changes, law):
    with pytest.raises(BrokenLaw, match=f"{table} of .*, row request=0 layer=0 .*broken law: {law}$"):
        check(trace, tables, policy, monkeypatch, (table, changes), shared=True)


def test_masses_nowhere_near_1_are_refused_without_strict_too(tmp_path):
    """Keys of 1e4 have products with a query that float32 does not hold to a logit."""
    parts = {"mass_recall": [0.6, 0.7], "mass_evicted": [0.4, 0.28], "mass_unread": [0.0] * 2, "learned_sink_mass": [0.0] * 2}
    heads = pa.table(parts | {"q_head": [0, 3], "step": [0, 7]})
    check_masses("request 0, layer 0", {"heads": heads.slice(0, 1)})
    with pytest.raises(BadTrace, match=r"request 0, layer 0, q head 3, step 7: attention masses sum to 0\.98"):
        check_masses("request 0, layer 0", {"heads": heads})
    synthesize(tmp_path / "loud", prompt=70, steps=3, dtype="float32")
    forge.rewrite(tmp_path / "loud", forge.KV, lambda t: forge.put(t, "k", [loud(row) for row in t["k"].to_pylist()]))
    with pytest.raises(BadTrace, match="beyond float32"):
        replay(tmp_path / "loud", 'caote(hold=tokens(20), base="tova")', workers=1)


def loud(row: bytes) -> bytes:
    x = np.frombuffer(row, np.float32)
    return np.where(np.arange(len(x)) % 2, x, np.float32(3e6)).astype(np.float32).tobytes()


def test_every_law_has_been_broken_here():
    stated = re.findall(r'must\(\s*f?"([^"]+)"', inspect.getsource(laws))
    tried = {re.sub(r"^\w+ (is between|never falls)", r"{name} \1", law) for *_, law in BROKEN + SHARED}
    assert len(stated) > 30
    assert set(stated) == tried
