"""Other kernels of BLAS, which are those of other CPUs, give the same tables (docs/decisions/0002).

tools/builds.py asks the same of more policies and of other builds of numpy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from threadpoolctl import threadpool_info

from tests.replay.conftest import POLICIES
from tools.builds import NEAR, Gap, gaps

ROOT = Path(__file__).parents[2]
CHILD = """
import sys
from threadpoolctl import threadpool_info
from kvsim.replay.run import replay

trace, out, *policies = sys.argv[1:]
replay(trace, policies, out, plans=True, workers=1)
print(*sorted({x["architecture"] for x in threadpool_info() if x["internal_api"] == "openblas"}))
"""


def mine() -> set[str]:
    return {x["architecture"] for x in threadpool_info() if x["internal_api"] == "openblas"}


@pytest.mark.parametrize("kernels", ["Haswell", "Nehalem"])
def test_other_kernels_say_the_same(trace, run, tmp_path, kernels):
    command = [sys.executable, "-c", CHILD, str(trace.path), str(tmp_path / "run"), *POLICIES]
    env = os.environ | {"OPENBLAS_CORETYPE": kernels, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    if {*done.stdout.split()} == mine():
        pytest.skip(f"this BLAS has no other kernels for {kernels}")
    assert [*gaps(run.path, tmp_path / "run")] == []


@pytest.fixture
def other(run, tmp_path):
    """A copy of the run, of which a test may change a table."""
    shutil.copytree(run.path, tmp_path / "copy")

    def change(table: str, **columns: pl.Expr) -> list[Gap]:
        file = tmp_path / "copy" / f"{table}.parquet"
        pl.read_parquet(run.path / f"{table}.parquet").with_columns(**columns).write_parquet(file)
        return list(gaps(run.path, tmp_path / "copy"))

    return change


ONE = pl.int_range(pl.len()) == 3  # of the rows of a table


def put(column: str, value: float) -> pl.Expr:
    return pl.when(ONE).then(value).otherwise(pl.col(column))


def test_what_differs_is_told_and_whether_it_may(other):
    assert other("heads", mass_recall=pl.col("mass_recall")) == []
    [near] = other("heads", mass_recall=pl.col("mass_recall") + pl.when(ONE).then(NEAR / 2).otherwise(0.0))
    assert (near.column, near.rows, near.allowed) == ("heads.mass_recall", 1, True)
    for column, change in {
        "mass_recall": pl.col("mass_recall") + 2 * NEAR,
        "read_tokens": put("read_tokens", 7),
        "slack_max": put("slack_max", float("inf")),
        "eps_hat": put("eps_hat", 0.5),
    }.items():
        [far] = other("heads", **{column: change})
        assert (far.column.split()[0], far.allowed) == (f"heads.{column}", False)


def test_a_set_that_differs_is_told(other):
    [gap] = other("plans", pages=pl.when(ONE).then(pl.col("pages").list.head(1)).otherwise(pl.col("pages")))
    assert (gap.column, gap.rows, gap.allowed) == ("plans.pages", 1, False)


def test_page_recall_may_move_by_a_page_and_no_more(other):
    read = pl.col("read_pages").cast(pl.Float32)
    moved = pl.when(pl.col("page_recall") > 1 / read).then(pl.col("page_recall") - 1 / read).otherwise(pl.col("page_recall"))
    [gap] = other("heads", page_recall=moved)
    assert gap.allowed
    assert gap.most > NEAR
    [gap] = other("heads", page_recall=pl.when(pl.col("page_recall") > 2 / read).then(pl.col("page_recall") - 2 / read).otherwise(pl.col("page_recall")))  # fmt: skip
    assert not gap.allowed
