"""The launches of a fixed budget are those of the ledger; hand numbers of the notes on Quest."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.cost.fixed import fixed
from kvsim.cost.heads import Geometry
from kvsim.cost.launches import Kernels, table
from kvsim.cost.ledger import work
from kvsim.cost.plain import Fixed, padding, resident_bytes, step
from kvsim.errors import BadTrace, WrongUse
from kvsim.metrics.run import open_run
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize
from kvsim.units import share, tokens
from tests.cost.runs import CHAIN, GQA, POLICIES

QUEST_HEADS = Geometry(1, 1, 1, 128, 128, "float16")
EXACT = ["class", "layers", "n", "pages", "page", "kv_bits"]
LOOSE = {"dequant": 0.01}  # the ledger counts codes after the step


def launches(run, how):
    found = work(run.about, run.ledger, run.tables["events"], how)
    return found.steps, found.launches


@pytest.mark.parametrize(
    "how", [Kernels(), Kernels("fused_lse", "steps", "fused"), Kernels("sdpa_fallback")], ids=lambda h: h.scores
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fixed_budget_launches_what_the_ledger_counted(run, policy, how):
    asked = fixed(policy, GQA)
    steps, counted = launches(run, how)
    visible = run.ledger.group_by("step").agg(pl.col("visible_tokens").max()).collect()
    mine = steps.filter(policy=asked.name).join(visible, left_on="at", right_on="step").sort("at")
    assert mine.height == 6
    for row in mine.iter_rows(named=True):
        seen = counted.filter(step=row["step"]).sort("class")
        told = table([step(asked, GQA, [row["visible_tokens"]], how)], GQA).sort("class")
        told = told.filter(
            (pl.col("class") != "routing") | pl.col("class").is_in(seen["class"].implode())
        )  # no cut while a share grows
        assert told.select(EXACT).to_dicts() == seen.select(EXACT).to_dicts()
        assert told["context"].to_list() == pytest.approx(
            seen["context"].to_list(), abs=1
        )  # what is held, before or after the cut
        for cls, mine_bytes, counted_bytes in zip(told["class"], told["bytes"], seen["bytes"], strict=True):
            assert mine_bytes == pytest.approx(counted_bytes, rel=LOOSE.get(cls, 0)), cls
        assert row["resident_bytes"] == resident_bytes(asked, GQA, [row["visible_tokens"]])


def test_behind_an_eviction_pages_straddle_and_are_summarised_again(run):
    asked = fixed(CHAIN, GQA)
    steps, counted = launches(run, Kernels())
    last = steps.filter(policy=asked.name).sort("at")["step"][-1]
    seen = {r["class"]: r["bytes"] for r in counted.filter(step=last).to_dicts()}
    told = {launch.cls: launch.bytes for launch in step(asked, GQA, [211])}
    assert told.keys() == seen.keys()
    assert told["gather_attn"] == seen["gather_attn"]
    assert all(told[cls] <= seen[cls] for cls in told)  # a budget alone cannot know where the holes are


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 2), (4, 1), (2, 2)])
def test_a_learned_index_is_ranked_once_for_the_layer_and_pages_for_every_query_head(tmp_path, q_heads, kv_heads):
    trace = synthesize(tmp_path / "trace", layers=2, q_heads=q_heads, kv_heads=kv_heads, prompt=40, steps=3, index_heads=2)
    run = open_run(
        replay(trace, ["dsa(read=tokens(8))", "quest(read=tokens(8), page=4, heads='max')"], tmp_path / "run", workers=1).path
    )
    steps, found = launches(run, Kernels())
    ranked = steps.join(found.filter(pl.col("class") == "topk"), on="step").sort("policy", "at")
    visible = [41, 42, 43]
    assert ranked["bytes"].to_list() == [n * 2 * 4 for n in visible] + [-(-n // 4) * 2 * q_heads * 4 for n in visible]


def test_replayed_layers_stand_for_the_others(run, tmp_path):
    half = replay(run.path.parent / "trace", [*POLICIES, CHAIN], tmp_path / "half", layers=[1], workers=1)
    part = open_run(half.path)
    (_, whole), (_, some) = launches(run, Kernels()), launches(part, Kernels())
    totals = [
        x.group_by("step", "class").agg(pl.col("bytes").sum(), pl.col("n").sum()).sort("step", "class") for x in (whole, some)
    ]
    assert totals[0].equals(totals[1])
    assert "1 of 2 layers were replayed" in work(part.about, part.ledger, part.tables["events"], Kernels()).notes[0]


def test_a_batch_is_so_many_alike(run):
    one, four = (work(run.about, run.ledger, run.tables["events"], Kernels(), batch=b) for b in (1, 4))
    assert (four.launches["bytes"] == 4 * one.launches["bytes"]).all()
    assert (four.launches["batch"] == 4).all()
    assert (four.steps["resident_bytes"] == 4 * one.steps["resident_bytes"]).all()


def test_scores_only_at_events(run):
    every, some = (launches(run, Kernels(scores_at=at))[1].filter(pl.col("class") == "scores") for at in ("steps", "events"))
    cuts = launches(run, Kernels())[1].filter(pl.col("class") == "routing")["step"]
    assert set(some["step"]) == set(every["step"]) & set(cuts)


def test_a_run_without_its_layers_is_refused(run):
    with pytest.raises(BadTrace, match="no layers with their heads; replay again"):
        work(run.about | {"layers": []}, run.ledger, run.tables["events"], Kernels())


# ------------------------------------------------------------------------------------------------ the notes' numbers
def bytes_of(policy, lengths, heads=QUEST_HEADS, **given):
    """Bytes by class without the queries and outputs."""
    extra = len(lengths) * heads.q_heads * 512
    found = {launch.cls: launch.bytes for launch in step(policy, heads, lengths, **given)}
    return {cls: size - extra * (cls in ("dense_attn", "gather_attn")) for cls, size in found.items()}


def test_64k_with_a_budget_of_4096_is_an_eighth():
    dense = bytes_of(Fixed(), [65536])
    quest = bytes_of(Fixed(read=tokens(4096), summary_numbers=256), [65536])
    assert dense["dense_attn"] == 32 * 2**20
    assert (quest["page_scan"], quest["gather_attn"]) == (2 * 2**20, 2 * 2**20)
    assert (quest["page_scan"] + quest["gather_attn"]) / dense["dense_attn"] == 1 / 8 == 1 / 16 + 4096 / 65536


def test_padding_of_a_ragged_batch():
    assert padding([4096, 256]) == 3840
    assert padding([256, 32]) == 224
    quest = Fixed(read=tokens(512), summary_numbers=256)
    ragged, padded = (bytes_of(quest, [65536, 4096], padded=p)["page_scan"] for p in (False, True))
    assert padded - ragged == 3840 * 256 * 2


def test_a_group_reads_at_most_what_exists():
    heads = Geometry(1, 8, 1, 128, 128, "float16")
    whole, shared, none = (fixed("quest(read=pages(64))", heads, union) for union in (None, 1, 8))
    pages = [step(p, heads, [65536])[2].pages for p in (whole, shared, none)]
    assert pages == [512, 64, 512]
    assert step(whole, heads, [4096])[2].pages == 256  # all there are
    with pytest.raises(WrongUse, match="--union-factor 9: expected 1"):
        fixed("quest(read=pages(64))", heads, 9)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("quest(read=exact(r=10))", "stops where the queries let it, so only a trace can tell its bytes"),
        ("qevict(hold=share(0.2))", "decides by attention what is coded"),
        ("zipcache()", "only a trace can tell"),
        ("quests(read=tokens(5))", "unknown policy 'quests'"),
    ],
)
def test_what_needs_a_trace_is_refused_by_name(policy, said):
    with pytest.raises(WrongUse, match=said.replace("(", r"\(")):
        fixed(policy, GQA)


def test_share_follows_the_length():
    half = Fixed(hold=share(0.5))
    assert [half.held(n, 64) for n in (1, 10, 101)] == [1, 5, 50]


@pytest.mark.parametrize(
    ("how", "bytes"), [("fused_lse", 4160), ("second_pass", 4160 + 2080), ("sdpa_fallback", 4 * 2 * 4160 + 2 * 2080)]
)
def test_what_probabilities_cost(how, bytes):
    """65 rows of 2 kv heads: keys 65 · 2 · 16 · 2 bytes, values alike; probabilities of 4 query heads, 4 bytes, written and read."""
    heads = Geometry(1, 4, 2, 16, 16, "float16")
    [scores] = [x for x in step(fixed("h2o(hold=tokens(64))", heads), heads, [500], Kernels(how)) if x.cls == "scores"]
    assert scores.bytes == bytes
