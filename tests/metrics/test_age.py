"""What an old set is worth, against plain loops over the rows of heads."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvsim.metrics.age import by_age
from kvsim.metrics.run import open_run
from tests.report.runs import AGED, FULL, QUEST, write_run


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return open_run(
        write_run(tmp_path_factory.mktemp("age") / "run", policies=(AGED, QUEST, FULL), roles=(1, 3), contexts=2)
    ).heads


@pytest.mark.parametrize("together", [1, 3])
def test_rows_are_means_by_age_and_recall_of_evidence_a_ratio_of_sums(heads, together):
    found = by_age(heads, together)
    assert set(found["policy"]) == {AGED}
    groups = {}
    for r in heads.collect().iter_rows(named=True):
        if r["set_age"] is not None:
            groups.setdefault((r["role"], r["set_age"] // together * together), []).append(r)
    assert found.select("role", "age").rows() == sorted(groups)
    for row in found.iter_rows(named=True):
        mine = groups[row["role"], row["age"]]
        assert row["rows"] == len(mine)
        assert row["mass_recall"] == pytest.approx(np.mean([r["mass_recall"] for r in mine]))
        assert row["rel_l2"] == pytest.approx(np.mean([r["rel_l2"] for r in mine]))
        read, dense = (sum(r[c] for r in mine) for c in ("evidence_read", "evidence_dense"))
        assert row["evidence_recall"] == pytest.approx(read / dense)


def test_a_policy_that_ranks_at_every_step_has_no_age(heads):
    assert by_age(heads.filter(pl.col("policy") == QUEST)).is_empty()
