"""A run priced, and the commands predict, whatif and explain."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import kvsim.cost
from kvsim.cli import main
from kvsim.cost.fixed import fixed
from kvsim.cost.launches import Kernels, table
from kvsim.cost.model import calibrate, read_model, write_model
from kvsim.cost.plain import step
from kvsim.cost.predict import AHEAD, Asked, lines, predict
from kvsim.cost.price import parts, steps
from kvsim.cost.prices import priced_for
from kvsim.cost.samples import write_samples
from kvsim.cost.whatif import Asked as WhatIf
from kvsim.cost.whatif import whatif
from kvsim.errors import WrongUse
from kvsim.metrics.run import open_run
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize
from tests.cost.made import samples
from tests.cost.runs import CHAIN, GQA, POLICIES

BARS = Path(kvsim.cost.__file__).parent / "published" / "quest-figure-10.csv"
QUEST = 'quest(read=tokens(64), heads="max")'
HEADS = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
SHAPES = [(b, c) for b in (1, 4, 16) for c in (32, 256, 4096, 65536)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Attention and a rest of the step for the heads of the run."""
    folder = tmp_path_factory.mktemp("model")
    attention = samples(launch=3.0, gbps=1000.0, shapes=SHAPES, gpu="H200", **HEADS)
    attention = attention.with_columns(bytes=pl.col("bytes") // 32, t_us=3.0 + pl.col("bytes") / 32 / 1e6)
    rest = samples(shapes=[(b, 1) for b in (1, 2, 4, 8, 16)], gpu="H200", **HEADS).with_columns(
        pl.lit("rest").alias("class"), context=None, bytes=None, t_us=100.0 + pl.col("batch")
    )
    write_samples(pl.concat([attention, rest.cast(dict(attention.schema))]), folder / "samples.csv")
    write_model(calibrate([folder / "samples.csv"], draws=0), folder / "model.json")
    return folder / "model.json"


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def command(*words):
        code = main([str(w) for w in words])
        out, err = capsys.readouterr()
        return code, out, err

    return command


def billed(run, model, **asked):
    return predict(read_model(model), run.about, run.ledger, run.tables["events"], Asked(**asked))


# ------------------------------------------------------------------------------------------------ the bill
def test_a_replayed_step_costs_what_the_same_budget_does_without_a_trace(run, model):
    bill = billed(run, model)
    prices = priced_for(read_model(model), (4, 2, 16))
    seen = run.ledger.group_by("step").agg(pl.col("visible_tokens").max()).sort("step").collect()["visible_tokens"]
    for policy in POLICIES[:4]:  # those whose bytes a budget tells to the byte
        asked = fixed(policy, GQA)
        mine = bill.steps.filter(policy=asked.name).sort("step")["step_us"].to_list()
        told = [steps(parts(prices, table([step(asked, GQA, [n])], GQA)))["step_us"][0] for n in seen]
        assert mine == pytest.approx(told, rel=1e-6)


def test_tables_add_up(run, model):
    bill = billed(run, model)
    assert bill.steps.height == 6 * (len(POLICIES) + 1)
    sums = bill.parts.group_by("policy", "request", "step").agg(pl.col("us").sum())
    both = bill.steps.join(sums, on=["policy", "request", "step"])
    assert both["step_us"].to_list() == pytest.approx(both["us"].to_list())
    for entry in bill.summary:
        rows = bill.steps.filter(policy=entry["policy"])
        assert entry["tpot_us"]["p50"] == pytest.approx(float(np.percentile(rows["step_us"].to_numpy(), 50)))
        assert entry["tpot_us"]["p50"] <= entry["tpot_us"]["p95"] <= entry["tpot_us"]["p99"]
        assert sum(c["us"] for c in entry["classes"]) == pytest.approx(rows["step_us"].mean())
        assert entry["peak_resident_bytes"] == rows["resident_bytes"].max()
    full = next(e for e in bill.summary if e["policy"].startswith("full() >> everything"))
    assert full["grade"] == "calibrated"
    assert full["prefill_extra_us"] == 0


def test_events_at_different_steps_cost_the_same_in_all_and_less_at_the_end(run, model):
    from kvsim.cost.predict import _staggered

    how = Kernels(scores_at="events")
    bill = billed(run, model, how=how)
    apart = 0
    for entry in bill.summary:
        rows, classes = (t.filter(policy=entry["policy"]).rename({"step": "at"}) for t in (bill.steps, bill.parts))
        spread = _staggered(rows, classes, how)
        assert spread.mean() == pytest.approx(rows["step_us"].mean())
        assert entry["tpot_staggered_us"]["p99"] <= entry["tpot_us"]["p99"] + 1e-9
        none = classes.filter(pl.col("class").is_in(["routing", "tier_move", "scores"])).is_empty()
        assert not none or (spread == rows["step_us"].to_numpy()).all()
        apart += entry["tpot_staggered_us"]["p99"] < entry["tpot_us"]["p99"] - 1e-9
    assert apart


def test_fetches_behind_the_layer_before_take_less_and_nothing_else_changes(model, tmp_path):
    trace = synthesize(tmp_path / "trace", layers=2, **HEADS, prompt=205, steps=6)
    fetching = "offload(device=pages(4)) >> sparda_proxy(read=tokens(64), page=16)"
    run = open_run(replay(trace, ["full()", fetching], tmp_path / "run", workers=1).path)
    serial, ahead = billed(run, model), billed(run, model, overlap="next_layer")
    fetched = serial.parts.filter(pl.col("class") == "host_fetch").group_by("policy", "request", "step").agg(f=pl.col("us").sum())
    both = serial.steps.join(ahead.steps, on=["policy", "request", "step"], suffix="_ahead")
    both = both.join(fetched, on=["policy", "request", "step"], how="left").with_columns(pl.col("f").fill_null(0.0))
    assert {*both.filter(pl.col("f") > 0)["policy"].str.contains("offload").to_list()} == {True}
    for row in both.iter_rows(named=True):
        f, c = row["f"], row["step_us"] - row["f"]
        assert row["step_us_ahead"] == pytest.approx((f + max(f, c) + c) / 2)  # of two layers
        assert row["overlap_us"] == row["overlap_us_ahead"]
    assert ahead.parts.equals(serial.parts)
    assert {*ahead.notes} == {*serial.notes, AHEAD}
    assert all("overlap" not in s for s in serial.summary)
    assert sum("fetches behind the layer before" in line for line in lines(ahead)) == 1


def test_what_prefill_gains(run, model):
    bill = billed(run, model)
    of = {(r["policy"].split("(")[0] + r["part"]): r["bytes"] for r in bill.prefill.to_dicts()}
    keys, row = 205 * 2 * 32, 64  # of a layer: tokens, kv heads, bytes of a key; bytes of a row
    quest = bill.prefill.filter(policy=fixed(QUEST, GQA).name)
    summaries = 13 * 2 * 2 * 64  # pages of 206 tokens, kv heads, layers, bytes of a box
    assert quest["bytes"].to_list() == [2 * keys + summaries]
    probabilities = 205 * 206 // 2 * 4 * 4
    assert of["h2oscores"] == 2 * (keys + 2 * probabilities)
    assert 2 * 2 * 2 * 60 * row <= of["h2ofirst_cut"] <= 2 * 2 * 2 * 64 * row
    assert of["streaming_llmfirst_cut"] > 0
    assert "streaming_llmscores" not in of
    lse = billed(run, model, how=Kernels("fused_lse")).prefill.filter(part="scores")["bytes"]
    assert lse.unique().to_list() == [2 * keys]


def test_a_larger_batch_costs_more_and_may_not_fit(run, model):
    one, many = (billed(run, model, batch=b).steps["step_us"] for b in (1, 16))
    assert (many > one).all()
    with pytest.raises(
        WrongUse, match=r"--batch 4000000: .* holds .* GB at step 5 of request 0, and NVIDIA H200 .* has 141 GB; lower --batch"
    ):
        billed(run, model, batch=4_000_000)


def test_bytes_that_a_profiler_saw_are_told(run, model, tmp_path):
    seen = samples(gbps=1000.0, shapes=SHAPES, gpu="H200", **HEADS).with_columns(
        bytes_measured=(pl.col("bytes") * 1.25).cast(pl.Int64)
    )
    write_samples(seen, tmp_path / "seen.csv")
    write_model(calibrate([tmp_path / "seen.csv"], draws=0), tmp_path / "seen.json")
    bill = billed(run, tmp_path / "seen.json")
    assert "dense_attn: the profiler saw 1.25 times the modelled bytes at the memory (median of 12 samples)" in bill.notes
    assert not any("profiler" in n for n in billed(run, model).notes)


# ------------------------------------------------------------------------------------------------ commands
def test_predict_writes_tables_and_says_the_grade(call, run, model):
    code, out, _ = call("cost", "predict", run.path, "--model", model, "-o", "bill")
    assert code == 0
    assert fixed(QUEST, GQA).name in out
    assert "TPOT p50" in out
    assert "transferred" in out
    assert sorted(p.name for p in Path("bill").iterdir()) == ["parts.parquet", "prefill.parquet", "steps.parquet", "summary.json"]
    table = pl.read_parquet("bill/steps.parquet")
    assert {"policy", "request", "step", "step_us", "low_us", "high_us", "grade", "binding", "resident_bytes"} <= set(
        table.columns
    )
    assert table["grade"].null_count() == 0
    code, _, err = call("cost", "predict", run.path, "--model", model, "-o", "bill")
    assert (code, "exists already" in err) == (2, True)
    code, out, _ = call("cost", "predict", run.path, "--model", model, "-o", "again", "--json")
    assert {e["policy"] for e in json.loads(out)["policies"]} == {fixed(p, GQA).name for p in [*POLICIES, CHAIN]}


def test_strict_is_code_3_and_leaves_nothing(call, run, model, tmp_path):
    code, out, err = call("cost", "predict", run.path, "--model", model, "-o", "bill", "--strict")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "are not calibrated, the first" in err
    assert list(tmp_path.iterdir()) == []


def test_predict_refuses_a_model_of_other_heads(call, run, tmp_path):
    write_model(calibrate([BARS], draws=0), tmp_path / "bars.json")
    code, _, err = call("cost", "predict", run.path, "--model", "bars.json", "-o", "bill")
    assert code == 2
    assert "fitted for 32 query heads, 32 kv heads, head_dim 128, and this is of 4 query heads, 2 kv heads, head_dim 16" in err


@pytest.fixture
def bars(tmp_path):
    write_model(calibrate([BARS], draws=20), tmp_path / "bars.json")
    return "bars.json"


def test_whatif_rows(call, bars):
    policies = ("full()", "quest(read=tokens(2048), dense_layers=2)")
    asked = ("--model", bars, "-p", *policies, "--context", "8192,32768", "--geometry", "Llama-2-7b-hf")
    code, out, _ = call("cost", "whatif", *asked, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [(r["variant"], r["context"], r["batch"]) for r in rows] == [
        (v, c, 1) for v in ("AWQ", "FP16") for c in (8192, 32768) for _ in policies
    ]
    assert {"policy", "variant", "context", "batch", "step_us", "parts", "low", "high", "grade"} <= set(rows[0])
    code, out, _ = call("cost", "whatif", *asked)
    assert out.count("transferred") == out.count("calibrated") == 4
    code, _, err = call("cost", "whatif", *asked, "--strict")
    assert code == 3
    assert "quest(read=tokens(2048), dense_layers=2) at context 8192, batch 1: dense_attn is transferred" in err
    code, out, _ = call("cost", "whatif", *asked[:4], *asked[5:], "--strict")
    assert (code, out.count("calibrated")) == (0, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-p", "quests(read=tokens(9))", "--context", "8192"), "did you mean 'quest'"),
        (("-p", "full()", "--context", "32768", "--batch", "8"), "needs 137.4 GB for the cache"),
        (("-p", "full()", "--context", "8192", "--variant", "INT3"), "--variant 'INT3': not in the model; it has 'AWQ', 'FP16'"),
        (("-p", "full()", "--context", "8192", "--kernel", "attention=x"), "--kernel attention=x: expected CLASS=VARIANT"),
        (("-p", "full()", "--context", "8192", "--weights", "heavy"), "--weights heavy: expected bytes such as 13.5GB"),
        (("-p", "full()"), "say either --context"),
        (("-p", "full()", "--context", "0"), "1 token or more"),
        (("-p", "full()", "--context", "8192", "--batch", "0"), "a batch 1 request or more"),
        (("-p", "quest(read=mass(eps=0.1))", "--context", "8192"), "only a trace can tell its bytes"),
    ],
)
def test_wrong_use_of_whatif_is_one_line(call, bars, words, said):
    code, out, err = call("cost", "whatif", "--model", bars, "--geometry", "Llama-2-7b-hf", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_explain(call, bars):
    asked = ("cost", "explain", "--model", bars, "--geometry", "Llama-2-7b-hf", "--context", "32768", "--variant", "AWQ")
    code, out, _ = call(*asked, "-p", "quest(read=tokens(2048))")
    assert code == 0
    assert "bandwidth of step AWQ" in out
    assert "quest-figure-10.csv sha256" in out
    code, out, _ = call(*asked, "--json")
    assert [p["class"] for p in json.loads(out)["parts"]] == ["dense_attn", "rest"]
    code, _, err = call("cost", "explain")
    assert (code, "needs --model" in err) == (2, True)
    code, out, _ = call("cost", "explain", "--claims")
    assert code == 0
    assert "17.0 ms" in out
    assert "30.7 GB, which do not fit into 24 GB" in out
    assert "saves 1.3 ms at the mean length, 2.1 at the end" in out


def test_weights_count_in_memory_and_in_the_rest(model):
    [row] = whatif(read_model(model), GQA, WhatIf(["full()"], [4096], weights_bytes=10**9))
    assert row["grade"] == "calibrated"  # a measured rest goes before the weights
