"""Every aggregate against the same sums in plain Python."""

from __future__ import annotations

import math
from collections import defaultdict

import polars as pl
import pytest

from kvsim import tables
from kvsim.metrics.interval import contexts, intervals
from kvsim.metrics.quality import FATES, dense_layers, fate, quality, roles
from kvsim.metrics.run import open_run
from kvsim.metrics.traffic import KEPT_CLASSES, STEP_CLASSES, asked, by_class, by_step, scattered, traffic, whole
from tests.report.runs import FULL, H2O, KIVI, POLICIES, QUEST, ROW_BYTES, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("metrics") / "run", contexts=2, roles=(1, 3)))


def grouped(frame: pl.LazyFrame, *by: str):
    groups = defaultdict(list)
    for row in frame.collect().iter_rows(named=True):
        groups[tuple(row[n] for n in by)].append(row)
    return groups


def mean(values):
    told = [v for v in values if v is not None]
    return sum(told) / len(told)


def ratio(pairs):
    """Sum over sum; null below 1e-3."""
    told = [(a, b) for a, b in pairs if a is not None and b is not None]
    below = sum(b for _, b in told)
    return sum(a for a, _ in told) / below if below >= 1e-3 else None


@pytest.mark.parametrize("by", [(), ("role",), ("step",), ("layer", "q_head")])
def test_quality(run, by):
    found = quality(run.heads, *by)
    naive = grouped(run.heads, "policy", *by)
    assert found.select("policy", *by).rows() == sorted(naive)
    for row in found.iter_rows(named=True):
        group = naive[tuple(row[n] for n in ("policy", *by))]
        far = ratio((None if r["far_recall"] is None else r["far_recall"] * r["far_mass"], r["far_mass"]) for r in group)
        assert row["rows"] == len(group)
        assert row["mass_recall"] == pytest.approx(mean(r["mass_recall"] for r in group))
        assert row["missed_mass"] == pytest.approx(mean(r["mass_evicted"] + r["mass_unread"] for r in group), rel=1e-6)
        assert row["far_recall"] == pytest.approx(far, rel=1e-6)
        assert row["evidence_recall"] == pytest.approx(ratio((r["evidence_read"], r["evidence_dense"]) for r in group), rel=1e-6)
        assert row["rel_l2"] == pytest.approx(mean(r["rel_l2"] for r in group))
        assert row["read_tokens"] == pytest.approx(mean(r["read_tokens"] for r in group))


@pytest.mark.parametrize(
    ("read", "dense", "said"),
    [
        ([1.0, 0.0], [1.0, 9.0], 0.1),  # the mean of ratios would be 0.5
        ([4e-4, 0.0], [4e-4, 5e-4], None),  # 9e-4 in all: nothing to divide by
        ([4e-4, 0.0], [4e-4, 6e-4], 0.4),  # 1e-3 in all, though each is less
        ([0.2, None], [0.5, 0.5], 0.4),  # a row that says nothing counts on neither side
        ([0.2, 0.3], [0.5, None], 0.4),
        ([None, None], [None, None], None),
    ],
)
def test_a_ratio_is_of_sums(read, dense, said):
    rows = {"policy": ["p", "p"], "evidence_read": read, "evidence_dense": dense, "read_tokens": [1, 1]}
    rows |= {n: [0.5, 0.5] for n in ("mass_recall", "mass_evicted", "mass_unread", "rel_l2", "far_mass")}
    floats = ("evidence_read", "evidence_dense", "far_recall")
    far = [None if d is None or r is None else r / d for r, d in zip(read, dense, strict=True)]
    frame = pl.LazyFrame(rows | {"far_recall": far}, schema_overrides=dict.fromkeys(floats, pl.Float64))
    found = quality(frame.with_columns(far_mass="evidence_dense")).row(0, named=True)
    assert found["evidence_recall"] == pytest.approx(said)
    assert found["far_recall"] == pytest.approx(said)


def test_the_fates_of_the_mass_sum_to_one(run):
    parts = fate(run.heads)
    assert parts.group_by("policy").len()["len"].to_list() == [len(FATES)] * len(POLICIES)
    assert parts.group_by("policy").agg(pl.col("mass").sum())["mass"].to_list() == pytest.approx([1.0] * len(POLICIES), abs=1e-6)
    mass = {(p, part): m for p, part, m in parts.select("policy", "part", "mass").iter_rows()}
    assert mass[FULL, "read, full precision"] == pytest.approx(1)
    assert mass[H2O, "gone for good"] > 0 == mass[H2O, "kept, not read"]
    assert mass[QUEST, "kept, not read"] > 0 == mass[QUEST, "gone for good"]
    assert mass[KIVI, "read, coded"] > 0


def test_roles_and_dense_layers(run):
    assert roles(run.heads).rows() == [(1, 0, 2, 3), (3, 3, 5, 3)]
    assert dense_layers(run.heads).is_empty()
    dense = run.heads.with_columns(dense=(pl.col("policy") == QUEST) & (pl.col("layer") == 3))
    assert dense_layers(dense).rows() == [(QUEST, 3)]
    assert dense_layers(dense.with_columns(dense=pl.col("dense") & (pl.col("q_head") > 0))).is_empty()  # one head is not


