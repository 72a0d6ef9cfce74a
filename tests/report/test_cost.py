"""Time on the page: what the bill of a run says, and how wrong the model behind it is."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.cli import main
from kvsim.cost.model import calibrate
from kvsim.cost.predict import PERCENTILES, Bill, read_bill, write
from kvsim.cost.samples import write_samples
from kvsim.errors import BadProfile, WrongUse
from kvsim.metrics.run import open_run
from kvsim.report.sections.cost import PARTS, Costs, section
from kvsim.report.theme import TIMES
from kvsim.report.view import View
from tests.cost.made import samples
from tests.report.runs import H2O, QUEST


def bill_of(policies, high=2500.0):
    """Two classes a step, 1 and 0.5 ms, in six steps."""
    quantiles = {f"p{q}": 1500.0 for q in PERCENTILES}
    classes = [
        {"class": name, "us": us, "bytes": 1.0, "grade": "transferred", "by": "a fit"}
        for name, us in (("gather_attn", 1000.0), ("page_scan", 500.0))
    ]
    told = {"tpot_us": quantiles, "tpot_staggered_us": quantiles, "overlap_us": 1500.0, "low_us": 1000.0, "high_us": high}
    told |= {"grade": "transferred", "unknown": [], "classes": classes, "steps": 6, "binding": "gather_attn", "prefill": []}
    summary = [{"policy": p, "prefill_extra_us": 0.0, "peak_resident_bytes": 1, "peak_away_bytes": 0} | told for p in policies]
    steps = pl.DataFrame(
        {"policy": [p for p in policies for _ in range(6)], "step": [*range(6)] * len(policies), "step_us": 1500.0}
    )
    return Bill(steps, steps, steps, summary, ["a note"])


@pytest.fixture(scope="module")
def view(runs):
    return View.of(open_run(runs["plain"]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_samples(samples(noise=0.02, gpu="H200"), folder / "samples.csv")
    return calibrate([folder / "samples.csv"], draws=0)


def figures(part):
    return {b.name: b for b in part.blocks if b.kind == "figure"}


def test_a_bill_is_drawn_by_what_a_step_is_spent_on(view):
    found = figures(section(view, Costs(bill_of([QUEST, H2O]))))
    assert list(found) == ["time", "time-error", "time-steps"]
    rows = {(p, part): ms for p, part, ms, *_ in found["time"].data.select("policy", "part", "ms").iter_rows()}
    assert rows["quest 8", "attention"] == pytest.approx(1.0)
    assert rows["quest 8", "index: scan and top-k"] == pytest.approx(0.5)
    assert "Not priced: kivi, full, oracle 8, random_read 8." in found["time"].caption
    for f in found.values():
        assert f.spec["description"]


def test_a_time_without_an_upper_end_is_a_floor(view):
    spec = figures(section(view, Costs(bill_of([QUEST], high=None))))["time"].spec
    said = [row["said"] for data in spec["datasets"].values() for row in data if "said" in row]
    assert said == ["≥ 1.5 ms, transferred"]


def test_every_class_of_a_bill_has_a_part():
    from kvsim.cost.samples import CLASSES

    assert set(PARTS.values()) == set(TIMES)
    assert set(CLASSES) - {"prefill_extra"} <= set(PARTS)


def test_a_model_is_held_against_samples(view, model):
    others = samples(shapes=[(2, 1000), (8, 3000), (32, 5000)], gpu="H200")
    found = figures(section(view, Costs(model=model, samples=others)))
    assert list(found) == ["fits", "calibration"]
    assert found["calibration"].data["grade"].to_list() == ["calibrated"] * 3
    assert found["calibration"].data.select((pl.col("predicted_us") / pl.col("t_us") - 1).abs().max()).item() < 0.2


def test_what_does_not_go_together_is_refused(view, model, tmp_path):
    with pytest.raises(WrongUse, match="add --model"):
        section(view, Costs(samples=samples()))
    with pytest.raises(WrongUse, match=r"of other policies than .*kvsim cost predict"):
        section(view, Costs(bill_of(["none()"])))
    with pytest.raises(BadProfile, match="not a bill"):
        read_bill(tmp_path)


def test_a_bill_comes_back_as_it_was_written(tmp_path):
    bill = bill_of([QUEST])
    write(bill, tmp_path / "bill")
    found = read_bill(tmp_path / "bill")
    assert (found.summary, found.notes) == (bill.summary, bill.notes)
    assert found.steps.equals(bill.steps)


@pytest.mark.parametrize("text", ["[]", "{", '{"policies": [{}], "notes": []}', '{"policies": 3, "notes": []}', "[" * 100_000])
def test_a_bill_that_was_altered_is_refused(tmp_path, text):
    write(bill_of([QUEST]), tmp_path / "bill")
    (tmp_path / "bill" / "summary.json").write_text(text)
    with pytest.raises(BadProfile, match="not a bill"):
        read_bill(tmp_path / "bill")


def test_the_command_takes_one_run_and_refuses_several(runs, tmp_path, capsys):
    write(bill_of([QUEST]), tmp_path / "bill")
    two = [str(runs["plain"]), str(runs["bare"])]
    assert main(["report", *two, "--bill", str(tmp_path / "bill"), "-o", str(tmp_path / "x.html")]) == 2
    assert "go with one run, not with 2" in capsys.readouterr().err
    assert main(["report", two[0], "--bill", str(tmp_path), "-o", str(tmp_path / "x.html")]) == 1
