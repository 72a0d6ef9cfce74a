"""What layers would miss with other layers' pages, against plain Python, and its chart."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import pytest

from kvsim.metrics.reuse import WHOSE, reused
from kvsim.metrics.run import open_run
from kvsim.report.contents import sections
from tests.report.runs import ORACLE, QUEST, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("reuse") / "run", policies=(QUEST, ORACLE), layers=(0, 1, 2, 4)))


def test_means_over_the_rows_that_have_a_layer_below(run):
    rows = run.tables["reuse"].collect().to_dicts()
    key = lambda r: (r["policy"], r["request"], r["layer"], r["q_head"], r["step"])  # noqa: E731
    own = {key(r): r for r in rows if r["distance"] == 0}
    dense = {key(r): r["evidence_dense"] for r in run.heads.collect().iter_rows(named=True)}
    found = reused(run.tables["reuse"], run.heads)
    assert found.select("policy", "distance", "whose").n_unique() == found.height == 2 * 3 * 2
    groups = defaultdict(list)
    for r in rows:
        if r["distance"]:
            groups[r["policy"], r["distance"]].append(r)
    for r in found.iter_rows(named=True):
        mine, prefix = groups[r["policy"], r["distance"]], "" if r["whose"] == WHOSE["head"] else "layer_"
        assert r["pages"] == {"": 2, "layer_": 4}[prefix]
        assert r["missed"] == pytest.approx(1 - fmean(x[f"{prefix}mass_recall"] for x in mine))
        assert r["missed_own"] == pytest.approx(1 - fmean(own[key(x)][f"{prefix}mass_recall"] for x in mine))
        whole = sum(dense[key(x)] for x in mine)
        assert r["evidence_missed"] == pytest.approx(1 - sum(x[f"{prefix}evidence_read"] for x in mine) / whole)
        assert r["evidence_missed_own"] == pytest.approx(1 - sum(own[key(x)][f"{prefix}evidence_read"] for x in mine) / whole)


def test_the_report_draws_it(run):
    [figure] = [b for s in sections(run) for b in s.blocks if getattr(b, "name", "").endswith("reuse")]
    assert figure.data.height == 12
    spec = figure.chart.to_dict()
    assert len(spec["hconcat"]) == 2
