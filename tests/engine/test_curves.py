"""A curve at K pages is the replay at K pages, for every K: one sort answers every budget."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.engine.curves import COLUMNS, GRID, grid, percentiles
from tests.engine.lanes import by_step, chain, lane, run

LANES = {
    "plain": {"prompt": 95, "steps": 7, "evidence": ((3, 9), (80, 97))},
    "all at once": {
        "prompt": 80,
        "steps": 9,
        "value_dim": 6,
        "dtype": "bfloat16",
        "softcap": 4.0,
        "sinks": True,
        "size": 3.0,
        "group": 3,
    },
    "sliding": {"prompt": 130, "steps": 9, "window": 90, "dtype": "float16"},
    "ties": {"prompt": 80, "steps": 9, "whole": True},
    "huge": {"prompt": 40, "steps": 9, "size": 80.0, "seed": 1},
    "one head, one step": {"prompt": 1, "steps": 1, "kv_heads": 1, "group": 1, "key_dim": 1},
}
READS = [
    "quest(read=pages({}), page={})",
    'quest(read=pages({}), page={}, sinks=3, recent=20, tail="free", index=boxes(n=2))',
    'oracle(read=pages({}), page={}, by="logit")',
    "recency(read=pages({}), page={})",
    "random_read(read=pages({}), page={}, tail='forced')",
    'quest(read=pages({}), page={}, heads="share", sinks=1)',
    'quest(read=pages({}), page={}, heads="max", recent=20)',
    'quest(read=pages({}), page={}, heads="mean", tail="free")',
    'quest(read=pages({}), page={}, heads="softmax_mean")',
    'quest(read=pages({}), page={}, heads="split", private=2, sinks=3)',
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", LANES)
def test_a_curve_is_the_replay_at_every_budget(kind, read):
    size = {"plain": 4, "huge": 3}.get(kind, 16)
    source = lane(**LANES[kind])
    group, error = source.layer.group, 1e-5 * (10 if kind == "huge" else 1)
    curves = run(source, read.format(1, size))["curves"]
    budgets = np.unique(curves["pages"])
    first = np.array([source.layer.first_visible(int(t)) for t in source.t])
    assert budgets.tolist() == [*range(1, int((source.t // size - first // size).min()) + 2)]
    compared = set()
    for k in budgets.tolist():
        tables = run(source, read.format(k, size))
        row = {c: x[(curves["pages"] == k) & (curves["role"] == -1)] for c, x in curves.items()}
        assert row["q_head"].tolist() == [*range(source.layer.q_heads)]
        heads = {c: by_step(tables["heads"], c, "q_head") for c in tables["heads"] if tables["heads"][c].dtype != object}
        ledger = {c: np.repeat(by_step(tables["ledger"], c), group, 0) for c in ("read_pages", "read_tokens", "read_bytes")}
        mass, far = heads["mass_recall"].astype(np.float32), heads["far_recall"] * heads["far_mass"]
        want = {
            "tokens": np.full(len(mass), k * size),
            "mass_recall_mean": mass.mean(1),
            "mass_recall_p5": np.percentile(mass, 5, axis=1),
            "mass_recall_p50": np.percentile(mass, 50, axis=1),
            "mass_recall_min": mass.min(1),
            **{f"top{r}_recall_mean": heads[f"top{r}_recall"].mean(1) for r in (1, 10, 64)},
            "top10_recall_p5": np.percentile(heads["top10_recall"], 5, axis=1),
            "read_pages_mean": heads["read_pages"].mean(1),
            "union_pages_mean": ledger["read_pages"].mean(1),
            "read_bytes_mean": ledger["read_bytes"].mean(1),
        }
        if (heads["far_mass"] >= 1e-3).all():  # where a step's own ratio is not null, sums can be had from it
            want["far_recall"] = far.sum(1) / heads["far_mass"].sum(1)
        if source.request.evidence:
            want["evidence_recall"] = heads["evidence_read"].sum(1) / heads["evidence_dense"].sum(1)
        if k in grid(len(budgets)):
            want |= {"rel_l2_mean": heads["rel_l2"].mean(1), "rel_l2_p95": np.percentile(heads["rel_l2"], 95, axis=1)}
        for column, x in want.items():
            scale = np.maximum(1, np.abs(x)) * (20 if "rel" in column else 1)
            assert (np.abs(row[column] - x) < error * scale).all(), (k, column, row[column], x)
        compared |= {*want}
    assert {"rel_l2_mean", "union_pages_mean"} <= compared
    if kind == "plain":
        assert {"far_recall", "evidence_recall"} <= compared


@pytest.mark.parametrize("kind", ["plain", "sliding", "huge"])
@pytest.mark.parametrize("read", READS)
def test_curves_rise_and_end_at_one(kind, read):
    source = lane(**LANES[kind])
    curves = run(source, read.format(1, 4))["curves"]
    for role in np.unique(curves["role"]):
        mine = {c: np.reshape(x[curves["role"] == role], (source.layer.q_heads, -1)) for c, x in curves.items()}
        for column in (
            "mass_recall_mean",
            "mass_recall_p5",
            "mass_recall_min",
            "top1_recall_mean",
            "top10_recall_mean",
            "top64_recall_mean",
            "far_recall",
            "evidence_recall",
        ):
            assert not (np.diff(mine[column], axis=1) < -1e-6).any()
        for column in ("union_pages_mean", "read_bytes_mean"):
            assert (np.diff(mine[column], axis=1) >= 0).all()
        assert (mine["union_pages_mean"] >= np.minimum(mine["pages"], mine["pages"].max())).all()


def test_roles_are_the_steps_of_that_role():
    source = lane(**LANES["plain"])
    read = "quest(read=pages(2), page=4)"
    roles, curves = source.request.roles[source.t], run(source, read)["curves"]
    assert set(np.unique(curves["role"]).tolist()) == {-1, *roles.tolist()}
    for role in set(roles.tolist()):
        steps = source.steps[roles == role]
        alone = run(source, read, steps=steps)["curves"]
        pick = curves["role"] == role
        every = (alone["role"] == -1) & (alone["pages"] <= curves["pages"].max())
        for column in ("mass_recall_mean", "union_pages_mean", "top10_recall_p5"):
            assert np.array_equal(curves[column][pick], alone[column][every])


@pytest.mark.parametrize("heads", ["share", "max", "mean", "softmax_mean", "split"])
def test_heads_of_one_set_read_what_their_group_reads(heads):
    curves = run(lane(**LANES["plain"]), f'quest(read=pages(2), page=4, heads="{heads}")')["curves"]
    assert np.array_equal(curves["union_pages_mean"], curves["read_pages_mean"])
    assert (curves["read_pages_mean"] > curves["pages"]).any() == (heads == "share")


def test_only_a_fixed_budget_of_a_ranking_over_everything_has_curves():
    source = lane(**LANES["plain"])
    for policy in (
        "full()", "h2o(hold=tokens(20)) >> quest(read=pages(2))", "kivi(group=2, residual=4) >> quest(read=pages(2))",
        "quest(read=pages(2), shards=shards(2))", "quest(read=pages(2), refresh=2)", "quest(read=top_p(p=0.5))",
    ):  # fmt: skip
        assert not run(source, policy)["curves"]
    assert chain("quest(read=pages(2))").part("read").heads == "each"
    assert run(source, "quest(read=pages(2))")["curves"]


def test_the_grid_of_output_errors():
    assert grid(5).tolist() == [1, 2, 3, 4, 5]
    assert grid(GRID).tolist() == [*range(1, GRID + 1)]
    fine = grid(1000)
    assert (fine[0], fine[-1]) == (1, 1000)
    assert 12 <= len(fine) <= GRID
    assert (np.diff(fine) > 0).all()


@pytest.mark.parametrize("shape", [(1, 3), (2, 1, 1), (7, 2, COLUMNS), (40, 3, 50)])
def test_percentiles_are_those_of_numpy_however_the_steps_are_cut(shape):
    rng = np.random.default_rng(len(shape))
    x = np.where(rng.random(shape) < 0.3, 0.5, rng.standard_normal(shape)).astype(np.float32)
    which = (0, 5, 50, 95, 100)
    got = percentiles(np.array_split(x, 3), which)
    assert got.shape == (len(which), *shape[1:])
    assert np.array_equal(got, percentiles([x], which))
    assert np.allclose(got, np.percentile(x.astype(float), which, axis=0), rtol=1e-14, atol=1e-15)
    assert np.array_equal(got[0], x.min(0))
