"""The numbers of analyses/keeping are what its two traces give today, and the findings drawn from them hold."""

from __future__ import annotations

import math
from types import SimpleNamespace

import polars as pl
import pytest

import kvsim
from analyses.keeping import measure as of
from analyses.keeping import run
from analyses.keeping.measure import CODES, EVICT, H2O, ORACLE, QEVICT, RANDOM, THREE, TWO, at_bytes, measure
from analyses.old_page import BEGIN, END

README = run.ANALYSIS.readme.read_text("utf-8")
MODEL, SWING = "smollm2-reversal", "swing"
CELLS = {MODEL: ["smollm2-reversal: answer", "smollm2-reversal: forced text"], SWING: ["swing: answer"]}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return {path.name: path for path in run.ANALYSIS.bundled(tmp_path_factory.mktemp("traces"))}


@pytest.fixture(scope="module", params=[MODEL, SWING])
def found(request, traces):
    """A trace at a time: no cell spans two of them."""
    return measure([traces[request.param]], workers=1)


def lines(frame, measure, first="answer"):
    """{line: {place along x: value}} of the cells whose name ends so."""
    out = {}
    for row in frame.filter(pl.col("cell").str.ends_with(first)).to_dicts():
        out.setdefault(row["policy"], {})[row["at"]] = row[measure]
    return out


def kivi_bytes(mine, bits):
    return mine.filter(pl.col("policy") == CODES, pl.col("at") == f"{bits} bits")["bytes"].item()


# ---------------------------------------------------------------------------------------------- numbers and laws
def test_every_number_of_the_readme_is_computed_again(found):
    told = [line for lines in run.ANALYSIS.sentences(found).values() for line in lines]
    assert len(told) == found.cells.height + 5
    assert [line for line in told if f"* {line}\n" not in README] == []


def test_the_readme_has_no_sentence_of_another_cell():
    said = [line for line in README.split(BEGIN)[1].split(END)[0].splitlines() if line.startswith("* ")]
    assert len(said) == 3 + 5 * 2
    assert {": ".join(line.split(": ")[:2]) for line in said} == {f"* {cell}" for cells in CELLS.values() for cell in cells}


def test_what_must_be_true_of_any_trace(found):
    every = pl.concat([getattr(found, q) for q in run.TITLES]).unique()
    assert (every["fmm"] <= every["disabled"] + 1e-12).all()
    assert (every["ledger"] > -1e-12).all()
    assert ((every["bytes"] > 0) & (every["bytes"] < 1)).all()
    two = found.cross.filter(pl.col("policy") == TWO)
    assert (two["returns"] == 0).all()  # who is gone cannot come back
    assert (two["fmm"] == two["disabled"]).all()
    assert two["ledger"].abs().max() < 1e-12
    never = found.promotion.filter(pl.col("at") == "never")
    assert never["returns"].sum() == 0
    assert abs(never["ledger"].item()) < 1e-12
    off = lines(found.promotion, "host")[QEVICT]
    assert off["shadow"] > 0.1
    assert off["ledger"] == off["never"] == 0


def test_budgets_and_baselines_are_in_order(found):
    for (_,), mine in found.by_bytes.group_by("cell"):
        fmm = {key: rows["fmm"].to_list() for (key,), rows in mine.group_by("policy", maintain_order=True)}
        assert max(fmm[CODES]) < 1e-6
        for line in (QEVICT, EVICT, H2O, ORACLE, RANDOM):
            assert fmm[line] == sorted(fmm[line], reverse=True)
        for line in (EVICT, H2O, RANDOM):
            assert all(a < b for a, b in zip(fmm[ORACLE], fmm[line], strict=True))


# ---------------------------------------------------------------------------------------------- the findings
def test_three_tiers_miss_less_than_eviction_by_the_same_scores_at_the_same_bytes(found):
    for (_,), mine in found.by_bytes.group_by("cell"):
        for bits in (2, 4):
            at = at_bytes(mine, kivi_bytes(mine, bits))
            assert at[QEVICT]["fmm"] < 0.9 * at[EVICT]["fmm"]


def test_a_third_of_the_bytes_is_better_spent_on_four_bits_of_everything(found):
    for (cell,), mine in found.by_bytes.group_by("cell"):
        at = at_bytes(mine, kivi_bytes(mine, 4))
        assert 0.2 < at[CODES]["rel_l2"] / at[QEVICT]["rel_l2"] < 0.52
        assert (at[H2O]["rel_l2"] < at[CODES]["rel_l2"]) == cell.endswith("forced text")


def test_at_a_fifth_it_depends(found):
    for (cell,), mine in found.by_bytes.group_by("cell"):
        at = {line: x["rel_l2"] for line, x in at_bytes(mine, kivi_bytes(mine, 2)).items()}
        assert (at[QEVICT] < at[CODES]) == (at[H2O] < at[QEVICT]) == cell.startswith(MODEL)
        assert (at[RANDOM] < at[QEVICT]) == cell.startswith(SWING)
        if cell.endswith("forced text"):
            assert at[EVICT] < at[QEVICT]  # although it misses three times as much


