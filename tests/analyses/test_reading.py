"""The numbers of analyses/reading are what the bundled traces give today, and the findings drawn from them hold."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from analyses.cells import EVERY, chosen, spread
from analyses.old_page import BEGIN, END
from analyses.reading import run
from analyses.reading.measure import MULTIBOX, ORACLE, QUEST, RANDOM, age, by_bytes, measure

README = run.ANALYSIS.readme.read_text("utf-8")


@pytest.fixture(scope="module", params=run.BUNDLED, ids=lambda path: path.name)
def found(request):
    """A trace at a time: no cell spans two of them."""
    return measure([request.param], workers=1)


def test_every_number_of_the_readme_is_computed_again(found):
    told = [line for lines in run.ANALYSIS.sentences(found).values() for line in lines]
    assert len(told) == 4 * found.cells.height
    assert [line for line in told if f"* {line}\n" not in README] == []


def test_the_readme_has_no_sentence_of_another_cell():
    cells = [line for line in README.split(BEGIN)[1].split(END)[0].splitlines() if line.startswith("* ")]
    assert len(cells) == 4 * 3
    assert {line.split(":")[0] for line in cells} == {f"* {path.name}" for path in run.BUNDLED}


def test_larger_pages_are_looser(found):
    sizes = found.slack.group_by("cell", "layer", maintain_order=True).agg("slack", "loosest")
    assert all(np.all(np.diff(x) > 0) for name in ("slack", "loosest") for x in sizes[name].to_list())
    assert (found.slack["slack"] >= 0).all()  # a bound
    assert (found.slack["loosest"] >= found.slack["slack"]).all()


def test_a_stronger_proof_is_deeper_and_no_order_beats_the_oracle(found):
    part = {tuple(key): row["part"].to_list() for key, row in found.depth.group_by("cell", "layer")}
    for best, ten, many, mass, quest, oracle, random in part.values():
        assert best <= ten <= many <= 1
        assert oracle <= quest <= mass  # who has proved 95 % of the mass has read it
        assert oracle <= random


def test_more_boxes_lose_at_equal_bytes(found):
    """The finding: one box a page is best among the boxes, and four are far worse."""
    at = found.bytes.filter(pl.col("share") == 0.35).pivot("policy", index="cell", values="mass_recall")
    for boxes in MULTIBOX:
        assert (at[boxes] < at[QUEST]).all()
    assert (at["4 boxes, clustered"] < at[QUEST] - 0.1).all()
    assert (at["quest, pages of 8"] > at["2 boxes, clustered"]).all()  # as many bytes of index
    assert (at[ORACLE] > at[QUEST]).all()
    assert (at[RANDOM] < 0.2).all()


@pytest.mark.parametrize("found", [run.BUNDLED[1]], indirect=True, ids=[run.BUNDLED[1].name])
def test_a_set_from_before_the_question_has_no_evidence(found):
    """The finding: recall and error hardly tell, evidence does, and the oracle's set is no better."""
    late = found.age.filter(pl.col("cell") == "smollm2-reversal: answer")
    old = late.filter(pl.col("policy").is_in(["quest, every 64 steps", "oracle, every 64 steps"]))
    assert old["evidence_recall"].max() == 0
    once = late.filter(pl.col("policy") == "quest, once").to_dicts()[0]
    assert once["mass_recall"] > once["anew_mass_recall"]
    assert once["rel_l2"] < once["anew_rel_l2"]
    assert once["evidence_recall"] < once["anew_evidence_recall"] / 4


# ---------------------------------------------------------------------------------------------- the arithmetic, by hand
AT = {"cell": "c", "context": "x 0", "layer": 0}


def test_boxes_are_compared_where_rows_and_index_cost_the_same():
    """100 bytes in all, an index of 10: 20 bytes of rows are a share of 30 %, half way between budgets it is the mean of both."""
    curve = {
        "policy": QUEST,
        "q_head": 0,
        "pages": [1, 2],
        "read_bytes_mean": [20.0, 30.0],
        "mass_recall_mean": [0.5, 0.7],
        "rel_l2_mean": [0.4, 0.2],
    }
    row = {"policy": QUEST, "visible_tokens": 10, "row_bytes": 10, "index_bytes": 10}
    none = dict.fromkeys(("meta_bytes", "score_bytes", "host_read_bytes", "ssd_read_bytes"), 0)
    got = by_bytes(pl.DataFrame(AT | curve), pl.DataFrame(AT | row | none))
    assert got["share"].to_list() == [0.3, 0.325, 0.35, 0.375, 0.4]
    assert got["mass_recall"].to_list() == pytest.approx([0.5, 0.55, 0.6, 0.65, 0.7])
    assert got["rel_l2"].to_list() == pytest.approx([0.4, 0.35, 0.3, 0.25, 0.2])


def test_ages_are_steps_since_the_last_ranking():
    steps = np.arange(40)
    rows = {"q_head": 0, "step": steps, "rel_l2": 0.0, "read_tokens": 1, "evidence_read": 0.005, "evidence_dense": 0.005}
    both = [pl.DataFrame(AT | rows | {"policy": name, "mass_recall": steps / 100}) for name in (QUEST, "quest, every 16 steps")]
    got = age(pl.concat(both)).filter(pl.col("policy") == "quest, every 16 steps")
    assert got["ages"].to_list() == ["0", "1", "2–3", "4–7", "8–15"]
    of = [[s for s in steps if s % 16 in ages] for ages in ({0}, {1}, {2, 3}, range(4, 8), range(8, 16))]
    assert got["mass_recall"].to_list() == pytest.approx([np.mean(s) / 100 for s in of])
    assert got["anew_mass_recall"].to_list() == pytest.approx(got["mass_recall"].to_list())
    assert got["evidence_recall"].null_count() == 5  # hardly anything looks at it


def test_steps_and_layers_are_thinned_evenly():
    assert chosen(np.array([1, 1, 3] + [2] * 70)) == [0, 1, 2, *range(3, 73, EVERY)]
    assert spread([4, 18, 23]) == [4, 18, 23]
    assert spread(list(range(30))) == [0, 10, 19, 29]


# ---------------------------------------------------------------------------------------------- the page
def test_the_page_has_every_sentence_and_says_what_it_rests_on(found):
    told = run.ANALYSIS.sentences(found)
    charts, rests = run.ANALYSIS.sections(found, told, run.BUNDLED)
    for figure in charts.blocks:
        assert all(line in figure.caption for line in told[figure.name])
        assert "ull attention" in figure.caption.removeprefix(" ".join(told[figure.name]))  # drawn, or named as absent
    said = str(rests)
    for word in ("SmolLM2-135M", "Q4_1", "open loop", "No intervals", *found.cells["cell"]):
        assert word in said


def test_numbers_are_put_between_the_marks():
    old = f"before\n{BEGIN}\nold\n{END}\nafter"
    new = run.ANALYSIS.rewritten(old, {"slack": ["a 1.", "b 2."]})
    assert new == f"before\n{BEGIN}\n\n**{run.TITLES['slack']}**\n\n* a 1.\n* b 2.\n\n{END}\nafter"
    assert run.ANALYSIS.rewritten(new, {"slack": ["a 1.", "b 2."]}) == new
