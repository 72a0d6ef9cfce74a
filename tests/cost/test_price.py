"""Launches priced: laws of sums, grades and intervals; the six published bars of Quest as steps; claims held against bytes."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import kvsim.cost
from kvsim.cost import claims
from kvsim.cost.explain import explain, lines
from kvsim.cost.fit import fit
from kvsim.cost.fixed import fixed
from kvsim.cost.hardware import named_gpu
from kvsim.cost.heads import Geometry, geometry
from kvsim.cost.launches import SCORES, Kernels, Launch, table
from kvsim.cost.model import CostModel, calibrate, read_model, write_model
from kvsim.cost.plain import Fixed, step
from kvsim.cost.price import parts, steps
from kvsim.cost.prices import priced_for
from kvsim.cost.samples import frame
from kvsim.cost.whatif import Asked, assumed, split_heads, whatif
from kvsim.errors import BadProfile, WrongUse
from kvsim.units import tokens
from tests.cost.made import samples

BARS = Path(kvsim.cost.__file__).parent / "published" / "quest-figure-10.csv"
LLAMA2 = geometry("Llama-2-7b-hf")
LLAMA3 = geometry("meta-llama/Llama-3.1-8B")
H200 = named_gpu("h200")
CONTEXTS = (8192, 16384, 32768)


@pytest.fixture(scope="module")
def bars():
    return calibrate([BARS], draws=60)


def made(*rows, gpu=H200):
    """A model of hand-made samples; a row is (class, variant, [(batch, context, bytes, µs), ...], other columns)."""
    return CostModel(gpu, [f for row in rows for f in fits(repr(row), gpu.key if gpu else None)], {"inputs": [], "options": {}})


@cache
def fits(row, gpu):
    cls, variant, shapes, more = literal_eval(row)
    told = [
        {"class": cls, "variant": variant, "batch": b, "context": c, "bytes": size, "t_us": us, "source": "made", "cache": "cold"}
        | {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "kv_bits": 16}
        | more
        for b, c, size, us in shapes
    ]
    return fit(frame(told), gpu and named_gpu(gpu), draws=0).fits


def linear(cls, launch, gbps, variant="made", batches=(1, 8, 64), contexts=(512, 4096, 32768), **more):
    shapes = [(b, c, b * c * 4096, launch + b * c * 4096 / gbps / 1e3) for b in batches for c in contexts]
    return cls, variant, shapes, more


def rest(us, per_request=0.0, variant="made"):
    return "rest", variant, [(b, None, None, us + per_request * b) for b in (1, 2, 4, 8, 16, 64)], {}


def priced(model, heads=LLAMA3, **given):
    return priced_for(model, (heads.q_heads, heads.kv_heads, heads.head_dim), **given)


def one_step(model, launches, heads=LLAMA3, **given):
    return steps(parts(priced(model, heads, **given), table([launches], heads))).row(0, named=True)


# ------------------------------------------------------------------------------------------------ sums
def test_a_step_is_the_sum_of_its_parts_and_no_better_than_the_worst():
    model = made(linear("dense_attn", 10, 3000), linear("page_scan", 5, 1000), linear("gather_attn", 8, 2000), rest(4000, 10))
    found = parts(priced(model), table([step(Fixed(read=tokens(2048), summary_numbers=256), LLAMA3, [16384] * 4)], LLAMA3))
    told = steps(found).row(0, named=True)
    by = {r["class"]: r for r in found.to_dicts()}
    assert told["step_us"] == pytest.approx(found["us"].sum())
    assert told["low_us"] <= told["step_us"] <= told["high_us"]
    assert by["page_scan"]["us"] == pytest.approx(32 * 5 + by["page_scan"]["bytes"] / 1000 / 1e3, rel=0.02)
    assert by["rest"]["us"] == pytest.approx(4040, rel=0.02)
    assert (by["rest"]["grade"], by["topk"]["grade"], told["grade"]) == ("calibrated", "transferred", "transferred")
    assert "gather_attn" in by["topk"]["by"]  # never measured: priced as attention
    assert told["binding"] == "rest"


def test_amdahl_of_the_notes():
    """40 of 100 are not attention, and attention becomes 7.03 times faster: 0.485 of the time, 2.06 times faster."""
    dense, sparse = linear("dense_attn", 0.6, 1e6, batches=(1, 4)), linear("gather_attn", 0.6 / 7.03, 1e6, batches=(1, 4))
    model = made(dense, sparse, rest(0.4), gpu=None)
    shape = {"layers": 1, "n": 1, "batch": 1, "context": 2048}
    before, after = (one_step(model, [Launch(cls, 2048 * 4096, **shape)])["step_us"] for cls in ("dense_attn", "gather_attn"))
    bytes_us = 2048 * 4096 / 1e9
    assert (after - bytes_us) / (before - bytes_us) == pytest.approx(0.4 + 0.6 / 7.03, rel=2e-3)
    assert round(0.4 + 0.6 / 7.03, 3) == 0.485
    assert (before - bytes_us) / (after - bytes_us) == pytest.approx(2.06, abs=0.01)


def test_both_ends_of_a_fetch():
    copies = ("host_fetch", "memcpy", [(None, None, size, 2 + size / 20e3) for size in (2**12, 2**16, 2**20, 2**24)])
    model = made(linear("dense_attn", 10, 3000), (*copies, {"q_heads": None, "kv_heads": None, "head_dim": None}), rest(100))
    fetch = Launch("host_fetch", 8 * 2**20, 32, 32, 1, 2048)
    attention = step(Fixed(), LLAMA3, [2048])
    alone, both = one_step(model, attention), one_step(model, [*attention, fetch])
    spent = both["step_us"] - alone["step_us"]
    assert spent > 400
    assert both["overlap_us"] == pytest.approx(alone["step_us"] + max(0, spent - alone["step_us"]))
    small = one_step(model, [*attention, replace(fetch, bytes=2**10, n=1, layers=1)])
    assert small["overlap_us"] == pytest.approx(alone["step_us"])


def test_what_was_measured_in_l2_is_not_what_a_model_finds_there():
    rows = samples(gbps=3000.0, cache="unknown", repeats=1)
    from kvsim.cost.form import hot_share

    mb, hot = rows["bytes"].to_numpy() / 1e6, hot_share(rows["bytes"].to_numpy(), H200.l2_bytes)
    rows = rows.with_columns(t_us=pl.Series(5 + mb * (1 - hot) / 3 + mb * hot / 12))
    model = CostModel(H200, fit(rows, H200, draws=0).fits, {})
    assert "l2" in model.fits[0].coefficients
    small, large = (
        parts(priced(model), table([step(Fixed(), LLAMA3, [n] * 4)], LLAMA3)).row(0, named=True) for n in (512, 16384)
    )
    assert (small["grade"], large["grade"]) == ("transferred", "calibrated")
    assert small["us"] == pytest.approx(32 * 5 + small["bytes"] / 3e6, rel=0.02)  # all of it from memory


# ------------------------------------------------------------------------------------------------ grades
@pytest.mark.parametrize(
    ("rows", "grade", "unknown"),
    [
        ((linear("dense_attn", 10, 3000), rest(100)), "calibrated", []),
        ((linear("dense_attn", 10, 3000, kv_bits=8), rest(100)), "transferred", []),
        ((linear("dense_attn", 10, 3000),), "spec", ["rest"]),
    ],
)
def test_grades(rows, grade, unknown):
    told = one_step(made(*rows), step(Fixed(), LLAMA3, [8192]))
    assert (told["grade"], told["unknown"]) == (grade, unknown)
    assert (told["high_us"] is None) == (grade == "spec")


def test_weights_are_a_floor_of_the_rest():
    found = parts(
        priced(made(linear("dense_attn", 10, 3000)), weights_bytes=16 * 10**9), table([step(Fixed(), LLAMA3, [8192])], LLAMA3)
    )
    [row] = found.filter(pl.col("class") == "rest").to_dicts()
    assert row["us"] == pytest.approx(16e9 / H200.bandwidth_gbps / 1e3)
    assert (row["grade"], row["high_us"]) == ("spec", None)


def test_a_rest_of_other_batches_is_taken_over():
    model = made(linear("dense_attn", 10, 3000, batches=(1, 4, 16, 64, 256)), rest(100, 5))
    inside, outside = (one_step(model, step(Fixed(), LLAMA3, [2048] * b))["grade"] for b in (64, 128))
    assert (inside, outside) == ("calibrated", "transferred")


def test_several_kernels_of_one_class_must_be_chosen():
    model = made(linear("dense_attn", 10, 3000, "a"), linear("dense_attn", 20, 2000, "b"), rest(100))
    with pytest.raises(WrongUse, match="holds 2 kinds of dense_attn \\(a; b\\): choose one with --kernel dense_attn='a'"):
        one_step(model, step(Fixed(), LLAMA3, [2048]))
    a, b = (one_step(model, step(Fixed(), LLAMA3, [2048]), kernels={"dense_attn": k})["step_us"] for k in "ab")
    assert b > a
    with pytest.raises(WrongUse, match="--kernel dense_attn='c': not in the model; of dense_attn it has 'a', 'b'"):
        priced(model, kernels={"dense_attn": "c"})


def test_a_model_of_other_heads_is_refused():
    with pytest.raises(
        WrongUse, match="fitted for 32 query heads, 8 kv heads, head_dim 128, and this is of 32 query heads, 32 kv"
    ):
        priced(made(linear("dense_attn", 10, 3000)), LLAMA2)


def test_a_bandwidth_above_the_link_is_refused(tmp_path, bars):
    fast = [replace(f, coefficients=f.coefficients | {"bytes": 1e3 / 2000}) for f in bars.fits]
    write_model(replace(bars, fits=fast), tmp_path / "fast.json")
    with pytest.raises(BadProfile, match="at 2000 GB/s, faster than the 960 GB/s"):
        read_model(tmp_path / "fast.json")


def test_a_bandwidth_that_no_shape_tells_is_said_and_lent_to_nobody():
    small = linear("dense_attn", 40, 3000, batches=(1, 2), contexts=(512, 2048, 8192, 16384))
    large = linear("dense_attn", 40, 3000, batches=(1, 2), contexts=(512, 8192, 262144))
    few, enough = (made(r, gpu=None).fits[0].lacks for r in (small, large))
    assert enough == ""
    assert few.startswith("batch 2, context 5")  # 160 µs at 3 TB/s are 480 MB, 2 · 58 594 tokens of 4 096 bytes
    assert "480 MB a launch) would tell the bandwidth" in few
    found = parts(priced(made(small, gpu=H200)), table([[Launch("page_scan", 2**20, 1, 1, 1, 2048)]], LLAMA3))
    assert found["by"][0] == "peak of the link"


# ------------------------------------------------------------------------------------------------ what-ifs
def test_a_union_that_nobody_measured_is_said():
    model, own, one = (
        made(linear("dense_attn", 10, 3000), rest(100)),
        "quest(read=share(0.33))",
        "quest(read=share(0.33), heads='max')",
    )
    [said] = assumed(whatif(model, LLAMA3, Asked(["full()", own, one], [32768], [8])))
    assert "together they read 4 times the pages of one" in said
    assert "--union-factor" in said
    assert assumed(whatif(model, LLAMA3, Asked(["full()", own], [32768], [8], union=2.0))) == []
    assert assumed(whatif(model, LLAMA3, Asked(["full()", one], [32768], [8]))) == []


def test_the_six_published_bars(bars):
    """One rest of the step for each weight format and one bandwidth: three numbers through six bars."""
    rests = {f.key["variant"]: f.coefficients["launch"] for f in bars.fits}
    assert len({f.coefficients["bytes"] for f in bars.fits}) == 1
    assert bars.fits[0].bandwidth_gbps() < 960
    assert rests["AWQ"] < rests["FP16"]
    rows = whatif(bars, LLAMA2, Asked(["full()", "quest(read=tokens(2048), dense_layers=2)"], CONTEXTS))
    told = {(r["asked"].split("(")[0], r["variant"], r["context"]): r for r in rows}
    for variant, ms in (("FP16", (21.6, 26.6, 36.8)), ("AWQ", (14.4, 19.4, 29.6))):
        for context, bar in zip(CONTEXTS, ms, strict=True):
            full, quest = told["full", variant, context], told["quest", variant, context]
            assert full["step_us"] == pytest.approx(bar * 1e3, rel=0.01)
            assert (full["grade"], quest["grade"]) == ("calibrated", "transferred")
            assert sum(quest["parts"].values()) == pytest.approx(quest["step_us"])
            assert quest["parts"]["rest"] == pytest.approx(rests[variant])
            assert quest["speedup"]["low"] < quest["speedup"]["speedup"] < quest["speedup"]["high"]
            assert full["speedup"] == pytest.approx({"speedup": 1.0, "low": 1.0, "high": 1.0}, rel=0.02)


def test_two_dense_layers_are_a_third_of_what_quest_reads(bars):
    [row] = whatif(bars, LLAMA2, Asked(["quest(read=tokens(2048), dense_layers=2)"], [32768], variants=["AWQ"]))
    by = {r["class"]: r["bytes"] for r in row["detail"]}
    read = by["dense_attn"] + by["page_scan"] + by["gather_attn"]
    assert by["dense_attn"] == pytest.approx(1.07e9, rel=0.01)
    assert read == pytest.approx(3.09e9, rel=0.01)


def test_a_ratio_shares_the_errors_of_both_sides(bars):
    """Two policies of the same bytes are equally fast however wrong the bandwidth is, though each by itself may be 40 % off."""
    from kvsim.cost.ratio import speedups

    same = step(Fixed(read=tokens(2048)), LLAMA2, [32768])
    [ratio] = speedups(priced(bars, LLAMA2, rest="AWQ"), table([same, same], LLAMA2), [(0, 1)])
    assert ratio == pytest.approx({"speedup": 1.0, "low": 1.0, "high": 1.0}, rel=1e-9)
    [alone] = whatif(bars, LLAMA2, Asked(["quest(read=tokens(2048))"], [32768], variants=["AWQ"]))
    width = np.log(alone["speedup"]["high"] / alone["speedup"]["low"])
    apart = np.log(alone["high"] / alone["low"])
    assert 0 < width < 1.2 * apart


def test_more_tokens_never_cost_less(bars):
    for policy in ("full()", "quest(read=tokens(1024))", "h2o(hold=share(0.2))", "kivi(bits=4)"):
        rows = whatif(bars, LLAMA2, Asked([policy], [1024, 8192, 32768], variants=["AWQ"]))
        us = [r["step_us"] for r in rows]
        assert us == sorted(us)
        assert all(r["low"] <= r["step_us"] <= r["high"] for r in rows)


def test_lengths_of_a_ragged_batch():
    model = made(linear("dense_attn", 10, 3000), rest(100))
    [ragged] = whatif(model, LLAMA3, Asked(["full()"], lengths=[8192, 512]))
    [padded] = whatif(model, LLAMA3, Asked(["full()"], lengths=[8192, 512], padded=True))
    [even] = whatif(model, LLAMA3, Asked(["full()"], [8192], [2]))
    assert (ragged["batch"], ragged["context"]) == (2, 4352)
    assert ragged["step_us"] < padded["step_us"] == even["step_us"]
    with pytest.raises(WrongUse, match=r"either --context .* or --lengths"):
        whatif(model, LLAMA3, Asked(["full()"], [8192], lengths=[1]))


def test_heads_are_split_among_devices():
    assert split_heads(LLAMA3, 2) == replace(LLAMA3, q_heads=16, kv_heads=4)
    assert split_heads(LLAMA3, 16).kv_heads == 1
    with pytest.raises(WrongUse, match="--tp 3"):
        split_heads(LLAMA3, 3)
    model = made(
        linear("dense_attn", 10, 3000, q_heads=16, kv_heads=4), ("rest", "made", rest(100)[2], {"q_heads": 16, "kv_heads": 4})
    )
    [row] = whatif(model, LLAMA3, Asked(["full()"], [8192], devices=2))
    by = {r["class"]: r for r in row["detail"]}
    assert by["dense_attn"]["bytes"] == step(Fixed(), LLAMA3, [8192])[0].bytes // 2
    assert by["collective"]["bytes"] == 2 * 32 * 32 * 128 * 2
    assert (row["grade"], row["unknown"], row["high"]) == ("spec", ["collective"], None)


def test_a_batch_that_does_not_fit_is_refused(bars):
    with pytest.raises(WrongUse, match=r"with 4 requests of up to 32768 tokens needs 68.7 GB for the cache, and .* has 48 GB"):
        whatif(bars, LLAMA2, Asked(["full()"], [32768], [4]))
    with pytest.raises(WrongUse, match=r"needs 40.0 GB of weights and 17.2 GB"):
        whatif(bars, LLAMA2, Asked(["full()"], [32768], weights_bytes=40 * 10**9))


def test_other_ways_to_score_and_to_decode_cost_more(bars):
    def us(policy, **how):
        return whatif(bars, LLAMA2, Asked([policy], [8192], variants=["AWQ"], how=Kernels(**how)))[0]["step_us"]

    lse, second = (us("h2o(hold=tokens(4096))", scores=s) for s in ("fused_lse", "second_pass"))
    assert lse < second
    scored = [
        {x.cls: x.bytes for x in step(fixed("h2o(hold=tokens(64))", LLAMA3), LLAMA3, [9999], Kernels(s))}["scores"]
        for s in SCORES
    ]
    assert scored == sorted(scored)  # unfused attention copies K and V out for every query head of a group
    assert us("kivi(bits=2)", dequant="fused") < us("full()") < us("kivi(bits=2)", dequant="separate")


@pytest.mark.parametrize(
    ("name", "said"),
    [("llama-2-7b", "did you mean 'meta-llama/Llama-2-7b-hf'"), ("zebra", "no model that kvsim knows; known are")],
)
def test_an_unknown_model_is_refused(name, said):
    with pytest.raises(WrongUse, match=said):
        geometry(name)


# ------------------------------------------------------------------------------------------------ explain
def test_terms_add_up_to_the_form():
    model = made(linear("dense_attn", 10, 3000), rest(100))
    found = explain(priced(model), fixed("quest(read=tokens(2048))", LLAMA3), LLAMA3, [16384])
    for part in found:
        if "terms" in part:
            assert sum(part["terms"].values()) == pytest.approx(part["us"], rel=0.02)
    said = "\n".join(lines(found, [{"file": "a.csv", "sha256": "0123456789", "rows": {"ok": 3}}]))
    assert "gather_attn" in said
    assert "taken over from dense_attn made" in said
    assert "a.csv sha256 01234567: 3 ok" in said


def test_11_ms_are_not_possible():
    found = claims.quest()
    assert found["bytes"] == 2 * 32 * 32 * 128 * 2 * 32768 == 16 * 2**30
    assert found["floor_ms"] == pytest.approx(17.04, abs=0.01)
    assert found["needs_gbps"] > found["card_gbps"]
    assert found["like_ms"] == pytest.approx(11.05, abs=0.01)
    assert found["with_weights_gb"] == pytest.approx(30.66, abs=0.01)
    assert found["with_weights_gb"] > found["card_gb"]


def test_qevict_is_not_about_bytes():
    found = claims.qevict()
    assert found["saves_ms"] == pytest.approx({"mean": 1.26, "end": 2.11}, abs=0.01)
    assert found["saves_ms"]["end"] < 0.05 * found["tpot_ms"][0]
    assert found["cache_gb"] == pytest.approx(5.37, abs=0.01)
    assert found["saved_gb"] > found["cache_gb"]


def test_geometry_in_a_table_is_the_one_of_its_launches():
    heads = Geometry(2, 8, 2, 64, 64, "fp8")
    rows = table([step(Fixed(), heads, [100])], heads, "full")
    assert rows.select("q_heads", "kv_heads", "head_dim", "kv_bits", "graph", "cache").row(0) == (8, 2, 64, 8, "full", "cold")
