"""The tables of a learned indexer: written, read, refused when they are not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kvsim.errors import BadTrace, WrongUse
from kvsim.replay.asked import resolve
from kvsim.replay.needs import check_needs
from kvsim.synth.generate import synthesize
from kvsim.trace.check import check_trace
from kvsim.trace.info import describe
from kvsim.trace.open import open_trace
from kvsim.trace.write import TraceWriter
from tests.trace.test_moments import files, rewrite, with_column

SHAPE: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "prompt": 40, "steps": 6, "seed": 3}
ROW = {"layer": 0, "kind": "full", "q_heads": 2, "kv_heads": 1, "key_dim": 4, "value_dim": 4, "scale": 1.0, "captured": True}
REQUEST = {"request": 0, "prompt_tokens": 5, "total_tokens": 9, "mode": "greedy"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return Path(str(synthesize(tmp_path / "t", index_heads=3, **SHAPE).path))


def written(path, dtype="float32", steps=(0, 1, 2, 3), cuts=(9,), score_fn="relu_weighted", seed=0):
    """A trace of four decode steps with an indexer of 3 heads of 6 numbers; -> its q, w, k."""
    rng = np.random.default_rng(seed)
    kind = np.uint16 if dtype == "bfloat16" else dtype
    draw = lambda *shape: rng.integers(1, 9, shape).astype(kind)  # noqa: E731  # small whole numbers are finite bits, too
    q, w, k = draw(len(steps), 3, 6), rng.standard_normal((len(steps), 3)).astype(np.float32), draw(9, 6)
    with TraceWriter(path, dtype, {}, {}, [REQUEST], [ROW]) as out:
        out.kv(0, 0, 0, draw(1, 9, 4), draw(1, 9, 4))
        out.q(0, 0, np.arange(-1, 4), draw(5, 2, 4))
        for a, b in zip((0, *cuts[:-1]), cuts, strict=True):
            out.index_k(0, 0, a, k[a:b])
        half = len(steps) // 2
        out.index_q(0, 0, steps[:half], q[:half], w[:half], score_fn)
        out.index_q(0, 0, steps[half:], q[half:], w[half:], score_fn)
    return q, w, k


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cuts", [(9,), (2, 3, 9)])
def test_what_is_written_is_read(tmp_path, dtype, cuts):
    q, w, k = written(tmp_path / "t", dtype, cuts=cuts, score_fn="dot")
    trace = open_trace(tmp_path / "t")
    found = trace.lane(trace.requests[0], trace.layers[0]).indexer
    assert found is not None
    assert np.array_equal(found.q, q)
    assert np.array_equal(found.w, w)
    assert np.array_equal(found.k, k)
    assert (found.score_fn, found.q.dtype) == ("dot", q.dtype)
    assert [*check_trace(tmp_path / "t")] == []


def test_the_tables_join_and_change_no_other(trace, tmp_path):
    synthesize(tmp_path / "without", **SHAPE)
    mine, other = files(trace), files(tmp_path / "without")
    assert {name.split("/")[0] for name in mine.keys() - other.keys()} == {"index_k", "index_q"}
    assert {name: mine[name] for name in other} == other
    assert [*check_trace(trace)] == []
    assert describe(trace)["needs"]["index"]["supplied"]
    assert not describe(tmp_path / "without")["needs"]["index"]["supplied"]


def test_a_synthetic_indexer_finds_the_needles(tmp_path):
    trace = synthesize(tmp_path / "t", index_heads=4, head_dim=16, prompt=200, needles=2)
    request = trace.requests[0]
    lane = trace.lane(request, trace.layers[0])
    x = lane.indexer
    scores = (x.w[..., None] * np.maximum(0, np.einsum("nhd,td->nht", x.q.astype(float), x.k.astype(float)))).sum(1)
    best = np.argsort(-scores, axis=1)[:, : request.evidence_mask().sum() + 1]
    assert np.isin(np.flatnonzero(request.evidence_mask()), best[0]).all()


# ------------------------------------------------------------------------------------------------ refused
def test_a_trace_without_the_tables_is_refused_by_name(tmp_path):
    trace = synthesize(tmp_path / "t", **SHAPE)
    with pytest.raises(WrongUse, match="dsa needs index: tables index_k and index_q of a learned indexer are not in the trace"):
        check_needs(trace, resolve(trace, "dsa(read=tokens(4))"))


@pytest.mark.parametrize("steps", [(0, 1), (1, 2, 3), (0, 2)])
def test_steps_without_index_queries_are_refused_by_name(tmp_path, steps):
    written(tmp_path / "t", steps=steps)
    trace = open_trace(tmp_path / "t")
    assert trace.lane(trace.requests[0], trace.layers[0]).indexer is None
    lost = sorted({0, 1, 2, 3} - {*steps})
    with pytest.raises(WrongUse, match=f"dsa needs index: index_q has no rows of decode steps {lost[0]}"):
        check_needs(trace, resolve(trace, "dsa(read=tokens(4))"))
    assert not describe(tmp_path / "t")["needs"]["index"]["supplied"]


def table(trace: Path, name: str) -> Path:
    [file] = trace.glob(f"{name}/**/*.parquet")
    return file


def test_steps_of_which_tied_scores_say_nothing_are_told(tmp_path):
    path, none = tmp_path / "t", np.zeros((9, 6), np.float32)
    with TraceWriter(path, "float32", {}, {}, [REQUEST], [ROW | {"index_topk": 2}]) as out:
        out.kv(0, 0, 0, none[None, :, :4], none[None, :, :4])
        out.q(0, 0, np.arange(-1, 4), np.ones((5, 2, 4), np.float32), out=np.zeros((5, 2, 4), np.float32))
        out.index_k(0, 0, 0, none)
        out.index_q(0, 0, [0, 1, 2, 3], np.ones((4, 3, 6), np.float32), np.ones((4, 3), np.float32), "dot")
    told: list[str] = []
    assert [*check_trace(path, tell=told.append)] == []
    assert [line.split(": ", 1)[1] for line in told] == [
        "request 0, layer 0: 4 of 4 steps left out: tied scores do not tell which tokens the model's indexer chose"
    ]


def garbled(table: pa.Table) -> pa.Table:
    """A text whose bytes are no UTF-8."""
    at = table.schema.get_field_index("score_fn")
    return table.set_column(at, table.schema.field(at), pa.array([b"relu\xff"] * len(table), pa.binary()).view(pa.string()))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("index_k", lambda t: t.slice(1), "every position from 0 to 45 once"),
        ("index_q", lambda t: t.slice(1), "one row for each of 3 index heads"),
        ("index_q", lambda t: pa.concat_tables([t, t.slice(0, 1)]), "one row for each of 3 index heads"),
        ("index_q", with_column("pos", np.zeros(18, int)), "prompt tokens"),
        ("index_q", with_column("score_fn", np.array(["max"] * 18)), "score_fn is max; expected relu_weighted or dot"),
        ("index_q", garbled, "cannot be read as Parquet"),
        ("index_q", with_column("w", np.full(18, np.inf, np.float32)), "w holds NaN or infinity"),
        ("index_k", with_column("k", np.full((46, 4), 0x7E00, np.uint16)), "k holds NaN or infinity"),
    ],
)
def test_what_cannot_be_is_found(trace, name, change, said):
    rewrite(trace, change, name)
    found = [*check_trace(trace)]
    assert any(said in line for line in found), found
    assert all("\n" not in line for line in found)


def test_queries_and_keys_of_two_sizes_are_refused(trace, tmp_path):
    import shutil

    other = Path(str(synthesize(tmp_path / "o", index_heads=3, **(SHAPE | {"head_dim": 16})).path))
    shutil.copy(table(other, "index_k"), table(trace, "index_k"))
    rewrite(trace, lambda t: t, "index_k")
    trace_ = open_trace(trace)
    with pytest.raises(BadTrace, match="queries of 4 numbers beside keys of 8"):
        trace_.lane(trace_.requests[0], trace_.layers[0])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda w: w.index_k(0, 0, 3, np.zeros((9, 6), np.float32)), "starts at position 3; expected 0"),
        (lambda w: w.index_k(0, 0, 0, np.zeros((9, 6), np.float16)), "index keys is float16"),
        (lambda w: w.index_k(0, 0, 0, np.zeros((4, 6), np.float32)), "rows end at"),
        (lambda w: w.index_q(0, 0, [0], np.zeros((1, 2, 6), np.float32), np.zeros((1, 2)), "max"), "score_fn 'max'"),
        (lambda w: w.index_q(0, 0, [0], np.zeros((1, 2, 6), np.float32), np.zeros((1, 3)), "dot"), r"w \[1, 3\]"),
        (lambda w: w.index_q(0, 0, [-1], np.zeros((1, 2, 6), np.float32), np.zeros((1, 2)), "dot"), r"steps \[-1\]"),
    ],
)
def test_a_writer_refuses_what_is_no_indexer(tmp_path, call, said):
    def write():
        zero = np.zeros((1, 9, 4), np.float32)
        with TraceWriter(tmp_path / "t", "float32", {}, {}, [REQUEST], [ROW]) as w:
            w.kv(0, 0, 0, zero, zero)
            w.q(0, 0, np.arange(-1, 4), np.zeros((5, 2, 4), np.float32))
            call(w)

    with pytest.raises(WrongUse, match=said):
        write()
