"""Statistics of prompt queries: gathered as they come, written, read, checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvsim.errors import BadTrace, WrongUse
from kvsim.geometry import Layer, QueryStats
from kvsim.replay.asked import resolve
from kvsim.replay.needs import check_needs
from kvsim.synth.generate import synthesize
from kvsim.trace.bits import widen
from kvsim.trace.check import check_trace
from kvsim.trace.info import describe
from kvsim.trace.moments import Moments
from kvsim.trace.open import open_trace

ROPE = '{"kind": "default", "theta": 10000.0, "rotary_dim": 6, "layout": "half", "scaling": null, "magnitude": 1.2}'
LAYER = Layer(0, "full", 4, 2, 8, 8, 8**-0.5, 32, "float32", rope=ROPE)
SHAPE: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "prompt": 40, "steps": 4, "seed": 3}


def turned(q_pre: np.ndarray, first: int = 0) -> np.ndarray:
    """Queries [Hq, n, d] as attention sees them."""
    return np.stack([LAYER.rotate(x, first + np.arange(x.shape[0])) for x in q_pre])


@pytest.mark.parametrize("cuts", [(), (2,), (3, 4, 17)])
def test_the_moments_are_those_of_the_queries_before_rope_whatever_parts_they_come_in(cuts):
    q_pre = np.random.default_rng(1).standard_normal((4, 30, 8)) + 3
    found, q = Moments(LAYER), turned(q_pre)
    for a, b in zip((0, *cuts), (*cuts, 30), strict=True):
        found.add(q[:, a:b], a)
    stats = found.stats()
    assert (stats.first, stats.queries) == (4, 26)
    for h, rows in enumerate(q_pre[:, 4:]):
        np.testing.assert_allclose(stats.mean[h], rows.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(stats.covariance[h], np.cov(rows.T, bias=True), rtol=1e-5, atol=1e-6)


def test_a_prompt_of_the_first_tokens_only_has_none():
    found = Moments(LAYER)
    found.add(np.ones((4, 4, 8)), 0)
    assert found.stats() is None


# ------------------------------------------------------------------------------------------------ in a trace
@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return Path(str(synthesize(tmp_path / "t", q_stats=True, **SHAPE).path))


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*.parquet")}


def test_the_table_joins_and_changes_no_other(trace, tmp_path):
    synthesize(tmp_path / "without", **SHAPE)
    mine, other = files(trace), files(tmp_path / "without")
    assert {name.split("/")[0] for name in mine.keys() - other.keys()} == {"q_stats"}
    assert {name: mine[name] for name in other} == other


def test_what_is_read_is_what_the_queries_say(trace, tmp_path):
    opened = open_trace(trace)
    request, layer = opened.requests[0], opened.layers[0]
    lane = opened.lane(request, layer)
    whole = synthesize(tmp_path / "whole", window_rows=40, **SHAPE)
    assert opened.supplies(request, layer).q_stats
    assert lane.q_stats is not None
    q = widen(whole.lane(request, layer).window_q)
    for h in range(4):
        rows = layer.rotated_back(q[4:, h], np.arange(4, 40))
        np.testing.assert_allclose(lane.q_stats.mean[h], rows.mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(lane.q_stats.covariance[h], np.cov(rows.T, bias=True), atol=1e-3)
    assert [*check_trace(trace)] == []
    assert describe(trace)["needs"]["q_stats"] == {"supplied": True, "option": "--q-stats"}
    assert describe(trace)["bytes_by_table"]["q_stats"] > 4 * 4 * (8 + 64)


def test_a_trace_without_it_is_refused_by_name(tmp_path):
    trace = synthesize(tmp_path / "t", **SHAPE)
    assert trace.lane(trace.requests[0], trace.layers[0]).q_stats is None
    with pytest.raises(
        WrongUse, match=r"expected_attention needs q_stats: statistics of the prompt queries are not in .* --q-stats"
    ):
        check_needs(trace, resolve(trace, "expected_attention(hold=tokens(9))"))


def test_a_rope_that_cannot_be_applied_is_refused(trace):
    opened = open_trace(trace)
    strange = tuple(replace(x, rope=ROPE.replace("half", "interleaved")) for x in opened.layers)
    with pytest.raises(WrongUse, match="expected_attention turns queries by RoPE: rope layout 'interleaved'"):
        check_needs(
            replace(opened, layers=strange), resolve(replace(opened, layers=strange), "expected_attention(hold=tokens(9))")
        )


def rewrite(trace: Path, change, name: str = "q_stats") -> None:
    """The table with its rows changed, listed anew."""
    import hashlib
    import json

    [file] = trace.glob(f"{name}/**/*.parquet")
    pq.write_table(change(pq.read_table(file)), file, use_dictionary=False)
    manifest = json.loads((trace / "manifest.json").read_text())
    entry = {
        "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "rows": pq.read_metadata(file).num_rows,
    }
    manifest["files"][str(file.relative_to(trace))] = entry
    (trace / "manifest.json").write_text(json.dumps(manifest))
    (trace / "journal.jsonl").unlink()


def with_column(name: str, numbers):
    import pyarrow as pa

    def change(table):
        i = table.schema.get_field_index(name)
        kind = table.schema.field(name).type
        x = np.ascontiguousarray(numbers)
        cells = pa.array(x, kind) if x.ndim == 1 else pa.FixedSizeBinaryArray.from_buffers(kind, len(x), [None, pa.py_buffer(x)])
        return table.set_column(i, table.schema.field(name), cells)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.slice(1), "rows of q heads"),
        (with_column("q_head", np.array([0, 1, 2, 2])), "rows of q heads"),
        (with_column("queries", np.array([36, 36, 36, 30])), "differ between q heads"),
        (with_column("queries", np.full(4, 30)), "of 30 queries from position 4; expected 36"),
        (with_column("mean", np.full((4, 8), np.nan, np.float32)), "mean holds NaN"),
        (with_column("covariance", np.arange(256, dtype=np.float32).reshape(4, 64)), "covariance of q_stats is none"),
        (with_column("covariance", np.tile(-np.eye(8, dtype=np.float32).ravel(), (4, 1))), "covariance of q_stats is none"),
    ],
)
def test_what_cannot_be_is_found(trace, change, said):
    rewrite(trace, change)
    found = [*check_trace(trace)]
    assert any(said in line for line in found)
    assert all("\n" not in line for line in found)


def test_columns_of_another_size_are_refused_when_opened(trace):
    rewrite(trace, lambda t: t.drop_columns(["covariance"]))
    with pytest.raises(BadTrace, match="'covariance' is missing"):
        open_trace(trace)


@pytest.mark.parametrize("wrong", [{"mean": np.zeros((4, 7), np.float32)}, {"covariance": np.zeros((4, 8, 8))}])
def test_a_writer_refuses_other_shapes(tmp_path, wrong):
    from kvsim.trace.write import TraceWriter

    stats = QueryStats(np.zeros((4, 8), np.float32), np.zeros((4, 8, 8), np.float32), 4, 36)
    row = {"layer": 0, "kind": "full", "q_heads": 4, "kv_heads": 2, "key_dim": 8, "value_dim": 8, "scale": 1.0, "captured": True}
    request = {"request": 0, "prompt_tokens": 40, "total_tokens": 44, "mode": "greedy"}
    with pytest.raises(WrongUse, match="q_stats are"), TraceWriter(tmp_path / "t", "float32", {}, {}, [request], [row]) as w:
        w.q_stats(0, 0, replace(stats, **wrong))