def test_traffic(run):
    naive = grouped(run.ledger, "policy")
    for row in traffic(run.ledger, run.layers).iter_rows(named=True):
        group = naive[row["policy"],]
        full = sum(r["visible_tokens"] * ROW_BYTES for r in group)
        touched = [r["read_bytes"] + r["index_bytes"] + r["meta_bytes"] + r["score_bytes"] for r in group]
        assert row["touched_bytes"] == pytest.approx(mean(touched))
        assert row["read_share"] == pytest.approx(sum(touched) / full)
        assert row["resident_share"] == pytest.approx(sum(r["resident_bytes"] for r in group) / full)
        assert row["held_tokens"] == pytest.approx(mean(r["held_tokens"] for r in group))
        assert row["union_tokens"] == pytest.approx(mean(r["read_tokens"] for r in group))


def test_shares_are_unknown_without_row_bytes(run):
    layers = run.layers.with_columns(row_bytes=pl.when(pl.col("layer") == 0).then("row_bytes"))
    found = traffic(run.ledger, layers)
    assert found["read_share"].is_null().all()
    assert found["touched_bytes"].is_not_null().all()


def test_budgets_as_they_were_asked(run):
    found = asked(run.ledger, run.tables["events"])
    assert (H2O, "hold", "tokens", 12.0, 12.0) in found.rows()
    assert (QUEST, "read", "tokens", 8.0, 8.0) in found.rows()
    assert FULL not in found["policy"]
    per_layer = run.ledger.with_columns(asked=pl.col("asked") + pl.col("layer"))
    assert (QUEST, "read", "tokens", 8.0, 11.0) in asked(per_layer, run.tables["events"]).rows()


def test_few_contexts_get_no_interval(run):
    assert contexts(run.heads) == 2
    assert intervals(run.heads).is_empty()


def test_intervals_resample_whole_contexts(tmp_path):
    heads = open_run(write_run(tmp_path / "run", policies=(QUEST, FULL), contexts=8, layers=(0,))).heads
    found = intervals(heads)
    assert found.rows() == intervals(heads).rows()
    point = {
        (r["policy"], m): r[m] for r in quality(heads).iter_rows(named=True) for m in ("far_recall", "evidence_recall", "rel_l2")
    }
    assert len(found) == len(point)
    for policy, measure, low, high in found.iter_rows():
        assert low <= point[policy, measure] + 1e-12
        assert high >= point[policy, measure] - 1e-12
        assert (low == high) == (policy == FULL)
    same = heads.with_columns(request=pl.col("request") // 8)
    copies = pl.concat(
        [same.with_columns(request=pl.lit(i, pl.Int32)) for i in range(8)]
    )  # eight times one context: nothing varies
    assert all(math.isclose(low, high) for _, _, low, high in intervals(copies).iter_rows())


def test_bytes_by_class_add_up_to_what_the_ledger_has(run):
    whole_step = sum(n for names in STEP_CLASSES.values() for n in [run.ledger.collect().select(names).sum_horizontal()])
    assert by_class(run.ledger, STEP_CLASSES).group_by("policy").agg(pl.col("bytes").sum()).sort("policy")["bytes"].to_list() == (
        pytest.approx([whole_step.filter(run.ledger.collect()["policy"] == p).mean() for p in sorted(POLICIES)])
    )
    kept = {(p, part): b for p, part, b in by_class(run.ledger, KEPT_CLASSES).select("policy", "part", "bytes").iter_rows()}
    assert kept[H2O, "K and V rows"] == 12 * ROW_BYTES
    assert kept[QUEST, "index"] == 0
    used = {n for names in (*STEP_CLASSES.values(), *KEPT_CLASSES.values()) for n in names}
    bytes_ = {f.name for f in tables.LEDGER if f.name.endswith("_bytes")} - {"resident_page_bytes", "page_bytes", "coded_bytes"}
    assert used == bytes_  # every byte is in exactly one class; coded_bytes are a part of two


def test_what_full_attention_reads(run):
    visible = run.ledger.filter(pl.col("policy") == FULL).collect()["visible_tokens"]
    assert whole(run.ledger, run.layers) == pytest.approx(visible.mean() * ROW_BYTES)
    assert whole(run.ledger, run.layers.with_columns(row_bytes=pl.lit(None, pl.Int64))) is None


def test_bytes_along_the_steps(run):
    found = by_step(run.ledger, run.layers)
    mine = run.ledger.filter(pl.col("policy") == QUEST, pl.col("step") == 2).collect()
    row = found.filter(pl.col("policy") == QUEST, pl.col("step") == 2).row(0, named=True)
    moved = mine.select(n for names in STEP_CLASSES.values() for n in names).sum_horizontal()
    assert row["bytes"] == pytest.approx(moved.mean())
    assert row["share"] == pytest.approx(moved.sum() / (mine["visible_tokens"] * ROW_BYTES).sum())
    assert by_step(run.ledger, run.layers, 3)["step"].unique().sort().to_list() == [0, 3]


def test_scattered_pages(run):
    found = {r["policy"]: r for r in scattered(run.ledger).iter_rows(named=True)}
    assert found.keys() == {p for p in POLICIES if "read=tokens" in p}
    row = found[QUEST]
    assert (row["pages"], row["whole_pages"]) == (2, 1)
    assert row["run_pages"] == pytest.approx(2 / row["runs"])
