"""What branches over one prefix really free, by hand, against plain loops, and on replayed runs."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import tables
from kvsim.errors import WrongUse
from kvsim.metrics.run import RunTables, open_run
from kvsim.metrics.sharing import batch_reads, shared
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize

ROW = 64


def made(held, prefix, page=2, allocator="head", prompt=None):
    """A run whose branch (0, s) and kv head h hold held[s][h]: {position: tier}, the rest is gone; then `shared` of it."""
    prompt = prompt or prefix
    ledger, tiers = [], []
    for s, heads in enumerate(held):
        for h, mine in enumerate(heads):
            at = {"policy": "p", "request": 0, "layer": 0, "kv_head": h, "step": s}
            ledger.append(at | {"pos": prompt + s, "visible_tokens": prompt + s + 1})
            runs = [{"start": x, "stop": x + 1, "tier": mine.get(x, 0), "level": None} for x in range(prefix)]
            tiers.append(at | {"runs": runs})
    frames = {}
    for name, rows in (("ledger", ledger), ("tiers", tiers), ("events", []), ("plans", [])):
        empty = pl.from_arrow(tables.RUN_TABLES[name].empty_table())
        schema = {c: pl.String if c == "policy" else t for c, t in empty.schema.items() if not rows or c in rows[0]}
        frames[name] = pl.LazyFrame(rows, schema=schema)
    about = {"layers": [{"layer": 0, "row_bytes": ROW}], "requests": [{"request": 0, "prompt_tokens": prompt}]}
    return RunTables(Path(), about, (), frames)


def told(held, prefix, page=2, allocator="head", branches=None):
    branches = [(0, s) for s in range(len(held))] if branches is None else branches
    return shared(made(held, prefix), prefix, page, branches, allocator).row(0, named=True)


def whole(*positions):
    return dict.fromkeys(positions, 2)


def test_two_beams_of_the_notes_h2o():
    """After positions 10 and 11 the notes' cache of six holds 1 3 5 8 9 10, then 1 3 5 9 10 11: two branches of a prefix of ten."""
    held = [[whole(1, 3, 5, 8, 9)], [whole(1, 3, 5, 9)]]
    row = told(held, 10)
    assert (row["branches"], row["prefix_tokens"], row["held_tokens"]) == (2, 10, 4.5)
    assert row["claimed_bytes"] == (5 + 6) * ROW
    assert (row["freed_alone_bytes"], row["freed_bytes"]) == (2 * ROW, 2 * ROW)  # the page of 6 and 7
    assert (row["resident_pages"], row["reusable_tokens"]) == (4, 6)
    row = told(held, 10, page=1)
    assert (row["freed_alone_bytes"], row["freed_bytes"]) == (5.5 * ROW, 5 * ROW)  # 8 is needed by the one that still holds it
    assert (row["resident_pages"], row["reusable_tokens"]) == (5, 0)


def test_rows_coded_by_one_branch_are_a_copy_beside():
    row = told([[whole(0, 1, 2, 3)], [{0: 1, 1: 1, 2: 2, 3: 2}]], 4)
    assert (row["resident_pages"], row["coded_pages"], row["freed_bytes"], row["reusable_tokens"]) == (2, 1, None, 4)


def test_what_left_a_sliding_window_is_gone():
    run = made([[{}], [{}]], 8)
    sliding = run.ledger.with_columns(visible_tokens=pl.lit(4))  # positions 5 ... at the first branch, 6 ... at the second
    tables_ = run.tables | {"ledger": sliding, "tiers": run.tables["tiers"].clear()}
    row = shared(RunTables(run.path, run.about, (), tables_), 8, 2, [(0, 0), (0, 1)]).row(0, named=True)
    assert (row["held_tokens"], row["claimed_bytes"], row["freed_bytes"], row["reusable_tokens"]) == (2.5, 11 * ROW, 4 * ROW, 0)