def test_windows_do_not_lower_missed_mass_but_make_codes_affordable(found):
    two, three = (lines(found.cross, "fmm")[x] for x in (TWO, THREE))
    assert two["1"] < two["8"] < two["32"]
    assert max(three["8"], three["32"]) < 0.9 * three["1"]
    assert three["8"] < two["8"]
    assert three["1"] > two["1"]
    churn = lines(found.cross, "churn")
    assert min(churn[TWO], key=churn[TWO].get) == "8"
    assert min(churn[THREE], key=churn[THREE].get) != "8"


def test_the_start_halves_what_is_missed(found):
    three = lines(found.start, "fmm")[THREE]
    assert 0.4 < three["window"] / three["last"] < 0.6
    assert max(three, key=three.get) == "zeros"


def test_fewer_bits_and_more_codes_are_better(found):
    fmm, error = lines(found.bits, "fmm"), lines(found.bits, "rel_l2")
    assert all(fmm["2 bits"][q] < fmm["4 bits"][q] < fmm["8 bits"][q] for q in ("0.7", "0.9"))
    assert error["2 bits"]["0.9"] < error["2 bits"]["0.7"]


def test_promotion_brings_little_back(found):
    error, bytes_ = (lines(found.promotion, m)[QEVICT] for m in ("rel_l2", "bytes"))
    assert error["never"] <= error["ledger"]
    assert bytes_["never"] < bytes_["ledger"]
    assert 0.98 < error["shadow"] / error["ledger"] < 1


def test_kept_codes_do_not_follow_churn(found):
    [said] = run.ANALYSIS.sentences(found)["ledger"]
    rank = float(said.split("full rows is ")[1].split(";")[0])
    assert (rank < -0.3) == said.startswith(MODEL)
    assert (rank > 0.3) == said.startswith(SWING)


# ---------------------------------------------------------------------------------------------- the arithmetic, by hand
def test_lines_are_straight_between_budgets_and_end_where_they_end():
    row = {"cell": "c", "policy": "a", "bytes": [0.4, 0.2], "fmm": [0.1, 0.3], "evidence_recall": None, "rel_l2": [1.0, 2.0]}
    short = row | {"policy": "b", "bytes": [0.1, 0.2]}
    at = at_bytes(pl.concat([pl.DataFrame(row), pl.DataFrame(short)]), 0.25)
    assert set(at) == {"a"}
    assert at["a"]["fmm"] == pytest.approx(0.25)
    assert at["a"]["rel_l2"] == pytest.approx(1.75)
    assert math.isnan(at["a"]["evidence_recall"])


def test_what_is_kept_beside_is_what_coded_rows_do_not_explain():
    """Windows of 8 in 2 bits, keys and values of 128: 544 bytes of scales each. 16 coded tokens are two; one more is kept beside, 1056."""
    policy = of._id(kvsim.qevict(hold=kvsim.share(of.HOLD)))
    at = {"cell": "c", "id": policy}
    heads = at | {
        "mass_evicted": [0.2, 0.4],
        "mass_quant": [0.1, None],
        "rel_l2": [0.5, 1.0],
        "evidence_dense": 0.5,
        "evidence_read": [0.5, 0.0],
    }
    row = {"layer": 0, "visible_tokens": 100, "resident_bytes": 10240, "meta_resident_bytes": 2 * 544 + 1056, "quant_tokens": 16}
    ledger = pl.DataFrame(at | row | {"host_resident_bytes": 512, "ssd_resident_bytes": 0}).cast({"layer": pl.Int16})
    layer = SimpleNamespace(id=0, row_bytes=512, key_dim=128, value_dim=128)
    [got] = of.each(pl.DataFrame(heads), ledger, SimpleNamespace(layers=[layer])).to_dicts()
    assert (got["fmm"], got["disabled"], got["rel_l2"], got["evidence_recall"]) == pytest.approx((0.3, 0.35, 0.75, 0.5))
    assert got["bytes"] == pytest.approx((10240 + 2 * 544 + 1056) / 51200)
    assert got["ledger"] == pytest.approx(1056 / 51200)
    assert got["host"] == pytest.approx(0.01)


def test_policies_of_several_questions_are_one():
    asked = of.asked()
    default = of._id(asked["by_bytes"]["20%", QEVICT])
    assert [
        of._id(asked[q][at]) for q, at in (("cross", ("8", THREE)), ("bits", ("0.7", "2 bits")), ("start", ("last", THREE)))
    ] == [default] * 3
    assert of._id(asked["cross"]["8", TWO]) == of._id(asked["by_bytes"]["20%", EVICT])


# ---------------------------------------------------------------------------------------------- the page
def test_the_page_has_every_sentence_and_says_what_it_rests_on(found, traces):
    told = run.ANALYSIS.sentences(found)
    charts, rests = run.ANALYSIS.sections(found, told, list(traces.values()))
    for figure in charts.blocks:
        assert all(line in figure.caption for line in told[figure.name])
        assert "ull attention" in figure.caption.removeprefix(" ".join(told[figure.name]))  # drawn, or named as absent
    for word in ("SmolLM2-135M", "Q4_1", "synthetic", "open loop", "No intervals", *found.cells["cell"]):
        assert word in str(rests)
