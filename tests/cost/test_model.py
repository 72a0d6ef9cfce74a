"""The model's file, what it predicts with which grade, and what it is checked against."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

from kvsim.cost.check import check
from kvsim.cost.hardware import gpus, named_gpu
from kvsim.cost.model import PUBLISHED, calibrate, lines, predict, read_model, write_model
from kvsim.cost.samples import read_samples, write_samples
from kvsim.errors import BadProfile, WrongUse
from tests.cost.made import SHAPES, samples, size

GPU = "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "samples.csv"
    write_samples(samples(noise=0.02, repeats=2, sequence=0.5, gpu=GPU), path)
    return path


@pytest.fixture
def model(table):
    return calibrate([table], draws=20)


def shape(batch, context, **columns):
    return samples(shapes=[(batch, context)], **columns)


def grade(model, batch, context, **columns):
    return predict(model, shape(batch, context, **columns)).row(0, named=True)


# ------------------------------------------------------------------------------------------------ files
def test_samples_survive_their_file(table, tmp_path):
    once = read_samples(table)
    write_samples(once, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == table.read_bytes()
    assert "bytes_measured" not in table.read_text()  # optional, and empty
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.csv", "samples.csv"]


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("t_us", "12,5", "row 3, column t_us: '12,5' where a plain number"),
        ("t_us", "-1", "row 3, column t_us: '-1' where a number above 0"),
        ("t_us", "NaN", "row 3, column t_us: 'NaN' where a number above 0"),
        ("t_us", None, "row 3, column t_us: None where a value"),
        ("n", "0", "row 3, column n: '0' where a number above 0"),
        ("bytes", "2.5 MB", "row 3, column bytes: '2.5 MB' where a whole number"),
        ("class", "attention", "row 3, column class: 'attention' where one of dense_attn"),
        ("status", "fine", "row 3, column status: 'fine' where one of ok"),
        ("batch", "-2", "row 3, column batch: '-2' where a number of 0 or more"),
    ],
)
def test_a_wrong_cell_is_named(table, column, cell, said):
    text = pl.read_csv(table, infer_schema=False)
    changed = text.with_columns(pl.Series(column, [text[column][0], cell, *text[column][2:]], dtype=pl.String))
    changed.write_csv(table)
    with pytest.raises(BadProfile, match=rf"samples\.csv, {said}"):
        read_samples(table)


def test_a_table_of_something_else_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadProfile, match="no column 'class'"):
        read_samples(tmp_path / "x.csv")


def test_the_model_file_is_deterministic_and_complete(table, model, tmp_path):
    write_model(model, tmp_path / "a.json")
    write_model(calibrate([table], draws=20), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    text = json.loads((tmp_path / "a.json").read_text())
    assert text["inputs"][0]["file"] == "samples.csv"
    assert len(text["inputs"][0]["sha256"]) == 64
    assert text["inputs"][0]["rows"] == {"ok": 2 * len(SHAPES)}
    assert {"gpu", "software", "options", "units", "left_out", "refused", "schema"} <= set(text)
    assert "bandwidth_gbps" in text["gpu"]["sources"]
    assert str(tmp_path) not in json.dumps(text)
    assert {"ci95", "box", "held_out", "residuals", "spread", "rows"} <= set(text["fits"][0])


def test_the_file_says_what_the_model_says(model, tmp_path):
    write_model(model, tmp_path / "m.json")
    asked = samples(shapes=[(4, 2048), (3, 3000), (16, 40000)])
    here, there = predict(model, asked), predict(read_model(tmp_path / "m.json"), asked)
    assert here["grade"].to_list() == there["grade"].to_list() == ["calibrated", "calibrated", "extrapolated"]
    assert here["predicted_us"].to_list() == pytest.approx(there["predicted_us"].to_list(), rel=1e-5)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "no json", '{"schema": "kvsim.costmodel/9"}', '{"schema": "kvsim.costmodel/1", "fits": [{}]}']
)
def test_what_is_no_model_is_refused(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(BadProfile, match=r"m\.json: "):
        read_model(tmp_path / "m.json")


def test_what_is_fitted_is_said_with_its_unit(tmp_path):
    write_samples(samples(launch=20_000.0, gbps=1000.0), tmp_path / "s.csv")
    said = "\n".join(lines(calibrate([tmp_path / "s.csv"], draws=20)))
    assert re.search(
        r": launch \d{5} \[\d{5}, \d{5}\] µs per launch, bytes [\d.]+ \[[\d.]+, [\d.]+\] µs per MB from memory", said
    ), said


def test_where_no_file_is_those_that_come_along_are_named(tmp_path):
    with pytest.raises(BadProfile, match=r"h200: no such file; .* with kvsim: .*h100-vllm-0\.14$"):
        read_model(tmp_path / "h200")


def test_a_model_that_comes_along_goes_by_its_name_but_for_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [file] = PUBLISHED.glob("*.json")
    assert lines(read_model(file.stem)) == lines(read_model(file))
    Path(file.stem).write_text("{}")
    with pytest.raises(BadProfile, match="not a cost model"):
        read_model(file.stem)


@pytest.mark.parametrize("columns", [{}, {"batch": None, "context": None}, {"batch": None}])
def test_every_measured_shape_is_calibrated_after_the_file(tmp_path, columns):
    """Sizes in bytes have more digits than the file, and corners of a hull are on its edge."""
    odd = [(b, c) for b in (1, 3, 17, 251) for c in (509, 4099, 32771)]
    rows = samples(shapes=odd, gpu=GPU).with_columns(**{c: pl.lit(v, pl.Int64) for c, v in columns.items()})
    write_samples(rows, tmp_path / "samples.csv")
    write_model(calibrate([tmp_path / "samples.csv"], draws=0), tmp_path / "m.json")
    assert predict(read_model(tmp_path / "m.json"), rows)["grade"].unique().to_list() == ["calibrated"]


# ------------------------------------------------------------------------------------------------ grades
def test_every_prediction_has_a_grade(model):
    inside = grade(model, 5, 3000)
    truth = 12 + size(5, 3000) / 1500e3 + 0.5 * 5
    assert inside["grade"] == "calibrated"
    assert inside["predicted_us"] == pytest.approx(truth, rel=0.05)
    assert inside["low_us"] < truth < inside["high_us"]
    longer = grade(model, 16, 60000)
    assert longer["grade"] == "extrapolated"
    assert longer["high_us"] / longer["low_us"] >= inside["high_us"] / inside["low_us"]
    floor = grade(model, 16, 70000)
    assert (floor["grade"], floor["high_us"]) == ("spec", None)
    assert floor["predicted_us"] == floor["low_us"] == pytest.approx(size(16, 70000) / 2039e3)
    assert grade(model, 128, 3000)["grade"] == grade(model, 4, 256)["grade"] == "spec"
    other = grade(model, 4, 2048, kv_heads=4)
    assert other["grade"] == "transferred"
    assert (other["low_us"], other["high_us"]) == pytest.approx((0.6 * other["predicted_us"], 1.4 * other["predicted_us"]))


def test_another_class_or_no_gpu_has_at_most_a_floor(model, table):
    scan = predict(model, shape(4, 2048).with_columns(pl.lit("page_scan").alias("class"))).row(0, named=True)
    assert scan["grade"] == "spec"
    assert scan["predicted_us"] == pytest.approx(size(4, 2048) / 2039e3)
    write_samples(samples(), table)
    nowhere = calibrate([table], draws=0)
    assert grade(nowhere, 500, 100)["predicted_us"] is None


def test_intervals_of_predictions_hold_new_measurements(model):
    new = samples(noise=0.02, sequence=0.5, seed=9, shapes=[(b, c) for b in (2, 8, 32) for c in (700, 3000, 20000)], repeats=4)
    told = predict(model, new)
    held = told.select((pl.col("t_us") >= pl.col("low_us")) & (pl.col("t_us") <= pl.col("high_us"))).to_series()
    assert held.mean() > 0.8


def test_rows_keep_their_order(model):
    asked = pl.concat([shape(4, 2048), shape(4, 2048, kv_heads=4), shape(1, 512)])
    assert predict(model, asked)["context"].to_list() == [2048, 2048, 512]


# ------------------------------------------------------------------------------------------------ check
def test_check_of_half_the_shapes(table):
    found = check(calibrate([table], halved=True, draws=0), read_samples(table))
    [row] = found["rows"]
    assert 0 < row["n"] < 2 * len(SHAPES)
    assert row["n"] + sum(n for g, n in row["grades"].items() if g != "calibrated") + found["left_out"]["fitted half"] == 2 * len(
        SHAPES
    )
    assert 0 < row["mape"] < 0.05
    assert row["mape"] <= row["p90"]
    assert row["plain"]["mape"] > 3 * row["mape"]
    assert row["plain"]["bias"] < 0
    assert found["whole"][0]["n"] == row["n"]


def test_check_measures_what_is_wrong(model):
    """Measurements twice as slow: predictions are half of them."""
    [row] = check(model, samples(sequence=0.5).with_columns(pl.col("t_us") * 2))["rows"]
    assert row["bias"] == pytest.approx(-0.5, abs=0.02)
    assert row["mape"] == pytest.approx(0.5, abs=0.02)


def test_a_model_of_other_heads_is_refused_in_one_line(model):
    with pytest.raises(
        WrongUse,
        match=r"the samples are of dense_attn with 28 query heads, 4 kv heads, head_dim 128, the model of .* 32 query heads, 8 kv heads",
    ):
        check(model, samples(q_heads=28, kv_heads=4))


def test_a_model_of_another_gpu_is_refused_in_one_line(model):
    with pytest.raises(WrongUse, match="the samples are of NVIDIA H200, the model of NVIDIA A100 SXM4 80GB"):
        check(model, samples(gpu="NVIDIA H200"))


def test_strict_refuses_what_is_not_calibrated(model):
    check(model, samples(), strict=True)
    with pytest.raises(
        BadProfile, match=r"--strict: 1 of 17 rows are not calibrated, the first .* batch 999, context 512 \(spec\)"
    ):
        check(model, samples(shapes=[*SHAPES, (999, 512)]), strict=True)


def test_samples_of_two_gpus_are_refused(table, tmp_path):
    write_samples(samples(gpu="NVIDIA H200"), tmp_path / "other.csv")
    with pytest.raises(WrongUse, match="samples of 2 GPUs"):
        calibrate([table, tmp_path / "other.csv"])


# ------------------------------------------------------------------------------------------------ hardware
@pytest.mark.parametrize("key", gpus())
def test_every_figure_of_a_gpu_has_a_source(key):
    gpu = gpus()[key]
    assert set(gpu.sources) == {"bandwidth_gbps", "memory_gb", "l2_bytes", "pcie_gbps", "processors"}
    assert all(len(source) > 5 for source in gpu.sources.values())
    assert named_gpu(gpu.name) is not None
    assert named_gpu(gpu.name).key == key
    assert gpu.pcie_gbps < gpu.bandwidth_gbps


def test_an_unknown_gpu_is_refused():
    with pytest.raises(WrongUse, match="unknown GPU 'abacus': one of a100-40"):
        named_gpu("abacus")