TIERS = st.sampled_from([0, 0, 2])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["head", "layer"]), st.data())
@settings(deadline=None, max_examples=60)
def test_a_page_is_free_when_nobody_needs_it(branches, heads, page, allocator, data):
    prefix = data.draw(st.integers(page, 11))
    tier = data.draw(st.lists(TIERS, min_size=branches * heads * prefix, max_size=branches * heads * prefix))
    grid = iter(tier)
    held = [[{x: next(grid) for x in range(prefix)} for _ in range(heads)] for _ in range(branches)]
    row = told(held, prefix, page, allocator)
    pages = [range(p * page, (p + 1) * page) for p in range(prefix // page)]
    tokens = len(pages) * page

    def needs(branch, h, p):
        mine = range(heads) if allocator == "layer" else [h]
        return any(held[branch][x][t] == 2 for x in mine for t in p)

    need = [[[needs(b, h, p) for p in pages] for h in range(heads)] for b in range(branches)]
    gone = sum(held[b][h][t] == 0 for b in range(branches) for h in range(heads) for t in range(tokens))
    free = [[not any(need[b][h][p] for b in range(branches)) for p in range(len(pages))] for h in range(heads)]
    alone = sum(not x for branch in need for head in branch for x in head) / branches
    unbroken = next((p for p in range(len(pages)) if any(f[p] for f in free)), len(pages))
    assert row["claimed_bytes"] == gone * ROW
    assert row["freed_bytes"] == sum(map(sum, free)) * page * ROW
    assert row["freed_alone_bytes"] == pytest.approx(alone * page * ROW)
    assert row["resident_pages"] == heads * len(pages) - sum(map(sum, free))
    assert row["reusable_tokens"] == unbroken * page
    assert row["held_tokens"] == pytest.approx(tokens - gone / branches / heads)
    assert row["freed_bytes"] * branches <= row["claimed_bytes"]


# ------------------------------------------------------------------------------------------------ replayed
POLICIES = ("full()", "h2o(hold=tokens(24), sinks=2) >> quest(read=pages(2), page=8)", "streaming_llm(hold=tokens(16))")
KIVI = "kivi(bits=4, group=8, residual=16)"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharing")
    trace = synthesize(folder / "trace", requests=2, layers=1, prompt=48, steps=8)
    return open_run(replay(trace, [*POLICIES, KIVI], folder / "run", plans=True, workers=1).path)


def of(frame, name):
    return frame.filter(pl.col("policy").str.contains(name, literal=True)).row(0, named=True)


def test_more_branches_never_free_more(run):
    beams = [(run.requests[0]["request"], s) for s in (7, 0, 3)]
    before = None
    for n in (1, 2, 3):
        found = shared(run, 48, 4, beams[:n])
        freed = {p: of(found, p)["freed_bytes"] for p in ("full() >> everything", "h2o", "streaming")}
        if n == 1:
            assert all(r["freed_bytes"] in (None, r["freed_alone_bytes"]) for r in found.iter_rows(named=True))
            assert set(found["state_bytes"]) == {0}
            assert freed["streaming"] > 0
        assert before is None or all(freed[p] <= before[p] for p in freed)
        before = freed


def test_held_and_claimed_are_those_of_the_ledger(run):
    """At the last step a prefix of all of the prompt: what the ledger calls held and evicted, less the decoded tokens."""
    last = run.ledger.filter(pl.col("step") == 7).collect()
    found = shared(run, 48, 4)
    for name in ("h2o", "streaming"):
        mine = last.filter(pl.col("policy").str.contains(name))
        row = of(found, name)
        gone = mine["evicted_tokens"].sum()
        row_bytes = run.layers.collect()["row_bytes"][0]
        decoded_gone = gone - row["claimed_bytes"] // row_bytes
        assert 0 <= decoded_gone <= 8 * len(mine)
        if name == "streaming":  # keeps the newest, so every decoded token
            assert decoded_gone == 0


def test_full_keeps_all_and_h2o_copies_its_scores(run):
    found = shared(run, 48, 4)
    row = of(found, "full() >> everything")
    assert (row["branches"], row["freed_bytes"], row["claimed_bytes"], row["reusable_tokens"]) == (2, 0, 0, 48)
    assert row["state_bytes"] == 0
    kv_heads = run.about["layers"][0]["kv_heads"]
    assert of(found, "h2o")["state_bytes"] == 24 * kv_heads * 4  # one number per held token, for one copy
    assert of(found, "streaming")["state_bytes"] == 0
    assert of(found, "kivi")["freed_bytes"] is None
    assert of(found, "kivi")["coded_pages"] > 0


def test_a_run_that_does_not_tell_its_state_has_none(run):
    old = run.tables | {"events": run.tables["events"].with_columns(state_bytes=pl.lit(None, pl.Int64))}
    found = shared(RunTables(run.path, run.about, run.policies, old), 48, 4)
    assert of(found, "h2o")["state_bytes"] is None
    assert of(found, "full() >> everything")["state_bytes"] == 0


def test_pages_of_the_prefix_are_read_once_per_batch(run):
    branches = [(r["request"], 5) for r in run.requests] + [(run.requests[0]["request"], 7)]
    found = batch_reads(run, 30, branches)
    assert found.height == 1
    row, seen, private = found.row(0, named=True), set(), 0
    plans = run.tables["plans"].collect()
    total = 0
    for request, step in branches:
        union = {}
        for p in plans.filter(request=request, step=step).iter_rows(named=True):
            union.setdefault(p["kv_head"], set()).update(p["pages"])
        for h, pages in union.items():
            total += len(pages)
            seen |= {(h, p) for p in pages if (p + 1) * 8 <= 30}
            private += sum((p + 1) * 8 > 30 for p in pages)
    assert (row["branches"], row["read_pages"], row["distinct_pages"], row["prefix_pages"]) == (
        3,
        total,
        len(seen) + private,
        len(seen),
    )
    assert row["distinct_pages"] < row["read_pages"]


def test_what_cannot_share_is_refused_by_name(run):
    first = run.requests[0]["request"]
    with pytest.raises(WrongUse, match=r"branch \(99, 0\): the run has no such"):
        shared(run, 48, 4, [(99, 0)])
    with pytest.raises(WrongUse, match=r"each \(request, step\) once"):
        shared(run, 48, 4, [(first, 1), (first, 1)])
    with pytest.raises(
        WrongUse, match=r"prefix=49: expected between a page of 4 tokens and the prompt of request \d+, 48 tokens"
    ):
        shared(run, 49, 4)
    with pytest.raises(WrongUse, match="prefix=3: expected between a page of 4"):
        shared(run, 3, 4)
    with pytest.raises(WrongUse, match="allocator 'row': expected"):
        shared(run, 48, 4, allocator="row")
