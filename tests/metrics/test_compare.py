"""Two runs beside each other, and two policies of one."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import polars as pl
import pytest

from kvsim.cli import main
from kvsim.errors import BadTrace, WrongUse
from kvsim.metrics.compare import MEASURES, compare
from kvsim.metrics.difference import by_layer, difference
from kvsim.metrics.run import open_run
from kvsim.policies.language import parse_policy
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize

SMALL, LARGE = "quest(read=share(0.2), page=4)", "quest(read=share(0.6), page=4)"
CHAIN = "h2o(hold=share(0.5)) >> quest(read=share(0.2), page=4)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compare")
    for name, seed in (("t", 0), ("u", 1)):
        synthesize(path / name, requests=9, layers=1, q_heads=4, kv_heads=2, prompt=96, steps=6, seed=seed)
    for name, trace, policies in (("a", "t", [SMALL, CHAIN]), ("b", "t", [SMALL, LARGE]), ("c", "u", [SMALL])):
        replay(path / trace, policies, path / name, plans=name != "b")
    return path


def run(folder, name):
    return open_run(folder / name)


def ids(*policies):
    return tuple(parse_policy(p).id for p in policies)


def test_a_run_against_itself_is_the_same(folder):
    found = compare(run(folder, "a"), run(folder, "a"))
    assert found["difference"].to_list() == [0] * found.height
    assert not found["worse"].any()
    assert set(found["measure"]) == set(MEASURES)
    assert found["first"].n_unique() == 2


def test_only_policies_of_both_are_paired(folder):
    assert compare(run(folder, "a"), run(folder, "b"))["first"].unique().to_list() == list(ids(SMALL))


def test_a_difference_is_that_of_the_ratios_of_sums_and_changes_its_sign_with_the_order(folder):
    a, b = run(folder, "a"), run(folder, "b")
    there, back = compare(a, b, ids(SMALL, LARGE)), compare(b, a, ids(LARGE, SMALL))
    for x, y in zip(there.iter_rows(named=True), back.iter_rows(named=True), strict=True):
        assert x["difference"] == -y["difference"]
        assert np.allclose([x["low"], x["high"]], [-y["high"], -y["low"]])
        assert x["low"] <= x["difference"] <= x["high"]
        assert not (x["worse"] and y["worse"])
    heads = b.heads.filter(pl.col("policy") == ids(LARGE)[0]).collect()
    far = (heads["far_recall"].cast(pl.Float64) * heads["far_mass"]).sum() / heads["far_mass"].cast(pl.Float64).sum()
    row = there.filter(pl.col("measure") == "far_recall").row(0, named=True)
    assert row["after"] == pytest.approx(far, rel=1e-6)
    assert row["contexts"] == 9


def test_what_got_worse(folder):
    worse = compare(run(folder, "b"), run(folder, "a"), ids(LARGE, SMALL)).filter("worse")["measure"].to_list()
    assert worse == ["mass_recall", "far_recall", "evidence_recall", "rel_l2"]
    assert compare(run(folder, "a"), run(folder, "b"), ids(SMALL, LARGE)).filter("worse")["measure"].to_list() == ["read_bytes"]
    none = compare(run(folder, "b"), run(folder, "a"), ids(LARGE, SMALL), tolerance=100)
    assert not none["worse"].any()


def test_few_contexts_have_no_interval_and_are_still_judged(folder):
    for name, policy in (("few-a", LARGE), ("few-b", SMALL)):
        replay(folder / "t", [policy], folder / name, requests=[0, 1, 2])
    found = compare(run(folder, "few-a"), run(folder, "few-b"), ids(LARGE, SMALL))
    assert found["low"].null_count() == found.height
    assert found["worse"].any()


def test_what_cannot_be_paired_is_refused(folder):
    with pytest.raises(WrongUse, match="not of the same trace"):
        compare(run(folder, "a"), run(folder, "c"))
    replay(folder / "t", [LARGE], folder / "d", steps=[0, 1])
    with pytest.raises(WrongUse, match="not of the same --steps"):
        compare(run(folder, "a"), run(folder, "d"))
    replay(folder / "t", [LARGE], folder / "e")
    with pytest.raises(WrongUse, match=r"no policy in both.*--policies"):
        compare(run(folder, "a"), run(folder, "e"))


def test_the_gate(folder, capsys):
    good, bad = [str(folder / "b"), str(folder / "b"), "--policies", LARGE, LARGE], [str(folder / "b")] * 2
    assert main(["compare", *good, "--gate"]) == 0
    assert main(["compare", *bad, "--policies", LARGE, SMALL, "--gate"]) == 1
    said = capsys.readouterr().out
    assert "WORSE" in said
    assert re.search(r"^  read KiB +[\d.]+ -> [\d.]+  [+-][\d.]+", said, re.MULTILINE)
    assert not re.search(r"_bytes|\de[+-]", said)
    assert main(["compare", *bad, "--policies", LARGE, SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["measure"] == "mass_recall"
    assert main(["compare", *bad, "--policies", LARGE, "oracle(read=pages(1))"]) == 2
    assert "no policy" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ diff
def test_a_policy_reads_what_its_heads_table_says(folder):
    a = run(folder, "a")
    for policy in ids(SMALL, CHAIN):
        found = difference(a, policy, policy)
        told = a.heads.filter(pl.col("policy") == policy).select("request", "layer", "q_head", "step", "read_tokens").collect()
        both = found.join(told, on=["request", "layer", "q_head", "step"])
        assert both.height == told.height == found.height
        assert (both["both"] == both["read_tokens"]).all()
        assert (by_layer(found)["alike"] == 1).all()


def test_two_policies_add_up_and_change_sides(folder):
    a = run(folder, "a")
    there, back = difference(a, *ids(SMALL, CHAIN)), difference(a, *ids(CHAIN, SMALL))
    assert there.drop("only_first", "only_second").equals(
        back.rename({"evidence_first": "e", "first_runs": "r"})
        .rename({"evidence_second": "evidence_first", "second_runs": "first_runs", "e": "evidence_second", "r": "second_runs"})
        .select(there.drop("only_first", "only_second").columns)
    )
    assert there["only_first"].equals(back["only_second"].rename("only_first"))
    lengths = there["first_runs"].list.eval(pl.element().struct.field("stop") - pl.element().struct.field("start")).list.sum()
    assert lengths.fill_null(0).to_list() == there["only_first"].to_list()
    assert there["only_first"].sum() + there["only_second"].sum() > 0


def test_a_policy_without_pages_that_were_written_down(folder):
    with pytest.raises(WrongUse, match="replay with --plans"):
        difference(run(folder, "b"), *ids(SMALL, LARGE))
    with pytest.raises(WrongUse, match="no such layers"):
        difference(run(folder, "a"), *ids(SMALL, CHAIN), layers=[7])


def test_the_command(folder, capsys, tmp_path):
    out = tmp_path / "d.parquet"
    assert main(["diff", str(folder / "a"), "--policies", SMALL, CHAIN, "-o", str(out), "--requests", "0,1"]) == 0
    assert "layer   0  alike" in capsys.readouterr().out
    assert pl.read_parquet(out)["request"].unique().sort().to_list() == [0, 1]
    assert main(["diff", str(folder / "a"), "--policies", SMALL, CHAIN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["layer"] == 0


def test_a_request_that_run_json_does_not_tell_of_is_refused(folder):
    a = run(folder, "a")
    untold = dataclasses.replace(a, about=a.about | {"requests": a.about["requests"][1:]})
    with pytest.raises(BadTrace, match=r"run\.json: nothing of the tokens of request 0"):
        difference(untold, *ids(SMALL, CHAIN))
