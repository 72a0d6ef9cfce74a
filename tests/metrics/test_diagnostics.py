"""Diagnostics are means that anyone can take from heads, explain and evidence, role by role."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import polars as pl
import pytest

from kvsim.metrics.diagnostics import diagnostics, write
from tests.engine.lanes import lane, rows_of, run

UNIT = {"policy": "p", "request": 0, "layer": 2}


def rows(**columns):
    return pl.DataFrame({**{k: [v] * 2 for k, v in UNIT.items()}, "q_head": [0, 1], "step": [0, 0], **columns}).lazy()


HEADS = rows(
    mass_evicted_prefill=[0.1, 0.3], mass_evicted=[0.2, 0.4], read_churn=[None, 0.5], learned_sink_mass=[0.0, 0.0],
    oracle_recall=[0.8, 0.6], oracle_held_recall=[0.7, 0.5], mass_recall=[0.6, 0.5], role=[3, 3], dense=[False, False],
    read_pages=[2, 4], held_pages=[4, 4], rounds=[1, 3], certified=[True, False],
).cast({"role": pl.Int8})  # fmt: skip
EXPLAIN = rows(
    score_gap=[1.0, None], k_needed=[3, 5], **{f"exact_pages_r{r}": [r, r] for r in (1, 10, 64)},
    **{f"mass_pages_{e}": [None, None] for e in ("001", "005", "01", "02")},
    regret=[1.0, 3.0], displaced_slack=[None, 2.0], slack_norm=[0.5, 1.0], churn_summary=[0.0, 0.25], churn_query=[0.5, 0.5],
    recovered_1=[None, 0.5], recovered_4=[0.5, 1.0], recovered_16=[None, None], pages=[10, 30], below=[0, 3], below_max=[0.0, 0.7],
    fp16_changed=[True, False],
)  # fmt: skip


def value(frame, metric, role=-1):
    [found] = frame.filter(pl.col("metric") == metric, pl.col("role") == role)["value"].to_list()
    return found


def test_losses_are_the_steps_between_the_levels():
    found = diagnostics(HEADS)
    assert value(found, "loss_budget") == pytest.approx(0.3)
    assert value(found, "loss_evict") == pytest.approx(0.1)
    assert value(found, "loss_index") == pytest.approx(0.05)
    levels = sum(value(found, f"loss_{x}") for x in ("budget", "evict", "index"))
    assert levels == pytest.approx(1 - 0.55)  # together: all that was not read
    assert value(found, "fmm_prefill") == pytest.approx(0.2)
    assert value(found, "fmm_running") == pytest.approx(0.3)
    assert value(found, "churn_read") == 0.5  # null where there is no step before


def test_depths_have_mean_p95_and_max_and_what_was_not_measured_is_absent():
    found = diagnostics(HEADS, explain=EXPLAIN)
    assert value(found, "k_needed_mean") == 4
    assert value(found, "k_needed_max") == 5
    assert value(found, "score_gap") == 1.0
    assert not found.filter(pl.col("metric").str.starts_with("mass_pages"))["metric"].to_list()


def test_what_a_ranking_cost_and_whether_scores_hold():
    found = diagnostics(HEADS, explain=EXPLAIN)
    wanted = {
        "regret": 2.0,
        "displaced_slack": 2.0,
        "slack_norm": 0.75,
        "churn_summary": 0.125,
        "churn_query": 0.5,
        "recovered_1": 0.5,
    }
    wanted |= {"recovered_4": 0.75, "below_share": 3 / 40, "below_max": 0.7, "sets_changed_fp16": 0.5}
    assert {name: value(found, name) for name in wanted} == pytest.approx(wanted)
    assert "recovered_16" not in found["metric"]


def test_all_spans_are_read_only_where_every_one_is():
    evidence = pl.DataFrame(
        {**{k: [v] * 4 for k, v in UNIT.items()}, "q_head": [0, 0, 1, 1], "step": [0] * 4, "span": ["a", "b"] * 2, "dense": [0.5] * 4, "read": [0.5, 0.0, 0.1, 0.2]}
    ).lazy()  # fmt: skip
    found = diagnostics(HEADS, evidence=evidence)
    assert value(found, "all_spans_read") == 0.5
    assert value(found, "any_span_read") == 1.0


def test_write_puts_it_beside_the_tables(tmp_path):
    HEADS.collect().write_parquet(tmp_path / "heads.parquet")
    write(tmp_path)
    found = diagnostics(HEADS)
    whole, split = (pl.read_parquet(tmp_path / f"diagnostics{of}.parquet") for of in ("", "_by_role"))
    assert whole.equals(found.filter(pl.col("role") == -1).drop("role"))
    assert split.equals(found.filter(pl.col("role") >= 0))
    assert not whole.select("policy", "request", "layer", "metric").is_duplicated().any()


def test_the_file_does_not_hang_on_how_a_frame_was_put_together(tmp_path, monkeypatch):
    """Of a large run polars hands on as many chunks as it had threads: the bytes are those of one."""
    frame = pl.DataFrame(
        {
            "policy": ["a"] * 9000,
            "role": pl.Series([-1, 0, 1] * 3000, dtype=pl.Int8),
            "metric": ["x"] * 9000,
            "value": np.arange(9000.0),
        }
    )
    contents = set()
    for cuts in ([0, 9000], [0, 10, 9000], [0, 4000, 4001, 9000]):
        pieces = pl.concat([frame[a:b] for a, b in pairwise(cuts)], rechunk=False)
        monkeypatch.setattr("kvsim.metrics.diagnostics.diagnostics", lambda pieces=pieces: pieces)
        write(tmp_path)
        contents.add(tuple((tmp_path / f"diagnostics{x}.parquet").read_bytes() for x in ("", "_by_role")))
    assert len(contents) == 1


def test_how_deep_it_read_and_how_often_everything():
    found = diagnostics(HEADS)
    told = ("read_pages_mean", "read_pages_p95", "read_pages_max", "rounds_mean", "rounds_max", "certified", "full_reads")
    assert [value(found, name) for name in told] == pytest.approx([3, 3.9, 4, 2, 3, 0.5, 0.5])
    whole = diagnostics(HEADS.with_columns(dense=pl.lit(True)))
    assert not set(told) & set(whole["metric"])  # layers read whole by rule never fell back
    old = diagnostics(HEADS.with_columns(held_pages=pl.lit(None, pl.Int32), certified=pl.lit(None, pl.Boolean)))
    assert set(told) - set(old["metric"]) == {"certified", "full_reads"}


LAYERS = (3, 4, 5)
TABLES = ("heads", "explain", "evidence", "plans")


def real(policy, steps=None):
    """Diagnostics of a made-up trace of three layers."""
    made = {name: [] for name in TABLES}
    for layer in LAYERS:
        source = lane(steps=24, prompt=60, evidence=((5, 9), (40, 43)), seed=layer)
        source.request.roles[:] = np.random.default_rng(0).integers(1, 4, len(source.request.roles))  # of one request
        source = dataclasses.replace(source, layer=dataclasses.replace(source.layer, id=layer))
        got = run(source, policy, steps=steps, plans=True, explain=True)
        for name in TABLES:
            if got[name]:
                rows = pl.from_arrow(rows_of(got, name))
                made[name].append(rows.with_columns(pl.col("policy").cast(pl.String), layer=pl.lit(layer, pl.Int16)))
    frames = {name: pl.concat(parts).lazy() for name, parts in made.items() if parts}
    return diagnostics(**frames), source


def test_a_rule_that_wants_more_than_there_is_reads_everything():
    found, _ = real("quest(read=exact(r=1000000), page=4)")
    assert set(found.filter(metric="full_reads")["value"]) == {1.0}
    assert set(found.filter(metric="certified")["value"]) == {1.0}
    some = real("quest(read=exact(r=1), page=4)")[0].filter(metric="full_reads", role=-1)["value"]
    assert some.max() < 1


def test_a_cap_leaves_some_unproved():
    found, _ = real("quest(read=mass(eps=0.3, cap=pages(12)), page=4)")
    mine = found.filter(metric="certified", role=-1)["value"]
    assert 0 < mine.mean() < 1
    assert found.filter(metric="read_pages_max")["value"].max() == 12


@pytest.mark.parametrize(
    "policy", ["quest(read=mass(eps=0.3, cap=pages(12)), page=4)", "h2o(hold=tokens(40)) >> quest(read=pages(3), page=4)"]
)
def test_a_role_is_the_run_of_its_steps(policy):
    whole, source = real(policy)
    roles = source.request.roles[source.t]
    assert set(whole["role"]) == {-1, *roles.tolist()} == {-1, 1, 2, 3}
    assert {"jaccard_1", "jaccard_chance_2", "any_span_read", "k_needed_p95", "fmm_running"} <= set(whole["metric"])
    for role in (1, 2, 3):
        alone, _ = real(policy, steps=source.steps[roles == role].tolist())
        keys = ["policy", "request", "layer", "metric"]
        mine, want = (x.filter(role=r).drop("role").sort(keys) for x, r in ((whole, role), (alone, -1)))
        assert mine.select(keys).equals(want.select(keys))
        assert mine["value"].to_list() == pytest.approx(want["value"].to_list(), rel=1e-9)
    mixed = whole.filter(role=-1)["value"].to_list()
    assert mixed != pytest.approx(whole.filter(role=3)["value"].to_list(), rel=1e-3)


def test_windows_are_totals_over_cuts_and_churn_their_mean():
    events = pl.DataFrame(
        {**{k: [v] * 6 for k, v in UNIT.items()}, "kv_head": [0, 0, 0, 1, 1, 1], "step": [-1, 0, 1] * 2,
         "windows_promoted": [0, None, 2, 0, None, 1], "windows_demoted": [3, None, 1, 3, None, 1], "windows_evicted": [4, None, 0, 4, None, 2],
         "windows_aged_in": [9, None, 1, 9, None, 1], "churn_full": [None, None, 0.5, None, None, 0.25]}
    ).lazy()  # fmt: skip
    found = diagnostics(HEADS, events=events)
    assert [value(found, f"windows_{x}") for x in ("promoted", "demoted", "evicted", "aged_in")] == [1.5, 4, 5, 10]
    assert value(found, "churn_full") == 0.375
    assert not {"churn_full", "windows_promoted"} & {*diagnostics(HEADS)["metric"]}
