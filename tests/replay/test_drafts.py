"""Sets of pages for a block of drafts against loops over dense attention, and boxes that are not scanned again."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvsim.errors import WrongUse
from kvsim.replay.drafts import drafted, stale_boxes
from kvsim.replay.lanes import source_of
from kvsim.replay.run import replay

PAGE, BLOCK = 8, 3
SPLIT = "quest(read=pages(3), page=8, heads='{}')"


def dense(source, q_head):
    """f64[N, T]: dense attention of a query head, zero beyond the query."""
    head = q_head // source.layer.group
    keys = np.asarray(source.rows("k", head, np.arange(source.request.total)))
    x = source.q[:, q_head].astype(float) @ keys.T * source.layer.scale
    x[np.arange(len(keys)) > source.t[:, None]] = -np.inf
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def bound(source, q_head, i, page):
    """A page's largest q·k over its box, of what position i sees."""
    t = source.t[i]
    keys = source.rows("k", q_head // source.layer.group, np.arange(page * PAGE, min((page + 1) * PAGE, t + 1)))
    q = source.q[i, q_head].astype(float)
    return np.maximum(q * keys.min(0), q * keys.max(0)).sum()


def best(score, k, t):
    """The newest page and the k - 1 best of the others."""
    tail = t // PAGE
    return {tail, *sorted((p for p in score if p != tail), key=lambda p: (-score[p], p))[: k - 1]}


def test_the_three_kinds_of_sets_by_naive_loops(trace):
    found = drafted(trace, "quest(read=pages(3), page=8)", BLOCK, layers=[0], requests=[trace.requests[0].id])
    source = source_of(trace.lane(trace.requests[0], trace.captured_layers[0]))
    group, steps = source.layer.group, [slice(i, i + BLOCK) for i in range(0, len(source.steps) - BLOCK + 1, BLOCK)]
    assert found.height == source.layer.kv_heads * len(steps) * 3
    for head in range(source.layer.kv_heads):
        heads = range(head * group, (head + 1) * group)
        p = {h: dense(source, h) for h in heads}
        for at in steps:
            places = range(*at.indices(len(source.steps)))
            score = {(h, i): {x: bound(source, h, i, x) for x in range(source.t[i] // PAGE + 1)} for h in heads for i in places}
            last, first = places[-1], places[0]
            own = {(h, i): best(score[h, i], 3, source.t[i]) for h in heads for i in places}
            young = {x for x in score[heads[0], last] if x * PAGE > source.t[first]}
            tails = {source.t[i] // PAGE for i in places}  # each is some position's newest page
            joint = {h: {x: max(score[h, i][x] for i in places if x in score[h, i]) for x in score[h, last]} for h in heads}
            rest = {h: sorted(set(joint[h]) - tails, key=lambda x, h=h: (-joint[h][x], x))[: 3 - len(tails)] for h in heads}
            want = {
                "position": own,
                "first": {(h, i): own[h, first] | young for h, i in own},
                "block": {(h, i): {*tails, *rest[h]} for h, i in own},
            }
            for sets, chosen in want.items():
                seen = {(h, i): {x for x in pages if x * PAGE <= source.t[i]} for (h, i), pages in chosen.items()}
                recall = {(h, i): sum(p[h][i, x * PAGE : (x + 1) * PAGE].sum() for x in pages) for (h, i), pages in seen.items()}
                union = set().union(*seen.values())
                row = found.filter(kv_head=head, step=int(source.steps[first]), sets=sets).row(0, named=True)
                assert row["mass_recall"] == pytest.approx(np.mean(list(recall.values())), abs=2e-5)
                assert row["mass_recall_min"] == pytest.approx(min(recall.values()), abs=2e-5)
                assert row["mass_recall_last"] == pytest.approx(np.mean([recall[h, last] for h in heads]), abs=2e-5)
                assert row["read_pages"] == pytest.approx(np.mean([len(x) for x in seen.values()]))
                assert row["union_pages"] == len(union)
                rows = sum(min((x + 1) * PAGE, source.t[last] + 1) - x * PAGE for x in union)
                row_bytes = trace.captured_layers[0].billed(trace.kv_dtype(), trace.dtype).row_bytes
                assert row["read_bytes"] == rows * row_bytes


@pytest.mark.parametrize("policy", [SPLIT.format(h) for h in ("share", "max", "split")] + ["oracle(read=pages(2), page=8)"])
def test_a_set_for_every_position_is_what_a_replay_reads(trace, policy, tmp_path):
    found = drafted(trace, policy, 5).filter(sets="position")
    run = replay(trace, policy, tmp_path / "run", workers=1)
    rows = run.heads.with_columns(
        kv_head=(pl.col("q_head") // (trace.captured_layers[0].group)).cast(pl.Int16), step=pl.col("step") // 5 * 5
    )
    unit = ["request", "layer", "kv_head", "step"]
    want = rows.group_by(unit).agg(
        pl.col("mass_recall").cast(pl.Float64).mean().alias("want"), pl.col("read_pages").mean().alias("pages")
    )
    both = found.join(want, on=unit)
    assert both.height == found.height == want.height
    assert both["mass_recall"].to_numpy() == pytest.approx(both["want"].to_numpy(), abs=2e-6)
    assert both["read_pages"].to_numpy() == pytest.approx(both["pages"].to_numpy())


def test_one_set_of_all_pages_is_dense_attention(trace):
    found = drafted(trace, "quest(read=pages(99), page=8)", 2)
    assert found["mass_recall_min"].to_numpy() == pytest.approx(1)
    assert found.group_by("request", "layer", "kv_head", "step").agg(pl.col("read_bytes").n_unique())["read_bytes"].to_list() == [
        1
    ] * (found.height // 3)


def test_layers_read_whole_by_rule_have_no_sets(trace):
    found = drafted(trace, "quest(read=pages(2), page=8, dense_layers=1)", 2)
    assert found["layer"].unique().to_list() == [trace.captured_layers[1].id]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("h2o(hold=tokens(30)) >> quest(read=pages(2), page=8)", "keep every row exact"),
        ("quest(read=exact(r=2), page=8)", "fixed budget"),
        ("quest(read=pages(2), page=8, refresh=2)", "refresh=1"),
        ("full()", "fixed budget"),
    ],
)
def test_what_has_no_set_of_a_block_is_refused(trace, policy, told):
    with pytest.raises(WrongUse, match=told):
        drafted(trace, policy, 2)


def test_a_block_is_of_two_or_more(trace):
    with pytest.raises(WrongUse, match="a block of 1 drafts: expected 2 or more"):
        drafted(trace, "quest(read=pages(2), page=8)", 1)
    with pytest.raises(WrongUse, match="block=2, accepted=2: expected"):
        stale_boxes(trace, 8, 2, 2)


# ------------------------------------------------------------------------------------------------ boxes not scanned again
def test_stale_boxes_by_naive_loops(trace):
    block, accepted = 3, 2
    found = stale_boxes(trace, PAGE, block, accepted)
    assert found["stale_pages"].sum() > 0
    for row in found.iter_rows(named=True):
        request = next(r for r in trace.requests if r.id == row["request"])
        layer = next(x for x in trace.captured_layers if x.id == row["layer"])
        source = source_of(trace.lane(request, layer))
        keys = source.rows("k", row["kv_head"], np.arange(request.total))
        start, ever = request.prompt // PAGE * PAGE, {}  # page -> every key that was written to it since it was begun
        pages, wide, stale, rescanned, at = 0, [], 0, 0, request.prompt
        for p in range(start, request.prompt):
            ever.setdefault(p // PAGE, []).append(keys[p])
        while at + 2 * block <= request.total:
            for p in range(at, at + accepted):
                ever.setdefault(p // PAGE, []).append(keys[p])
            for p in range(at + accepted, at + block):
                ever.setdefault(p // PAGE, []).append(keys[p + block])
            at += accepted
            ever = {p: rows for p, rows in ever.items() if p * PAGE < at}
            rescanned += at % PAGE
            for p, rows in ever.items():
                pages += 1
                box, true = np.array(rows), keys[p * PAGE : min((p + 1) * PAGE, at)]
                if (box.min(0) < true.min(0)).any() or (box.max(0) > true.max(0)).any():
                    stale += 1
                    for q in source.q[at - request.prompt, row["kv_head"] * layer.group :][: layer.group].astype(float):
                        u, v = (np.maximum(q * x.min(0), q * x.max(0)).sum() for x in (box, true))
                        wide.append((u - v) * layer.scale)
        assert (row["pages"], row["stale_pages"], row["rescanned_rows"]) == (pages, stale, rescanned)
        assert row["inflation_mean"] == pytest.approx(np.mean(wide))
        assert row["inflation_max"] == pytest.approx(max(wide))
