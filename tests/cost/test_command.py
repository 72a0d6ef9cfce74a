"""`kvsim cost`: from an export to a checked model on the command line."""

from __future__ import annotations

import json

import pytest

from kvsim.cli import main
from kvsim.cost.samples import write_samples
from tests.cost import exports
from tests.cost.made import samples


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main([str(w) for w in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_import_counts_and_writes(run, tmp_path):
    (tmp_path / "run.csv").write_text(exports.NSYS_CSV)
    code, out, _ = run("cost", "import", "run.csv", "-o", "samples.csv")
    assert code == 0
    assert "run.csv: nsys, GPU unknown: 2 ok" in out
    assert "left out: 1 kernel of no class" in out
    assert "unclassed: 1.1% of kernel time" in out
    assert (tmp_path / "samples.csv").read_text().startswith("class,variant,batch")
    code, out, _ = run("cost", "import", "run.csv", "--json")
    assert json.loads(out)["files"][0]["rows"]["ok"] == 2


def test_fit_and_check(run, tmp_path):
    write_samples(samples(noise=0.02, repeats=2, gpu="H200"), tmp_path / "samples.csv")
    code, out, _ = run("cost", "fit", "samples.csv", "-o", "model.json", "--half", "--draws", "20")
    assert code == 0
    assert "NVIDIA H200 SXM5 141GB: 1 fits" in out
    assert "launch" in out
    code, out, _ = run("cost", "check", "model.json", "samples.csv")
    assert code == 0
    assert "dense_attn made" in out
    assert "fitted half" in out
    code, out, _ = run("cost", "check", "model.json", "samples.csv", "--json")
    [row] = json.loads(out)["rows"]
    assert {"class", "variant", "n", "mape", "p90", "bias"} <= set(row)


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("hello", 1, "of no format that kvsim reads"),
        (exports.NSYS_CSV.replace('"5,500,000"', '"5.500,0"'), 1, "row 4, column Total Time (ns): '5.500,0' is not a number"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, content, code, said):
    (tmp_path / "x.csv").write_text(content)
    got, out, err = run("cost", "import", "x.csv", "-o", "samples.csv")
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert said in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.csv"]


def test_wrong_use_is_code_2(run, tmp_path):
    write_samples(samples(), tmp_path / "samples.csv")
    assert run("cost", "fit", "samples.csv", "-o", "m.json", "--gpu", "abacus")[0] == 2
    assert run("cost", "fit", "samples.csv", "-o", "m.json", "--draws", "20")[0] == 0
    write_samples(samples(kv_heads=4), tmp_path / "other.csv")
    code, _, err = run("cost", "check", "m.json", "other.csv")
    assert code == 2
    assert "kv heads" in err
