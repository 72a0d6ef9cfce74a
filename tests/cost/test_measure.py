"""Shapes, bytes, rounds and the recipe; the CPU as a device; and from a measurement to a checked model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.cli import main, parser
from kvsim.cost.check import check
from kvsim.cost.fit import WIDE, fit
from kvsim.cost.hardware import named_gpu
from kvsim.cost.heads import Geometry
from kvsim.cost.load import load
from kvsim.cost.measure import cpu as device
from kvsim.cost.measure import rounds
from kvsim.cost.measure.choose import DEVICES, device_named, usual
from kvsim.cost.measure.recipe import recipe
from kvsim.cost.measure.shapes import BY_PAGE, CLASSES, FEWEST, MIB, Shape, shapes, traffic
from kvsim.cost.model import calibrate, predict, read_model, write_model
from kvsim.cost.probe import READ, device_of
from kvsim.cost.residual import grid
from kvsim.cost.samples import CLASSES as ALL_CLASSES
from kvsim.cost.samples import frame, write_samples
from kvsim.errors import WrongUse

ROOT = Path(__file__).parents[2]
SMALL = Geometry(layers=2, q_heads=8, kv_heads=2, head_dim=16, value_dim=8, dtype="float32")  # 192 bytes a token
LLAMA = usual("cuda")


class Toy:
    """A device whose kernels take 5 µs and bytes at 2 GB/s, but for an odd round that takes longer."""

    name, software, dtype, largest = "toy", "toy 1", "float32", 4 * MIB

    def __init__(self, slow_round=2):
        self.kernels = {("rest", READ): "rest"} | {(cls, "toy"): cls for cls in CLASSES if cls not in ("rest", "host_fetch")}
        self.slow, self.timed = slow_round, {}
        self.chain = dict.fromkeys(("dense_attn", "page_scan", "topk", "gather_attn"), "toy")

    def prepare(self, kernel, g, s):
        key = (len(self.timed), kernel, s)
        self.timed[key] = 0
        us = traffic(kernel, g, s) / 2e3
        return lambda: (key, us if kernel == "rest" else 5 + us)

    def time(self, launch):
        key, us = launch()
        self.timed[key] += 1
        return us * (10 if self.timed[key] == self.slow else 1)


# ------------------------------------------------------------------------------------------------ shapes and bytes
@pytest.mark.parametrize("cls", CLASSES)
@given(st.integers(FEWEST, 10_000_000))
@settings(max_examples=30, deadline=None)
def test_shapes_are_enough_for_a_fit_and_those_between_are_inside(cls, tokens):
    row = LLAMA.kv_heads * 512
    usual_, between = (shapes(cls, LLAMA, tokens * row, b) for b in (False, True))
    assert 8 <= len(usual_) <= 12
    assert not set(usual_) & set(between)
    assert max(s.batch * s.context for s in usual_) <= max(tokens * 1.02, FEWEST)
    if tokens >= 16 * 512:
        moved = [traffic(cls, LLAMA, s) for s in usual_]
        assert max(moved) >= WIDE * min(moved)
        assert len(set(usual_)) == len(usual_)
        batches, contexts = {s.batch for s in usual_}, [s.context for s in usual_ if s.batch == 1]
        assert len(batches) == (1 if cls == "rest" else 3)
        assert min(contexts) == 256
        box = grid(places(cls, usual_), np.zeros(len(usual_)))
        assert box.at(places(cls, between))[1].all()


def places(cls, wanted):
    return np.log2([(s.batch, s.pages if cls in BY_PAGE else s.context) for s in wanted])


def test_too_little_room_is_refused_with_what_is_needed():
    with pytest.raises(WrongUse, match="--largest 16 at least"):
        shapes("topk", replace(LLAMA, dtype="float32"), 4 * MIB)
    assert shapes("topk", replace(LLAMA, dtype="float32"), 16 * MIB)


def test_bytes_by_hand():
    """2 requests of 64 tokens, 3 of their 4 pages read; 8 query heads, 2 kv heads, keys of 16 numbers, values of 8, float32."""
    s = Shape(batch=2, context=64, pages=6)
    assert {cls: traffic(cls, SMALL, s) for cls in CLASSES} == {
        "rest": 128 * 2 * 24 * 4,
        "dense_attn": 128 * 2 * 24 * 4 + 2 * 8 * 24 * 2,
        "page_scan": 6 * 2 * 2 * 16 * 4,
        "topk": 6 * 8 * 4,
        "gather_attn": 96 * 2 * 24 * 4 + 2 * 8 * 24 * 2,
        "summary_update": 2 * 2 * 2 * 16 * 4,
        "dequant": 128 * 2 * 24 // 2 + 128 * 2 * 24 // 32 * 2 * 4 + 128 * 2 * 24 * 4,
        "scores": 128 * 2 * 16 * 4 + 2 * 128 * 8 * 4,
        "host_fetch": 128 * 2 * 24 * 4,
    }
    assert traffic("dense_attn", SMALL, s) == SMALL.decode_bytes(2, 128)  # the formula of samples that tables give
    assert set(CLASSES) <= set(ALL_CLASSES)


# ------------------------------------------------------------------------------------------------ rounds
def test_a_row_holds_the_median_and_a_plain_read_its_fastest():
    device = Toy(slow_round=3)
    found = rounds.measure(device, SMALL, seconds=0)
    assert set(device.timed.values()) == {1 + rounds.LEAST}  # one that is not counted
    assert found["status"].unique().to_list() == ["ok"]
    plain = found.filter(pl.col("class") == "rest")
    assert (plain["bytes"] / plain["t_us"] * 1e-3).to_list() == pytest.approx([2.0] * plain.height, rel=1e-3)
    others = found.filter(pl.col("class") != "rest")
    assert (others["t_us"] - others["bytes"] / 2e3).to_list() == pytest.approx([5.0] * others.height, abs=1e-2)
    assert found["pages"].is_not_null().to_list() == found["class"].is_in(BY_PAGE).to_list()
    assert {Path(x).name for x in found["source"]} == set(found["source"])  # no paths


def test_a_device_without_a_file_is_known_by_its_own_reads(tmp_path):
    write_samples(rounds.measure(Toy(), SMALL, seconds=0), tmp_path / "samples.csv")
    write_samples(rounds.measure(Toy(), SMALL, seconds=0, between=True), tmp_path / "others.csv")
    model = calibrate([tmp_path / "samples.csv"], draws=0)
    assert model.gpu.bandwidth_gbps == pytest.approx(2, rel=1e-3)
    assert {f.key["class"] for f in model.fits} == set(CLASSES) - {"rest", "host_fetch"}
    write_model(model, tmp_path / "model.json")
    others = load([tmp_path / "others.csv"]).samples
    found = check(read_model(tmp_path / "model.json"), others)
    assert all(w["grades"] == {"calibrated": w["n"]} and w["mape"] < 0.01 for w in found["whole"])
    with pytest.raises(WrongUse, match="the samples are of other"):
        check(model, others.with_columns(gpu=pl.lit("other")))
    with pytest.raises(WrongUse, match="unknown GPU 'toy'"):
        device_of("toy", others.filter(pl.col("class") != "rest"))
    assert device_of("H200", others) == named_gpu("h200")


def test_classes_and_dtypes_that_are_not_there_are_refused():
    with pytest.raises(WrongUse, match="no kernel of class 'host_fetch' to measure on toy: one of rest, dense_attn"):
        rounds.measure(Toy(), SMALL, ["host_fetch"])
    with pytest.raises(WrongUse, match="toy are of float32, the geometry of float16"):
        rounds.measure(Toy(), replace(SMALL, dtype="float16"))
    assert set(rounds.measure(Toy(), SMALL, ["topk"], 0)["class"]) == {"rest", "topk"}


# ------------------------------------------------------------------------------------------------ the CPU
@pytest.fixture
def small(monkeypatch):
    """A CPU with a last cache of 1 MiB and laps of 4 MiB."""
    monkeypatch.setattr(device, "ROOM", 4 * MIB)
    monkeypatch.setattr(device, "_last_cache", lambda: MIB)


@pytest.mark.parametrize("key", sorted(device.KERNELS), ids=lambda key: f"{key[0]} {key[1].split()[-1]}")
def test_kernels_run_and_take_time(small, key):
    cpu = device.Cpu(MIB)
    assert cpu.time(cpu.prepare(cpu.kernels[key], SMALL, Shape(2, 256, 8))) > 0


def test_gathering_all_pages_is_dense_attention(small):
    """The three kernels of attention on the same inputs: reads of every page, in place or copied, by choice or not."""
    s = Shape(2, 256, 32)
    outs = []
    for key in (*(k for k in device.KERNELS if k[0] in ("dense_attn", "gather_attn")), None):
        fresh = device.Cpu(MIB)
        fresh.prepare(fresh.kernels[key] if key else fresh.selective, SMALL, s)()
        start = 0 if key else 2 * 8 * 16  # behind the bounds
        outs.append(fresh._outputs[start : start + 2 * 8 * 8])
    for out in outs[1:]:
        assert out == pytest.approx(outs[0], abs=1e-6)
    assert np.abs(outs[0]).max() > 0.01


def test_launches_of_a_lap_share_no_memory(small):
    """Cold by turns: flushed when a lap begins and when the rounds begin again, and only then."""
    fresh, flushed = device.Cpu(MIB), []
    fresh._inputs = fresh._inputs[: 100 * 1024]
    launches = [fresh.prepare(fresh.kernels["rest", READ], SMALL, Shape(1, n, 1)) for n in (512, 1024, 1024, 256, 1536)]
    assert [x.lap for x in launches] == [0, 0, 1, 1, 2]
    for _ in range(2):
        for launch in launches:
            before = fresh._last
            fresh.time(launch)
            flushed.append(launch.lap != before[0] or launch.number <= before[1])
    assert flushed == [False, False, True, False, True, True, False, True, False, True]


# ------------------------------------------------------------------------------------------------ recipe and commands
def test_the_recipe_is_the_same_every_time_and_its_imports_are_commands():
    text = recipe(named_gpu("a100-40"), LLAMA)
    assert text == recipe(named_gpu("a100-40"), LLAMA)
    assert text != recipe(named_gpu("a100-40"), LLAMA, between=True)
    assert text.splitlines()[0].startswith("# NVIDIA A100")
    lines = text.replace("\\\n", "").splitlines()
    calls = [line.strip().removeprefix("#").split() for line in lines if "kvsim cost" in line and not line.startswith("# then")]
    assert len(calls) > len(CLASSES)
    for call in calls:
        words = [{"$BATCH": "1", "$CONTEXT": "1", "$PAGES": "1"}.get(w, w) for w in call[call.index("kvsim") + 1 :]]
        parser().parse_args(words)
    made = {line.split("echo ")[1].split(" > ")[0] for line in lines if line.startswith("echo")}
    assert json.loads(made.pop().strip("'"))["q_heads"] == 32
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""


def test_a_profile_of_a_page_kernel_gets_its_bytes(tmp_path):
    """What the recipe's import line makes of Nsight Compute's file."""
    (tmp_path / "heads.json").write_text(json.dumps(vars(LLAMA)))
    profile = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n'
    profile += "".join(
        f'"{i}","{name}","12,000"\n' for i, name in enumerate(("MaxPossible", "topk_kernel", "topk_reduce", "flash_fwd"))
    )
    (tmp_path / "x.csv").write_text(profile)
    told = {"geometry": tmp_path / "heads.json", "batch": 2, "context": 64}
    s = Shape(2, 64, 8)
    found = load([tmp_path / "x.csv"], **told, pages=8, page=16).samples
    assert found["bytes"].to_list() == [
        traffic("page_scan", LLAMA, s),
        traffic("topk", LLAMA, s),
        None,
        traffic("dense_attn", LLAMA, s),
    ]
    assert found["pages"].to_list() == [8, 8, None, None]
    assert load([tmp_path / "x.csv"], **told).samples["bytes"].to_list()[:3] == [None] * 3
    with pytest.raises(WrongUse, match="--pages needs --page"):
        load([tmp_path / "x.csv"], pages=8, page=16)


def test_the_command_measures_a_cpu(small, tmp_path, capsys):
    (tmp_path / "heads.json").write_text(json.dumps(vars(SMALL)))
    out = tmp_path / "samples.csv"
    words = ["cost", "measure", "--device", "cpu", "--classes", "topk", "--geometry", tmp_path / "heads.json", "--largest", "1"]
    assert main([str(w) for w in [*words, "--seconds", "0", "-o", out]]) == 0
    said = capsys.readouterr()
    assert "samples.csv: cpu: " in said.out
    assert "20 shapes of 2 kernels" in said.err
    rows = load([out]).samples
    assert set(rows["cache"]) == {"cold"}
    assert all("kvsim cost measure" in x and "/" not in x for x in rows["source"])
    assert fit(rows, device_of(rows["gpu"][0], rows), draws=0).fits


@pytest.mark.parametrize("name", ["recipe", "measure"])
def test_unknown_classes_are_wrong_use(small, name, tmp_path, capsys):
    words = ["cost", name, "--classes", "gather", *(["--device", "cpu", "-o", str(tmp_path / "x")] if name == "measure" else [])]
    assert main(words) == 2
    assert "'gather'" in capsys.readouterr().err


def test_without_torch_or_gpu_one_line_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.delitem(sys.modules, "kvsim.cost.measure.gpu", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["cost", "measure", "-o", str(tmp_path / "x.csv")]) == 2
    said = capsys.readouterr().err
    assert "pip install 'kvsim[capture]'" in said
    assert said.count("\n") == 1
    assert DEVICES == ("cuda", "cpu")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_without_a_gpu_torch_is_not_enough(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WrongUse, match="sees no GPU: say --device cpu"):
        device_named("cuda", LLAMA)


# ------------------------------------------------------------------------------------------------ the crossover
def test_the_crossover_is_where_the_ratio_turns_for_good():
    from tools.crossover import contexts, crossing

    lengths = [1000, 2000, 4000, 8000]
    assert crossing(lengths, [1, 2, 4, 8], [3, 3, 3, 3]) == pytest.approx(2000 * 2 ** (np.log(1.5) / np.log(2)))
    assert crossing(lengths, [1, 2, 4, 8], [0.5, 2.5, 3, 3]) > 2000  # cheaper once by chance is not cheaper
    assert crossing(lengths, [1, 2, 4, 8], [9, 9, 9, 9]) is None
    assert crossing(lengths, [1, 2, 4, 8], [0, 0.1, 0.1, 0.1] + np.full(4, 1e-9)) is None
    found = contexts(SMALL, 1, 2 * MIB)
    assert (found[0], found[-1]) == (1024, 2 * MIB // 192 // 16 * 16 + 16 * (2 * MIB // 192 % 16 > 8))
    assert all(n % 16 == 0 for n in found)


def test_a_model_predicts_the_crossover_that_its_samples_have(tmp_path):
    """Toy kernels: dense 5 + 8 T; the chain 15 + scan + topk + gather, which is where the two lines cross."""
    from tools.crossover import contexts, crossing, predicted

    toy = Toy(slow_round=0)
    toy.largest = 8 * MIB
    write_samples(rounds.measure(toy, SMALL, seconds=0), tmp_path / "samples.csv")
    model = calibrate([tmp_path / "samples.csv"], draws=0)
    lengths = contexts(SMALL, 1, toy.largest)
    found = crossing(lengths, *predicted(model, toy.chain, SMALL, 1, lengths))

    def us(cls, tokens, pages):
        return 5 + traffic(cls, SMALL, Shape(1, tokens, pages)) / 2e3

    def saved(n):
        return us("dense_attn", n, 0) - us("page_scan", n, n // 16) - us("topk", n, n // 16) - us("gather_attn", n, 64)

    truth = next(n for n in range(1024, 40_000, 16) if saved(n) > 0)
    assert found == pytest.approx(truth, rel=0.02)
    assert predict(model, frame([])).is_empty()
