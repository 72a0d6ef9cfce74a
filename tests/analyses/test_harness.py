"""How the analyses count: figures from sums, intervals over contexts, verdicts, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from analyses import contexts, words
from analyses.__main__ import main
from analyses.figures import (
    HOLDS,
    NOT,
    OPEN,
    SCHEMA,
    UNTOLD,
    Claim,
    Figures,
    NoFigure,
    Verdict,
    by_cell,
    judge,
    mean,
    rows,
    share,
    told,
)
from analyses.question import Numbers, measured_again, part_of, strayed
from kvsim.errors import KvsimError
from kvsim.metrics.interval import FEWEST


def table(values, below=1.0, cell="a: answer", line="quest"):
    """One figure of as many contexts as there are values."""
    at = {"cell": cell, "context": [f"c{i}" for i in range(len(values))], "figure": "recall", "line": line, "at": ""}
    return pl.DataFrame(at | {"top": values, "below": below}, SCHEMA)


def claim(lo=0.5, hi=1.0, so="so", **more):
    return Claim("they say", "the number", lambda f: f("recall", "quest"), (lo, hi), so, "not so", **more)


# ---------------------------------------------------------------------------------------------- figures
def test_a_figure_is_a_ratio_of_sums_over_contexts():
    f = Figures("a", table([1.0, 3.0], [1.0, 9.0]))
    assert f("recall", "quest")[0] == 0.4
    assert f.frame().select("value", "low", "high").row(0) == (0.4, None, None)


def test_an_interval_is_that_of_resampled_contexts():
    values = np.linspace(0, 1, 12)
    value, low, high = told(Figures("a", table(values))("recall", "quest"))
    rng = np.random.default_rng(1)
    other = np.percentile([rng.choice(values, 12).mean() for _ in range(4000)], [2.5, 97.5])
    assert value == pytest.approx(0.5)
    assert (low, high) == pytest.approx(other, abs=0.02)


def test_differences_are_paired():
    rng = np.random.default_rng(0)
    base = rng.random(FEWEST)
    f = Figures("a", pl.concat([table(base), table(base + 0.1, line="other")]))
    assert told(f("recall", "other") - f("recall", "quest"))[1:] == pytest.approx((0.1, 0.1))


def test_a_figure_that_is_not_there_is_named_with_its_nearest():
    with pytest.raises(KvsimError, match=r"no figure 'recall / qest / ', did you mean 'recall / quest / '"):
        Figures("a", table([1.0]))("recall", "qest")


def test_rows_are_sums_by_role_line_and_place():
    frame = pl.DataFrame(
        {"policy": ["q", "q", "q"], "role": ["answer"] * 2 + ["question"], "x": [1.0, None, 4.0], "w": [2.0, 2.0, 8.0]}
    )
    found = rows(frame, {"mean": mean("x"), "share": share("x", "w")}).sort("figure", "role").rows()
    assert found == [
        ("answer", "mean", "q", "", 1.0, 1.0),
        ("question", "mean", "q", "", 4.0, 1.0),
        ("answer", "share", "q", "", 1.0, 2.0),
        ("question", "share", "q", "", 4.0, 8.0),
    ]


# ---------------------------------------------------------------------------------------------- verdicts
@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([0.8] * FEWEST, HOLDS),
        ([0.2] * FEWEST, NOT),
        ([0.2, 0.9] * (FEWEST // 2), UNTOLD),
        ([0.8] * (FEWEST - 1), UNTOLD),
    ],
)
def test_a_verdict_needs_the_whole_interval(values, word):
    assert [v.word for v in judge(claim(), by_cell(table(values)))] == [word]


def test_a_claim_speaks_of_its_cells_only():
    both = by_cell(pl.concat([table([0.8] * FEWEST), table([0.8] * FEWEST, cell="b: question")]))
    assert [v.cell for v in judge(claim(cells="answer"), both)] == ["a: answer"]
    assert judge(Claim("", "", lambda f: f("recall", "quest") * math.nan, None, ""), both) == []


def test_a_cell_without_the_number_has_no_verdict_and_no_cell_at_all_is_an_error():
    both = by_cell(pl.concat([table([0.8] * FEWEST), table([0.8] * FEWEST, cell="b", line="other")]))
    assert [v.cell for v in judge(claim(), both)] == ["a: answer"]
    with pytest.raises(NoFigure):
        judge(claim(), both[1:])


def test_words_follow_the_verdicts():
    of = [Verdict("a", 8, 0.8, 0.7, 0.9, HOLDS), Verdict("b", 8, 0.2, 0.1, 0.3, NOT), Verdict("c", 9, 0.5, 0.1, 0.9, UNTOLD)]
    assert words.verdict(of) == "**Holds** on a; **does not hold** on b; **cannot be told** with 9 contexts on c."
    assert words.verdict(of[:1]) == "**Holds**."
    assert words.finding(claim(), of) == "On a: so On b: not so"
    assert words.finding(claim(), of[:1]) == "So"
    assert words.finding(claim(so="as much as {}"), [of[0], of[0]]) == "As much as 80.0%"
    assert words.spanned(of, ".1f") == "0.2–0.8"
    assert words.spanned([Verdict("a", 8, x, x, x, HOLDS) for x in (-0.2, -0.1)], ".1f") == "-0.2 to -0.1"
    assert words.finding(claim(), of[2:]) == ""
    assert words.numbers(claim(), of[:1]) == "The number: a 80.0% [70.0%, 90.0%]."
    assert words.read_as(claim()) == "Read as: at least 50.0% and at most 100.0%."
    assert words.read_as(claim(-math.inf, 0, form="+.1f")) == "Read as: at most 0.0."
    assert words.verdict([Verdict("a", 8, 1, 1, 1, OPEN)]) == "**Left open by the notes**."


def test_only_what_stands_between_the_marks_is_rewritten():
    old = f"before\n{words.BEGIN}\nold\n{words.END}\nafter"
    new = words.rewritten(old, "x")
    assert new == f"before\n{words.BEGIN}\n\nx\n\n{words.END}\nafter"
    assert words.rewritten(new, "x") == new


# ---------------------------------------------------------------------------------------------- kept numbers
def numbers(values, digest="d"):
    return Numbers(table(values), {f"c{i}": digest for i in range(len(values))}, ["a model"])


def test_numbers_come_back_as_they_were_written(tmp_path):
    kept = numbers([0.1, 0.2])
    kept.write(tmp_path / "numbers.parquet", "the command")
    back = Numbers.read(tmp_path / "numbers.parquet")
    assert back.table.equals(kept.table)
    assert (back.digests, back.models, back.version) == (kept.digests, kept.models, kept.version)


def test_numbers_of_another_version_are_refused(tmp_path, monkeypatch):
    numbers([0.1]).write(tmp_path / "numbers.parquet", "")
    monkeypatch.setattr("kvsim.__version__", "9.9.9")
    with pytest.raises(KvsimError, match=r"numbers of kvsim .*, this is 9.9.9; measure again: python -m analyses"):
        Numbers.read(tmp_path / "numbers.parquet")
    with pytest.raises(KvsimError, match=r"not there; measure it: python -m analyses"):
        Numbers.read(tmp_path / "other.parquet")


def test_a_context_that_was_not_measured_takes_no_place():
    kept, one = numbers([0.1] * FEWEST), numbers([0.1])
    assert kept.replaced(one).table.equals(kept.table)
    with pytest.raises(KvsimError, match=r"c8 is not among the kept numbers"):
        numbers([0.1] * FEWEST).replaced(numbers([0.1] * 9))


def test_of_another_capture_claims_are_compared_and_not_rows():
    kept = numbers([0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4])
    asked = SimpleNamespace(kept=kept, claims=[claim(form=".2f")])
    assert strayed(asked, numbers([0.9], "d")) == []  # the same trace: its rows are what is compared
    assert kept.moved(numbers([0.9], "other")) == strayed(asked, numbers([0.15], "other")) == []
    [left] = strayed(asked, numbers([0.9] * FEWEST, "other"))
    assert re.fullmatch(r"a: answer: the number left \[0\.\d\d, 0\.\d\d\]: 0\.90", left)


def test_a_number_without_spread_may_be_rounded_otherwise():
    asked = SimpleNamespace(kept=numbers([1.0] * FEWEST), claims=[claim()])
    assert strayed(asked, numbers([1 - 1e-8] * FEWEST, "other")) == []
    assert len(strayed(asked, numbers([1 - 1e-5] * FEWEST, "other"))) == 1


def test_rows_that_moved_and_figures_that_left_are_told():
    kept = numbers([0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4])
    assert kept.moved(numbers([0.1 + 1e-6, 0.2])) == []
    [moved] = kept.moved(numbers([0.15]))
    assert "c0 (a: answer): recall / quest /  was 0.1, is 0.15" in moved
    assert any("left [" in line for line in kept.moved(numbers([0.9] * 8)))


# ---------------------------------------------------------------------------------------------- contexts
def test_too_few_contexts_are_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSIM_CACHE", str(tmp_path))
    with pytest.raises(
        KvsimError, match=r"needle/short/smollm2: 0 contexts under .* a finding needs 8; capture them with: python tools"
    ):
        contexts.of_study("needle/short/smollm2")
    assert contexts.of_study("needle/short/smollm2", 0) == []


def test_a_run_of_another_trace_is_refused():
    run = SimpleNamespace(path="build/runs/x", info={"trace": {"sha256": "aa"}})
    with pytest.raises(KvsimError, match="build/runs/x: a run of another trace"):
        contexts.check_same(run, SimpleNamespace(id="t", sha256="bb"))


def test_a_replay_is_kept_and_named_as_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(contexts, "RUNS", tmp_path)
    small = contexts.small()
    asked = {"few": "quest(read=tokens(32))", "the same": "quest(read=tokens(32), page=16)"}
    heads = small.replay(asked, steps=range(30))("heads")
    assert heads.group_by("policy").len().rows_by_key("policy") == {
        "few": [(225,)],
        "the same": [(225,)],
    }  # 25 steps of the answer, 9 heads
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr("kvsim.replay", None)
    assert small.replay(asked, steps=range(30))("heads").equals(heads, null_equal=True)


def test_steps_and_layers_are_thinned_evenly():
    assert contexts.chosen(np.array([1, 1, 3] + [2] * 70)) == [0, 1, 2, *range(3, 73, contexts.EVERY)]
    assert contexts.spread([4, 18, 23]) == [4, 18, 23]
    assert contexts.spread(list(range(30))) == [0, 14, 29]
    assert contexts.spread([4, 18, 23], 1) == [18]


def test_a_question_that_is_not_there(capsys):
    assert main(["boxs"]) == 2
    assert "no question 'boxs'; there are boxes" in capsys.readouterr().err


def test_the_part_that_is_measured_again_says_where_traces_are_not_the_same(monkeypatch):
    def captured(cell, fewest):
        return [SimpleNamespace(cell=cell, trace=SimpleNamespace(id=f"c{i}", sha256=digest)) for i, digest in enumerate("de")]

    monkeypatch.setattr("analyses.question.of_study", captured)
    told = []
    same = SimpleNamespace(cells=("a",), part=1, kept=numbers([0.1, 0.2]))
    assert [c.trace.id for c in part_of(same, told.append)] == ["smollm2-needle", "c0"]
    other = SimpleNamespace(cells=("a",), part=1, kept=numbers([0.1, 0.2], "x"))
    assert told == []
    assert [c.trace.id for c in part_of(other, told.append)] == ["smollm2-needle", "c0"]
    assert [line.split(",")[0] for line in told] == ["c0: another capture than that of the kept numbers"]


def test_what_is_learned_is_learned_from_the_other_half():
    """Of the first eight, whatever the number, and never from itself."""
    few, many = ([Path(f"c{i}") for i in range(n)] for n in (8, 24))
    for i, path in enumerate(few):
        assert contexts.other_half(few, i) == contexts.other_half(many, i) == tuple(few[j] for j in range(8) if (i - j) % 2)
        assert path not in contexts.other_half(few, i)
    assert contexts.other_half(many, 20) == tuple(few[1::2])
    assert contexts.other_half(few[:1], 0) == ()


def test_cells_that_are_not_captured_here_stay_as_they_were(monkeypatch, tmp_path):
    """--write without the study measures the bundled part, and loses nothing."""
    monkeypatch.setenv("KVSIM_CACHE", str(tmp_path))
    cell = "needle/short/smollm2"
    study = Numbers(table([0.5] * FEWEST, cell=f"{cell}: answer"), {f"c{i}": "d" for i in range(FEWEST)}, ["a model"])
    old = Numbers(
        table([0.1], cell="bundled: answer").with_columns(context=pl.lit("smollm2-needle")), {"smollm2-needle": "d"}, []
    )
    other = Numbers(table([0.1], cell="gone: answer").with_columns(context=pl.lit("g0")), {"g0": "d"}, [])
    kept = Numbers(pl.concat([old.table, study.table, other.table]), old.digests | study.digests | other.digests, study.models)

    def one(context):
        return pl.DataFrame(
            [("answer", "recall", "quest", "", 1.0, 4.0)], ["role", "figure", "line", "at", "top", "below"], orient="row"
        )

    said = []
    asked = SimpleNamespace(name="q", cells=(cell,), kept=kept, measure=one)
    now = measured_again(asked, said.append)
    assert now.table.filter(pl.col("cell") == f"{cell}: answer").equals(study.table)
    assert now.table.filter(pl.col("cell") == "bundled: answer")["below"].to_list() == [4.0]
    assert "g0" not in now.digests
    assert set(now.digests) == {"smollm2-needle", *study.digests}
    assert any("0 contexts under" in line and "stays as it is" in line for line in said)


def test_figures_over_all_steps_stand_beside_the_role_of_most():
    needle, reversal = contexts.small(), contexts.Context("r", contexts.OTHER)
    assert (needle.mostly, reversal.mostly) == ("answer", "forced text")
