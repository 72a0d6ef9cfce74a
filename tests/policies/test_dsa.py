"""DSA: what the learned indexer chooses is read, by all heads alike, and billed once for the layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvsim import check_policy, parse
from kvsim.errors import WrongUse
from kvsim.geometry import Indexer
from kvsim.policies.read.dsa import dsa
from kvsim.units import tokens
from tests import naive
from tests.engine.lanes import by_step, lane, run


def indexed(score_fn="relu_weighted", seed=0, **more):
    made = lane(prompt=21, steps=8, seed=seed, **more)
    rng, n, total = np.random.default_rng(seed), len(made.steps), made.request.total
    q, w, k = (rng.standard_normal(s).astype(np.float32) for s in ((n, 3, 5), (n, 3), (total, 5)))
    return replace(made, indexer=Indexer(q, w, k, score_fn))


def chosen(source, read, many):
    """The positions that the naive scores choose at each step: best first, ties to the lower one."""
    x, out = source.indexer, []
    for i, t in enumerate(source.t.tolist()):
        scores = [
            naive.learned_score(x.q[i].astype(float), x.w[i].astype(float), k, x.score_fn == "relu_weighted")
            for k in x.k[: t + 1].astype(float)
        ]
        out.append(sorted(sorted(range(t + 1), key=lambda p: (-scores[p], p))[:many]))
    return out


@pytest.mark.parametrize("score_fn", ["relu_weighted", "dot"])
def test_all_heads_read_what_the_indexer_scores_highest(score_fn):
    source = indexed(score_fn)
    plans = run(source, dsa(read=tokens(6)), plans=True)["plans"]
    want = chosen(source, dsa, 6)
    assert {*plans["q_head"].tolist()} == {-1}
    for head in range(2):
        mine = [p for p, of in zip(plans["pages"], plans["kv_head"], strict=True) if of == head]
        assert [[*p] for p in mine] == want


def test_the_worked_example_with_its_tie():
    source = lane(prompt=3, steps=1)
    keys = np.array([(1, 0.5), (-1, 2), (0.2, 0.1), (0.5, -1)], np.float32)
    rows = Indexer(np.eye(2, dtype=np.float32)[None], np.array([[0.6, 0.4]], np.float32), keys, "relu_weighted")
    [pages, _] = run(replace(source, indexer=rows), dsa(read=tokens(2)), plans=True)["plans"]["pages"]
    assert [*pages] == [0, 1]


def test_a_budget_beyond_the_context_is_dense_attention():
    heads = run(indexed(), dsa(read=tokens(99)))["heads"]
    assert heads["rel_l2"].max() < 1e-5
    assert heads["read_pages"].tolist() == heads["read_tokens"].tolist()


@pytest.mark.parametrize(("dtype", "row"), [("fp8", 5 + 4), ("kv", 5 * 4)])
def test_index_bytes_are_those_of_all_tokens_once_for_the_layer(dtype, row):
    source = indexed()
    ledger = run(source, dsa(read=tokens(6), dtype=dtype))["ledger"]
    scanned, held, written = (by_step(ledger, c) for c in ("index_bytes", "index_resident_bytes", "write_bytes"))
    visible = source.t + 1
    assert np.array_equal(scanned, [visible * row, 0 * visible])
    assert np.array_equal(held, scanned)
    assert (written[0] - written[1] == row).all()
    assert not by_step(run(source, dsa(read=tokens(99)))["ledger"], "index_bytes").any()


def test_the_published_sizes():
    """A key of 128 numbers takes 132 bytes, and a scan of 128K tokens 16.5 MiB a layer, of 144 MiB of MLA rows of 1152 bytes."""
    row = dsa(preset="deepseek-v3.2").index_row_bytes(128, 2)
    assert row == 132
    context = 128 * 1024
    assert context * row / 2**20 == 16.5
    assert (context * row + 2048 * 1152) / (context * 1152) == pytest.approx(0.130, abs=5e-4)


def test_no_slack_is_claimed_for_scores_that_are_no_logits():
    heads = run(indexed(), dsa(read=tokens(6)))["heads"]
    assert "slack_mean" not in heads
    assert np.isnan(np.asarray(heads["certified"], float)).all()


@pytest.mark.parametrize(
    "policy",
    ["dsa(read=tokens(4))", "dsa(read=share(0.3), sinks=2, recent=3, refresh=3)", "h2o(hold=tokens(20)) >> dsa(read=tokens(6))"],
)
def test_it_keeps_the_laws(policy):
    assert check_policy(parse(policy)) == []


def test_pages_of_several_tokens_are_refused():
    with pytest.raises(WrongUse, match=r"page=16.*1 with a learned indexer"):
        parse("dsa(read=tokens(64), page=16)")
