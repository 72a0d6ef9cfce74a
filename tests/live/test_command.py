"""kvsim live from the command line, on a tiny model in a folder."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from kvsim import cli
from kvsim.errors import BadTrace, WrongUse
from kvsim.metrics import closed_loop, sensitivity
from kvsim.report import theme
from kvsim.report.charts.closed_loop import (
    against_budget,
    answered,
    borne_by_layer,
    growth_over_steps,
    predicted_against_measured,
)
from kvsim.report.html import Figure
from kvsim.report.page import report
from kvsim.report.sections.closed_loop import look_of
from kvsim.report.sections.closed_loop import sections as closed_loop_sections
from tests.capture import tiny
from tests.capture.words import SIZE, tokenizer

MODEL: dict[str, Any] = {"vocab_size": SIZE, "max_position_embeddings": 1024}
POLICIES = ("h2o(hold=share(0.2))", "quest(read=share(0.2), page=8)", "streaming_llm(hold=share(0.3))")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny.model("llama", **MODEL).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def run(capsys, *words: object) -> tuple[int, list[str], str]:
    code = cli.main(["live", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


@pytest.fixture(scope="module")
def study(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "s"
    words = [
        folder,
        "-p",
        *POLICIES,
        "-o",
        out,
        "--task",
        "needle",
        "plain",
        "-n",
        2,
        "--context",
        200,
        "--steps",
        6,
        "--answer",
        3,
    ]
    assert cli.main(["live", *map(str, words), "--samples", "2"]) == 0
    return closed_loop.open_study(out)


def test_a_study_of_two_tasks(study):
    answers = study.table("answers").collect()
    assert answers.group_by("task", "mode").len().sort("task", "mode").rows() == [
        ("needle", "forced", 8),
        ("needle", "free", 16),
        ("plain", "forced", 8),
    ]
    assert closed_loop.scores(study).filter(pl.col("task") == "plain")["score"].is_null().all()
    assert set(closed_loop.correlations(study)["task"]) == {"needle", "plain"}


def test_charts_of_a_study_take_ids_and_labels(study):
    look = look_of(study)
    scores = closed_loop.scores(study).filter(pl.col("task") == "plain").with_columns(score=0.5, low=0.1, high=0.9)
    foretold = closed_loop.foretold(study).filter(pl.col("task") == "needle").with_columns(score=0.5, low=0.1, high=0.9)
    growth = study.growth.filter(pl.col("task") == "needle")
    for chart, frame in (
        (answered, scores),
        (predicted_against_measured, foretold),
        (against_budget, foretold),
        (growth_over_steps, growth),
    ):
        by_id, by_label = chart(frame, look).to_dict(), chart(theme.named(frame, look), look).to_dict()
        assert by_id["description"]
        assert by_id["datasets"] == by_label["datasets"]
        drawn = {row["policy"] for rows in by_id["datasets"].values() for row in rows}
        assert drawn <= {s.label for s in look}
        assert len(drawn) >= 3
    assert len(predicted_against_measured(foretold, look).to_dict()["concat"]) == 4


def test_the_page_of_a_study_has_every_question_of_every_task(study, tmp_path):
    titles = {s.title: [b.name for b in s.blocks if isinstance(b, Figure)] for s in closed_loop_sections(study)}
    kinds = ["answered", "budget", "foretold-kl", "layers", "growth"]
    assert titles == {
        "The closed loop": [],
        "needle": ["needle-" + x for x in kinds],  # a model of noise solves none, so nothing is said of scores
        "plain": ["plain-" + x for x in kinds],
    }
    page = report([study.path, study.path], tmp_path / "page.html").read_text()
    assert "inside" in page
    assert all(f"run{n}-plain-growth" in page for n in (1, 2))


def test_a_condensed_study_says_the_same(study, tmp_path):
    small = closed_loop.open_study(closed_loop.condense(study, tmp_path / "small"))
    close = {"check_exact": False, "rel_tol": 1e-4, "abs_tol": 1e-6}
    for says in (closed_loop.scores, closed_loop.foretold, closed_loop.correlations, closed_loop.by_layers, closed_loop.pairs):
        assert_frame_equal(says(small), says(study), check_dtypes=False, **close)
    assert_frame_equal(small.growth, study.growth, check_dtypes=False, **close)
    with pytest.raises(BadTrace, match="a condensed study, which has no table layers"):
        small.table("layers")
    with pytest.raises(WrongUse, match="a study is never overwritten"):
        closed_loop.condense(study, tmp_path / "small")


def test_layers_one_by_one(capsys, folder, tmp_path):
    out = tmp_path / "s"
    words = [folder, "-p", POLICIES[0], "-o", out, "--task", "plain", "-n", 2, "--context", 200, "--steps", 6, "--by-layer", 1]
    code, said, err = run(capsys, *words, "--no-open-loop")
    assert (code, err) == (0, "")
    assert [x.split()[:2] for x in said[3:-1]] == [["layers", "0"], ["layers", "1"]] * 2
    study = closed_loop.open_study(out)
    found = sensitivity.sensitivity(study)
    assert found["reduction"].is_between(3, 7).all()
    read = study.table("layers").group_by("policy", "layer").agg(pl.col("rel_l2").mean()).collect()
    [later] = [name for name, (_, layers) in sensitivity.tried(study).items() if layers == [1]]
    assert read.filter(pl.col("policy") == later, pl.col("layer") == 0)["rel_l2"].item() == 0  # what lies below is untouched
    chart = borne_by_layer(found, theme.styles(found["policy"].unique(maintain_order=True)))
    assert chart.to_dict()["description"]


def test_rows_of_a_file_are_asked_and_scored(capsys, folder, tmp_path):
    rows = [{"context": "The sky is green today. " * 9, "question": f"Number {n}?", "answers": ["xyzzy"]} for n in range(2)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, _, err = run(capsys, folder, "-p", POLICIES[0], "-o", tmp_path / "s", "--task", tmp_path / "mine.jsonl", "--answer", 2)
    assert (code, err) == (0, "")
    answers = closed_loop.open_study(tmp_path / "s").table("answers").collect()
    assert answers["task"].unique().to_list() == ["mine"]
    assert answers["context"].n_unique() == 1  # two questions about one text are one case
    assert (answers["full_score"] == 0).all()


def test_evidence_can_be_injected(capsys, folder, tmp_path):
    code, said, _ = run(
        capsys,
        folder,
        "-p",
        "recency(read=pages(1))",
        "-o",
        tmp_path / "s",
        "-n",
        1,
        "--context",
        200,
        "--inject",
        "1",
        "--answer",
        2,
    )
    assert code == 0
    assert said[0].startswith("1 prompts, 3 rows")
    layers = closed_loop.open_study(tmp_path / "s").table("layers").collect()
    extra = layers.filter(pl.col("policy").str.contains("evidence in layers 1-1"), pl.col("layer") == 1)["injected_tokens"]
    assert (extra > 5).all()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-n", "0"], "-n 0: expected 1 or more"),
        (["--task", "needles"], "no task 'needles', did you mean 'needle'?"),
        (["--answer", "0"], "--answer 0: expected 1 or more"),
        (["--by-layer", "2", "--inject", "1"], "--by-layer and --inject: expected one of them"),
        (["--by-layer", "0"], "groups of 0 layers: expected 1 or more"),
        (["--inject", "9"], "inject in layers [9]: not among the attention layers of this model, [0, 1]"),
        (
            ["--samples", "1", "--temperature", "0"],
            "temperature 0.0: expected a number above 0; leave sampling out for the likeliest token",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(words, line, capsys, folder, tmp_path):
    code, _, err = run(capsys, folder, "-p", POLICIES[0], "-o", tmp_path / "s", "--context", 200, *words)
    assert (code, err) == (2, f"kvsim: {line}\n")
    assert not (tmp_path / "s").exists()
