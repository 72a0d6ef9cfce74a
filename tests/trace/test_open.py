"""A trace is read as it was written, or refused by name: file, column, head, position, and what was expected."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from kvsim.errors import BadTrace, WrongUse
from kvsim.synth.generate import synthesize
from kvsim.trace.bits import narrow
from kvsim.trace.folder import plain_offset
from kvsim.trace.open import Lane, open_trace
from tests.trace.forge import KV, LAYERS, PREFILL, REQUESTS, VALUES, Q, cell, manifest, put, relist, remove, rewrite

PROMPT, STEPS = 24, 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "sound"
    synthesize(path, prompt=PROMPT, steps=STEPS)
    return path


@pytest.fixture
def trace(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "t"))


def read_all(path: Path) -> list[Lane]:
    """Everything a replay would read."""
    trace = open_trace(path)
    lanes = []
    for r in trace.requests:
        for layer in trace.captured_layers:
            trace.supplies(r, layer)
            lanes.append(trace.lane(r, layer))
    return lanes


# ------------------------------------------------------------------------------------------------ what is in it
def test_a_trace_tells_what_it_has(trace):
    t = open_trace(trace)
    (r,), (layer,) = t.requests, t.captured_layers
    assert (t.id, t.dtype, t.partial) == ("t", "float16", False)
    assert (r.prompt, r.total, len(r.roles)) == (PROMPT, PROMPT + STEPS, PROMPT + STEPS)
    assert (layer.q_heads, layer.kv_heads, layer.key_dim, layer.dtype, layer.row_bytes) == (4, 2, 16, "float16", 64)
    s = t.supplies(r, layer)
    assert s.steps.tolist() == list(range(STEPS))
    assert (s.contiguous, s.window_rows, s.prefill_mass, s.k_pre, s.wo_norm) == (True, 16, True, True, True)


def test_a_lane_has_the_shapes_its_docstring_says(trace):
    (lane,) = read_all(trace)
    total = PROMPT + STEPS
    shape = {name: getattr(lane, name).shape for name in ("k", "v", "k_pre", "q", "out", "window_q", "mass", "wo_norm", "lse")}
    assert shape["k"] == shape["v"] == shape["k_pre"] == (2, total, 16)
    assert shape["q"] == shape["out"] == (STEPS, 4, 16)
    assert shape["window_q"] == (16, 4, 16)
    assert (shape["mass"], shape["wo_norm"], shape["lse"]) == ((4, PROMPT), (4, total), (STEPS, 4))
    assert lane.t.tolist() == [PROMPT + n for n in range(STEPS)]
    assert lane.window_t.tolist() == list(range(PROMPT - 16, PROMPT))
    assert not lane.k.flags.writeable


def test_layers_not_captured_are_listed_and_counted_among(tmp_path):
    t = synthesize(tmp_path / "t", layers=4, captured=(0, 2))
    assert [layer.id for layer in t.layers] == [0, 1, 2, 3]
    assert [layer.id for layer in t.captured_layers] == [0, 2]
    assert {layer.among for layer in t.layers} == {(0, 1, 2, 3)}


def test_a_linear_layer_is_listed_but_is_no_attention_layer(trace):
    extra = {"layer": 1, "kind": "linear", "q_heads": 0, "kv_heads": 0, "key_dim": 0, "value_dim": 0, "scale": 0.0}

    def add(t):
        return pa.concat_tables([t, pa.Table.from_pylist([dict.fromkeys(t.schema.names) | extra], t.schema)])

    rewrite(trace, LAYERS, add)
    t = open_trace(trace)
    assert [(layer.kind, layer.captured) for layer in t.layers] == [("full", True), ("linear", False)]
    assert t.layers[0].among == (0,)
    assert len(read_all(trace)) == 1


def test_strided_queries_are_told(tmp_path):
    t = synthesize(tmp_path / "t", steps=9, stride=4, window_rows=3)
    s = t.supplies(t.requests[0], t.layers[0])
    assert s.steps.tolist() == [0, 4, 8]
    assert not s.contiguous
    assert s.window_rows == 3


def test_steps_that_do_not_start_at_zero_are_not_contiguous(trace):
    rewrite(trace, Q, lambda t: t.filter(pc.not_equal(t["decode_step"], 0)))
    t = open_trace(trace)
    s = t.supplies(t.requests[0], t.layers[0])
    assert (s.steps.tolist(), s.contiguous) == ([1, 2, 3], False)


def test_the_window_ends_at_the_first_gap(trace):
    rewrite(trace, Q, lambda t: t.filter(pc.not_equal(t["decode_step"], -4)))
    (lane,) = read_all(trace)
    assert lane.window_t.tolist() == [PROMPT - 3, PROMPT - 2, PROMPT - 1]
    assert open_trace(trace).supplies(lane.request, lane.layer).window_rows == 3


@pytest.mark.parametrize(
    ("dtype", "asked", "billed"),
    [
        ("float16", None, "float16"),
        ("bfloat16", None, "bfloat16"),
        ("float32", None, "bfloat16"),
        ("float32", "float32", "float32"),
        ("float16", "fp8", "fp8"),
    ],
)
def test_bytes_are_billed_in_the_deployment_dtype(tmp_path, dtype, asked, billed):
    assert synthesize(tmp_path / "t", dtype=dtype).kv_dtype(asked) == billed


def test_an_unknown_kv_dtype_is_refused(trace):
    with pytest.raises(WrongUse, match=r"'int4': expected one of float32, float16, bfloat16, fp8"):
        open_trace(trace).kv_dtype("int4")


def test_optional_things_left_out_are_none(tmp_path):
    t = synthesize(tmp_path / "t", without=("k_pre", "prefill_mass", "wo_norm", "out", "lse"))
    lane, s = t.lane(t.requests[0], t.layers[0]), t.supplies(t.requests[0], t.layers[0])
    assert (lane.k_pre, lane.mass, lane.wo_norm, lane.out, lane.lse) == (None,) * 5
    assert (s.k_pre, s.prefill_mass, s.wo_norm) == (False,) * 3


def test_without_rope_a_key_is_its_own_pre_rope_key(tmp_path):
    t = synthesize(tmp_path / "t", rope=False)
    assert "k_pre" not in t.folder.of("kv", 0, 0)[0].columns
    assert t.supplies(t.requests[0], t.layers[0]).k_pre
    lane = t.lane(t.requests[0], t.layers[0])
    assert lane.k_pre is lane.k


def test_the_sha256_is_that_of_the_manifest(trace):
    before = open_trace(trace).sha256
    manifest(trace, note="changed")
    assert open_trace(trace).sha256 != before


# ------------------------------------------------------------------------------------------------ what others may do
def test_unknown_columns_files_and_entries_are_ignored(trace):
    (before,) = read_all(trace)
    nested = [{"k": 1, "pos": 2}]
    for name in (KV, Q, PREFILL, VALUES, REQUESTS, LAYERS):
        rewrite(
            trace,
            name,
            lambda t: t.add_column(0, "extra", pa.array(nested * t.num_rows)).append_column("z", pa.nulls(t.num_rows)),
        )
    (trace / "index").mkdir()
    (trace / "index" / "notes.txt").write_text("reserved")
    files = json.loads((trace / "manifest.json").read_text())["files"]
    manifest(trace, files=files | {"index/notes.txt": {"bytes": 8}}, schema="kvsim.trace/1.3", later={"a": 1})
    (after,) = read_all(trace)
    same(before, after)


@pytest.mark.parametrize(
    "options", [{"compression": "zstd"}, {"use_dictionary": True}, {"data_page_size": 64}, {"data_page_version": "2.0"}]
)
def test_other_parquet_encodings_read_the_same(trace, options):
    (before,) = read_all(trace)
    for name in (KV, Q, PREFILL, VALUES):
        rewrite(trace, name, lambda t: t, **options)
    (after,) = read_all(trace)
    same(before, after)


def test_files_without_statistics_read_the_same(trace):
    (before,) = read_all(trace)
    rewrite(trace, KV, lambda t: t, write_statistics=False)
    (after,) = read_all(trace)
    same(before, after)


@pytest.mark.parametrize("statistics", [True, False])
def test_empty_row_groups_are_skipped(trace, statistics):
    (before,) = read_all(trace)
    for name in (KV, Q):
        table, group = pq.read_table(trace / name), pq.read_metadata(trace / name).row_group(0).num_rows
        (trace / name).unlink()
        with pq.ParquetWriter(
            trace / name, table.schema, use_dictionary=False, compression="none", write_statistics=statistics
        ) as w:
            for part in (table.slice(0, 0), table.slice(0, group), table.slice(0, 0), table.slice(group)):
                w.write_table(part)
        assert pq.read_metadata(trace / name).num_row_groups == 4
        relist(trace, name)
    (after,) = read_all(trace)
    same(before, after)


def test_nullable_columns_without_nulls_read_the_same(trace):
    (before,) = read_all(trace)
    for name in (KV, Q):
        rewrite(trace, name, lambda t: t.cast(pa.schema([f.with_nullable(True) for f in t.schema])))
    (after,) = read_all(trace)
    same(before, after)


def test_queries_and_masses_may_come_in_any_order(trace):
    (before,) = read_all(trace)
    rng = np.random.default_rng(0)
    for name in (Q, PREFILL, VALUES):
        rewrite(trace, name, lambda t: t.take(rng.permutation(t.num_rows)))
    (after,) = read_all(trace)
    same(before, after)


def test_wide_text_and_lists_are_text_and_lists(trace):
    before = open_trace(trace)
    wide = {"mode": pa.large_string(), "roles": pa.large_list(pa.int8())}
    rewrite(trace, REQUESTS, lambda t: t.cast(pa.schema([f.with_type(wide.get(f.name, f.type)) for f in t.schema])))
    after = open_trace(trace)
    assert after.requests[0].roles.tolist() == before.requests[0].roles.tolist()


def test_only_required_columns_will_do(trace):
    rewrite(trace, REQUESTS, lambda t: t.select(["request", "prompt_tokens", "total_tokens", "mode"]))
    rewrite(trace, LAYERS, lambda t: t.select(["layer", "kind", "q_heads", "kv_heads", "key_dim", "value_dim", "scale"]))
    t = open_trace(trace)
    assert t.requests[0].roles.tolist() == [0] * PROMPT + [3] * STEPS
    assert (t.layers[0].row_bytes, t.layers[0].captured, t.layers[0].window) == (64, True, None)


def same(a: Lane, b: Lane) -> None:
    for name in ("k", "v", "k_pre", "steps", "t", "q", "window_t", "window_q", "mass", "wo_norm", "out", "lse"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
        assert getattr(a, name).dtype == getattr(b, name).dtype, name


# ------------------------------------------------------------------------------------------------ zero copies
def test_rows_that_lie_evenly_and_aligned_are_views_of_the_file(tmp_path):
    views = 0
    for prompt in range(90, 94):
        t = synthesize(tmp_path / str(prompt), prompt=prompt, without=("prefill_mass",))
        (segment,) = t.folder.of("kv", 0, 0)
        data, lane = segment.file.read_bytes(), t.lane(t.requests[0], t.layers[0])
        for name in ("k", "v", "k_pre"):
            x, offsets = getattr(lane, name), [plain_offset(segment, group, name) or 0 for group in (0, 1)]
            assert [data[o : o + x[0].nbytes] for o in offsets] == [x[0].tobytes(), x[1].tobytes()]
            assert isinstance(x.base, mmap.mmap) == all(o % 2 == 0 for o in offsets)
            if isinstance(x.base, mmap.mmap):
                assert np.shares_memory(x, np.frombuffer(x.base, np.uint8))
                views += 1
    assert views


def test_heads_at_uneven_distances_cost_one_copy(tmp_path):
    synthesize(tmp_path / "t", q_heads=3, kv_heads=3, prompt=92)
    (before,) = read_all(tmp_path / "t")
    text = pa.array([""] * 100 + ["a long text that takes room, 2 x 17"] * 100 + ["x" * 9000] * 100)
    rewrite(tmp_path / "t", KV, lambda t: t.append_column("text", text))
    (after,) = read_all(tmp_path / "t")
    assert isinstance(before.k.base, mmap.mmap)
    assert after.k.base is None
    same(before, after)


def test_several_segments_cost_one_copy(tmp_path):
    t = synthesize(tmp_path / "t", segment=2)
    lane = t.lane(t.requests[0], t.layers[0])
    assert len(t.folder.of("kv", 0, 0)) > 1
    assert lane.k.base is None


# ------------------------------------------------------------------------------------------------ refusals
def swapped(t):
    order = list(range(t.num_rows))
    order[3], order[5] = order[5], order[3]
    return t.take(order)


def narrow_table(t):
    return put(t, "k", [b[:16] for b in t["k"].to_pylist()], pa.binary(16))


def not_finite(column, row, bits):
    def change(t):
        cells = t[column].to_pylist()
        cells[row] = cells[row][:4] + narrow(np.array([bits]), "float16").tobytes() + cells[row][6:]
        return put(t, column, cells)

    return change


TABLES = {
    "no kv column": (KV, lambda t: t.drop(["v"]), [KV, "'v' is missing", "fixed_size_binary[32]"]),
    "a column twice": (KV, lambda t: t.append_column("k", t["v"]), [KV, "'k' is there twice"]),
    "k too narrow": (KV, narrow_table, [KV, "'k' is fixed_size_binary[16]", "expected fixed_size_binary[32]"]),
    "pos of another type": (KV, lambda t: put(t, "pos", t["pos"].to_pylist(), pa.int64()), [KV, "'pos' is int64", "expected int32"]),
    "k of variable size": (KV, lambda t: put(t, "k", t["k"].to_pylist(), pa.binary()), [KV, "'k' is binary", "fixed_size_binary[32]"]),
    "rows out of order": (KV, swapped, [KV, "row 3 is kv head 0, position 5, where position 3 belongs", "sorted by (kv_head, pos)"]),
    "a row twice": (KV, lambda t: t.take([0, 0, *range(2, t.num_rows)]), [KV, "kv head 0", "position"]),
    "a row twice, another gone": (KV, lambda t: t.take([0, 1, 1, *range(3, t.num_rows)]), [KV, "row 2", "position 1", "twice"]),
    "the last row gone": (KV, lambda t: t.slice(0, t.num_rows - 1), ["kv/request=0/layer=0", "position 27 of kv head 1 is missing"]),
    "the first row gone": (KV, lambda t: t.slice(1), [KV, "kv heads 0 to 1"]),
    "a head too many": (KV, lambda t: cell(t, "kv_head", t.num_rows - 1, 2), [KV, "kv heads 1 to 2"]),
    "a negative position": (KV, lambda t: cell(t, "pos", 0, -1), [KV, "kv head 0", "positions -1 to 27"]),
    "NaN in k": (KV, not_finite("k", 7, np.nan), [KV, "k holds NaN", "kv head 0, position 7"]),
    "infinity in v": (KV, not_finite("v", 30, np.inf), [KV, "v holds NaN or infinity", "kv head 1, position 2"]),
    "NaN in k_pre": (KV, not_finite("k_pre", 0, np.nan), [KV, "k_pre holds NaN", "position 0"]),
    "NaN in q": (Q, not_finite("q", 1, -np.inf), [Q, "q holds NaN or infinity", "q head 0, decode step -15"]),
    "a null head": (KV, lambda t: nulls(t, "kv_head"), [KV, "'kv_head' has 1 null"]),
    "a null vector": (KV, lambda t: nulls(t, "k"), [KV, "'k' has 28 values, 1 of them null", "row group 0"]),
    "a query twice": (Q, lambda t: t.take([0, 0, *range(2, t.num_rows)]), ["q/request=0/layer=0", "q head 0 at decode step -16", "2 times"]),
    "a query gone": (Q, lambda t: t.slice(0, t.num_rows - 1), ["q/request=0/layer=0", "q head 3 at decode step 3 is missing"]),
    "a query elsewhere": (Q, lambda t: cell(t, "pos", 2, 5), [Q, "position 5, decode step -14", "24 prompt tokens + decode_step"]),
    "a query too late": (Q, lambda t: cell(cell(t, "pos", 2, 28), "decode_step", 2, 4), [Q, "position 28", "positions 0 to 27"]),
    "a query of another group": (Q, lambda t: cell(t, "kv_head", 0, 1), [Q, "kv head 1, q head 0", "2 q heads in a row for each kv head"]),
    "a query head too many": (Q, lambda t: cell(t, "q_head", 0, 4), [Q, "q head 4", "q heads 0 to 3"]),
    "no decode_step": (Q, lambda t: t.drop(["decode_step"]), [Q, "'decode_step' is missing"]),
    "out too wide": (Q, lambda t: put(t, "out", [b * 2 for b in t["out"].to_pylist()], pa.binary(64)), [Q, "'out' is", "[64]"]),
    "a mass gone": (PREFILL, lambda t: t.slice(1), ["prefill/request=0/layer=0", "q head 0, position 0 is missing"]),
    "a mass twice": (PREFILL, lambda t: t.take([0, 0, *range(2, t.num_rows)]), ["prefill", "q head 0, position 0 is there twice"]),
    "a mass below 0": (PREFILL, lambda t: cell(t, "mass", 2, -0.5), ["prefill", "mass is -0.5 at q head 0, position 2", "0 or more"]),
    "a mass that is NaN": (PREFILL, lambda t: cell(t, "mass", 2, np.nan), ["prefill", "mass is nan", "position 2"]),
    "a mass beyond the prompt": (PREFILL, lambda t: cell(t, "pos", 0, 24), ["prefill", "position 24", "positions 0 to 23"]),
    "masses in float64": (PREFILL, lambda t: put(t, "mass", t["mass"].to_pylist(), pa.float64()), [PREFILL, "'mass' is double"]),
    "a norm gone": (VALUES, lambda t: t.slice(0, 5), ["values/request=0/layer=0", "missing"]),
    "kv heads that do not divide": (LAYERS, lambda t: cell(t, "kv_heads", 0, 3), ["layer 0", "4 q_heads over 3 kv_heads"]),
    "a negative dim": (LAYERS, lambda t: cell(t, "key_dim", 0, -16), ["layer 0", "key_dim is -16", "1 or more"]),
    "a dim of another width": (LAYERS, lambda t: cell(t, "key_dim", 0, 8), [KV, "'k' is fixed_size", "fixed_size_binary[16]"]),
    "fewer kv heads than rows": (LAYERS, lambda t: cell(t, "kv_heads", 0, 1), ["kv/request=0/layer=0", "rows of kv head 1"]),
    "more kv heads than rows": (LAYERS, lambda t: cell(t, "kv_heads", 0, 4), ["kv/request=0/layer=0", "position 0 of kv head 2 is missing"]),
    "an unknown kind": (LAYERS, lambda t: cell(t, "kind", 0, "spiral"), ["layer 0", "'spiral'", "sliding"]),
    "sliding without a window": (LAYERS, lambda t: cell(t, "kind", 0, "sliding"), ["layer 0", "window is null"]),
    "a window of 0": (LAYERS, lambda t: cell(t, "window", 0, 0), ["layer 0", "window is 0"]),
    "a scale that is NaN": (LAYERS, lambda t: cell(t, "scale", 0, np.nan), ["layer 0", "scale is nan"]),
    "a softcap below 0": (LAYERS, lambda t: cell(t, "softcap", 0, -1.0), ["layer 0", "softcap is -1.0"]),
    "too few sinks": (LAYERS, lambda t: cell(t, "sinks", 0, [1.0]), ["layer 0", "sinks has 1 logits", "each of 4 q_heads"]),
    "a sink that is NaN": (LAYERS, lambda t: cell(t, "sinks", 0, [np.nan] * 4), ["layer 0", "sinks", "finite"]),
    "a rope that is no JSON": (LAYERS, lambda t: cell(t, "rope", 0, "theta=1"), ["layer 0", "rope is 'theta=1'", "JSON"]),
    "rows of 0 bytes": (LAYERS, lambda t: cell(t, "row_bytes", 0, 0), ["layer 0", "row_bytes is 0"]),
    "a layer twice": (LAYERS, lambda t: pa.concat_tables([t, t]), ["layer 0 is listed twice"]),
    "a layer without rows": (LAYERS, lambda t: cell(t, "layer", 0, 1), ["kv/request=0/layer=1", "the table is missing"]),
    "no layer captured": (LAYERS, lambda t: cell(t, "captured", 0, False), ["no captured layer"]),
    "no scale": (LAYERS, lambda t: t.drop(["scale"]), [LAYERS, "'scale' is missing"]),
    "a null kind": (LAYERS, lambda t: nulls(t, "kind"), [LAYERS, "row 0: kind is null"]),
    "a request without rows": (REQUESTS, lambda t: cell(t, "request", 0, 7), ["kv/request=7/layer=0", "the table is missing"]),
    "a request twice": (REQUESTS, lambda t: pa.concat_tables([t, t]), ["request 0 is listed twice"]),
    "no request": (REQUESTS, lambda t: t.slice(0, 0), ["no request"]),
    "a prompt of 0": (REQUESTS, lambda t: cell(t, "prompt_tokens", 0, 0), ["request 0", "prompt_tokens 0"]),
    "a prompt past the end": (REQUESTS, lambda t: cell(t, "prompt_tokens", 0, 99), ["request 0", "prompt_tokens 99 of total_tokens 28"]),
    "another prompt": (REQUESTS, lambda t: cell(t, "prompt_tokens", 0, 23), [Q, "23 prompt tokens + decode_step"]),
    "roles of another length": (REQUESTS, lambda t: cell(t, "roles", 0, [0, 1]), ["request 0", "roles has 2 entries", "28 tokens"]),
    "an unknown role": (REQUESTS, lambda t: cell(t, "roles", 0, [9] * 28), ["request 0", "[9]", "0, 1, 2 or 3"]),
    "a null among roles": (REQUESTS, lambda t: cell(t, "roles", 0, [0] * 27 + [None]), [REQUESTS, "roles has 1 nulls among its numbers"]),
    "token ids of another length": (REQUESTS, lambda t: cell(t, "token_ids", 0, [1]), ["request 0", "token_ids has 1 entries"]),
    "a span outside": (REQUESTS, lambda t: cell(t, "spans", 0, [span(20, 29)]), ["request 0", "'a' is [20, 29)", "inside [0, 28)"]),
    "an empty span": (REQUESTS, lambda t: cell(t, "spans", 0, [span(5, 5)]), ["request 0", "[5, 5)"]),
    "fewer tokens than rows": (REQUESTS, lambda t: shorter(t), ["kv head 0 has the position 27", "26 tokens"]),
}  # fmt: skip


def nulls(t, column):
    """The table with its first cell of a column null, whatever the schema says."""
    values = [None, *t[column].to_pylist()[1:]]
    i = t.schema.get_field_index(column)
    return t.set_column(i, pa.field(column, t.schema.field(column).type), pa.array(values, t.schema.field(column).type))


def span(start, stop):
    return {"label": "a", "start": start, "stop": stop, "kind": "evidence"}


def shorter(t):
    for column, value in (("total_tokens", 26), ("roles", [0] * 26), ("token_ids", None), ("spans", [])):
        t = cell(t, column, 0, value)
    return t


@pytest.mark.parametrize("case", TABLES)
def test_a_wrong_table_is_refused_by_name(trace, case):
    name, change, mentions = TABLES[case]
    rewrite(trace, name, change)
    refused(trace, mentions)


def refused(path, mentions):
    with pytest.raises(BadTrace) as e:
        read_all(path)
    assert "\n" not in str(e.value)
    assert [m for m in [str(path), *mentions] if m not in str(e.value)] == [], str(e.value)


@pytest.mark.parametrize(
    ("changes", "mentions"),
    [
        ({"schema": "kvsim.trace/2"}, ["'kvsim.trace/2'", "'kvsim.trace/1'"]),
        ({"schema": "kvsim.trace/10"}, ["'kvsim.trace/10'"]),
        ({"schema": None}, ["schema is None"]),
        ({"kind": "indexer"}, ["kind is 'indexer'", "'attention'"]),
        ({"status": "running"}, ["status is 'running'", "'complete'"]),
        ({"dtype": "float64"}, ["dtype is 'float64'", "'bfloat16'"]),
        ({"dtype": "float32"}, ["'k' is fixed_size_binary[32]", "expected fixed_size_binary[64]"]),
        ({"byte_order": "big"}, ["byte_order is 'big'", "'little'"]),
        ({"files": None}, ["expected an object with schema"]),
        ({"files": {}}, ["the table requests is missing"]),
    ],
)
def test_a_wrong_manifest_is_refused_by_name(trace, changes, mentions):
    manifest(trace, **changes)
    refused(trace, mentions)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"files": 3}', "\udcff"])
def test_a_manifest_that_is_none_is_refused(trace, text):
    (trace / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(trace, ["manifest.json"])


@pytest.mark.parametrize("table", ["kv", "q", "layers", "requests"])
def test_a_missing_table_is_refused(trace, table):
    remove(trace, table)
    refused(trace, [table, "missing"])


def test_a_missing_file_is_refused(trace):
    (trace / KV).unlink()
    refused(trace, [KV, "is missing"])


@pytest.mark.parametrize("size", [0, 1, 812])
def test_a_truncated_file_is_refused(trace, size):
    whole = (trace / KV).stat().st_size
    os.truncate(trace / KV, size)
    refused(trace, [KV, f"{size} bytes, the manifest says {whole}", "truncated", "copy or capture it again"])


def test_a_longer_file_is_refused(trace):
    with (trace / KV).open("ab") as f:
        f.write(b"x")
    refused(trace, [KV, "altered"])


def test_a_file_that_is_no_parquet_is_refused(trace):
    (trace / KV).write_bytes(b"x" * (trace / KV).stat().st_size)
    refused(trace, [KV, "cannot be read as Parquet"])


def test_another_number_of_rows_than_listed_is_refused(trace):
    files = json.loads((trace / "manifest.json").read_text())["files"]
    files[KV]["rows"] += 1
    manifest(trace, files=files)
    refused(trace, [KV, "56 rows, 56 in its row groups, listed as 57"])


@pytest.mark.parametrize("dim", range(4, 13))
def test_a_null_vector_is_refused_at_any_width(tmp_path, dim):
    """Also where what the null saves is what marking it costs, so that the page is as long as one without."""
    synthesize(tmp_path / "t", head_dim=dim, rope=False, without=("prefill_mass",))
    rewrite(tmp_path / "t", KV, lambda t: nulls(t, "v"))
    refused(tmp_path / "t", [KV, "1 of them null"])


def test_a_segment_twice_is_refused(trace):
    twin = KV.replace("00000", "00001")
    shutil.copy(trace / KV, trace / twin)
    relist(trace, twin)
    refused(trace, [twin, "position 0 of kv head 0 is there twice"])


def test_an_optional_column_in_some_segments_only_is_refused(tmp_path):
    synthesize(tmp_path / "t", segment=4)
    name = KV.replace("00000", "00001")
    rewrite(tmp_path / "t", name, lambda t: t.drop(["k_pre"]))
    refused(tmp_path / "t", [name, "'k_pre' is missing"])


@pytest.mark.parametrize(
    "name", ["../outside.parquet", "/etc/hostname", "kv/../../outside.parquet", "link.parquet", f"kv/../{KV}", "a\0b"]
)
def test_a_path_out_of_the_folder_is_refused(trace, name):
    outside = trace.parent / "outside.parquet"
    shutil.copy(trace / KV, outside)
    (trace / "link.parquet").symlink_to(outside)
    files = json.loads((trace / "manifest.json").read_text())["files"]
    manifest(trace, files=files | {name: files[KV]})
    refused(trace, [repr(name), "leaves the trace's folder"])


@pytest.mark.parametrize("name", ["é" * 300, "round/a.parquet"])
def test_a_path_that_leads_nowhere_is_refused(trace, name):
    (trace / "round").symlink_to(trace / "round")
    files = json.loads((trace / "manifest.json").read_text())["files"]
    manifest(trace, files=files | {name: files[KV]})
    refused(trace, [name[:20], "list paths inside it"])


def test_a_folder_that_is_a_link_itself_is_fine(trace, tmp_path):
    (tmp_path / "alias").symlink_to(trace)
    assert len(read_all(tmp_path / "alias")) == 1


def test_no_folder_and_no_trace_are_refused(tmp_path):
    refused(tmp_path / "gone", ["no such folder"])
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", ["not a trace", "manifest.json"])


def test_a_partial_trace_is_refused_unless_allowed(trace):
    whole = open_trace(trace)
    (trace / "manifest.json").unlink()
    refused(trace, ["manifest.json is missing", "partial", "allow_partial"])
    t = open_trace(trace, allow_partial=True)
    assert (t.partial, t.dtype, t.requests[0].total) == (True, whole.dtype, whole.requests[0].total)
    same(whole.lane(whole.requests[0], whole.layers[0]), t.lane(t.requests[0], t.layers[0]))


def test_one_row_group_for_all_heads_is_refused(trace):
    rewrite(trace, KV, lambda t: t, row_group_size=1000)
    assert pq.read_metadata(trace / KV).num_row_groups == 1
    refused(trace, [KV, "row group 0 holds the kv heads 0 to 1", "one row group per kv head"])
