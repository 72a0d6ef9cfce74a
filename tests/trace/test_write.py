"""What is written is what is read, however it is cut into segments, and what a kill leaves is a readable prefix."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.errors import BadTrace, WrongUse
from kvsim.synth.generate import synthesize
from kvsim.trace import write
from kvsim.trace.bits import RAW, first_not_finite, narrow, widen
from kvsim.trace.open import Trace, open_trace
from kvsim.trace.write import TraceWriter
from tests.trace.forge import KV, Q

LAYER = {"layer": 0, "kind": "full", "q_heads": 4, "kv_heads": 2, "key_dim": 4, "value_dim": 2, "scale": 0.5}
REQUEST = {"request": 0, "prompt_tokens": 5, "total_tokens": 8, "mode": "greedy"}


def numbers(shape, dtype="float16", seed=0):
    return narrow(np.random.default_rng(seed).normal(size=shape), dtype)


def writer(path, dtype="float16", requests=(REQUEST,), layers=(LAYER,), **options):
    return TraceWriter(path, dtype, {"model": "m"}, {"tool": "test"}, requests, layers, **options)


def fill(w, a=0, b=8):
    """All rows of the one (request, layer)."""
    w.kv(0, 0, a, numbers((2, b - a, 4)), numbers((2, b - a, 2)))
    w.q(0, 0, range(-2, 3), numbers((5, 4, 4)))


# ------------------------------------------------------------------------------------------------ bits
@pytest.mark.parametrize("dtype", RAW)
def test_every_finite_number_survives_narrowing(dtype):
    bits = np.arange(1 << 16, dtype=np.uint32)
    raw = bits.view(np.float32) if dtype == "float32" else bits.astype(np.uint16).view(RAW[dtype])
    finite = raw[[first_not_finite(x.reshape(1, 1), dtype) is None for x in raw]]
    assert len(finite) > 60000
    assert narrow(widen(finite), dtype).tobytes() == finite.tobytes()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**127, min_value=-(2.0**127)))
def test_bfloat16_is_the_nearest(x):
    y = float(widen(narrow(np.array([x]), "bfloat16"))[0])
    bits = narrow(np.array([x]), "bfloat16").astype(np.int64)
    around = widen(np.concatenate([bits - 1, bits + 1]).clip(0, 0xFFFF).astype(np.uint16))
    assert abs(y - x) <= np.abs(around[np.isfinite(around)] - x).min()


def test_halfway_goes_to_the_even_bfloat16():
    halfway = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    assert narrow(halfway, "bfloat16").tolist() == [0x3F80, 0x3F82, 0xBF80]


@pytest.mark.parametrize("dtype", RAW)
def test_the_first_row_that_is_not_finite_is_found(dtype):
    x = numbers((5000, 300), dtype)
    assert first_not_finite(x, dtype) is None
    for bad in (np.inf, -np.inf, np.nan):
        x[[4321, 4400], [7, 0]] = narrow(np.array([bad, np.nan]), dtype)
        assert first_not_finite(x, dtype) == 4321
    endless = narrow(np.array([np.inf, -np.inf]), dtype)
    x[[4321, 4400], [7, 0]] = (endless.view(f"u{x.itemsize}") - 1).view(x.dtype)  # the largest numbers there are
    assert first_not_finite(x, dtype) is None


# ------------------------------------------------------------------------------------------------ round trips
@st.composite
def captures(draw):
    group, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    prompt, steps = draw(st.integers(1, 20)), draw(st.integers(1, 9))
    total, stride = prompt + steps, draw(st.integers(1, 3))
    asked = np.concatenate([np.arange(-draw(st.integers(0, prompt)), 0), np.arange(0, steps, stride)])
    return {
        "dtype": draw(st.sampled_from(sorted(RAW))),
        "compression": draw(st.sampled_from(["none", "zstd"])),
        "shape": (heads, group, draw(st.integers(1, 9)), draw(st.integers(1, 9)), prompt, total),
        "steps": asked,
        "kv_cuts": sorted(draw(st.sets(st.integers(1, total - 1), max_size=4))),
        "q_cuts": sorted(draw(st.sets(st.integers(1, len(asked)), max_size=3)) - {len(asked)}),
        "extra": draw(st.sets(st.sampled_from(["k_pre", "out", "lse", "mass", "wo_norm"]))),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=40, deadline=None)
@given(c=captures())
def test_what_is_written_is_read(c, tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "t"
    heads, group, dk, dv, prompt, total = c["shape"]
    hq, steps, dtype, extra = heads * group, c["steps"], c["dtype"], c["extra"]
    rng = np.random.default_rng(c["seed"])
    k, k_pre, v = (narrow(rng.normal(size=(heads, total, d)), dtype) for d in (dk, dk, dv))
    q, out = (narrow(rng.normal(size=(len(steps), hq, d)), dtype) for d in (dk, dv))
    lse, mass, wo_norm = (rng.random(s).astype(np.float32) for s in ((len(steps), hq), (hq, prompt), (hq, total)))
    request = {"request": 3, "prompt_tokens": prompt, "total_tokens": total, "mode": "greedy"}
    layer = {
        "layer": 2,
        "kind": "full",
        "q_heads": hq,
        "kv_heads": heads,
        "key_dim": dk,
        "value_dim": dv,
        "scale": 1.0,
        "rope": "{}",
    }
    with writer(path, dtype, [request], [layer], compression=c["compression"]) as w:
        for a, b in zip([0, *c["kv_cuts"]], [*c["kv_cuts"], total], strict=True):
            w.kv(3, 2, a, k[:, a:b], v[:, a:b], k_pre[:, a:b] if "k_pre" in extra else None)
            if "wo_norm" in extra:
                w.values(3, 2, a, wo_norm[:, a:b])
        for a, b in zip([0, *c["q_cuts"]], [*c["q_cuts"], len(steps)], strict=True):
            w.q(3, 2, steps[a:b], q[a:b], out[a:b] if "out" in extra else None, lse[a:b] if "lse" in extra else None)
        if "mass" in extra:
            w.prefill(3, 2, mass, prompt - np.arange(prompt))
    t = open_trace(path)
    lane, decode = t.lane(t.requests[0], t.layers[0]), steps >= 0
    expected = {"k": k, "v": v, "q": q[decode], "window_q": q[~decode], "steps": steps[decode], "t": steps[decode] + prompt}
    optional = {"k_pre": k_pre, "out": out[decode], "lse": lse[decode], "mass": mass, "wo_norm": wo_norm}
    for name, x in (expected | {name: x for name, x in optional.items() if name in extra}).items():
        assert np.array_equal(getattr(lane, name), x), name
        assert getattr(lane, name).dtype == x.dtype, name
    assert [name for name in optional if getattr(lane, name) is not None] == [name for name in optional if name in extra]


def test_long_rows_are_cut_into_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "ROWS", 3)
    with writer(tmp_path / "t") as w:
        fill(w)
    t = open_trace(tmp_path / "t")
    segments = t.folder.of("kv", 0, 0)
    assert [s.rows for s in segments] == [6, 6, 4]
    assert {s.footer.row_group(g).num_rows for s in segments for g in range(2)} == {2, 3}
    assert np.array_equal(t.lane(t.requests[0], t.layers[0]).k, numbers((2, 8, 4)))


def test_the_parquet_is_what_the_format_says(tmp_path):
    with writer(tmp_path / "t") as w:
        fill(w)
    for name in (KV, Q):
        file = pq.ParquetFile(tmp_path / "t" / name)
        assert file.metadata.num_row_groups == 2  # one per kv head
        for column in (file.metadata.row_group(1).column(i) for i in range(file.metadata.num_columns)):
            vector = column.path_in_schema in ("k", "v", "q")
            assert column.compression == "UNCOMPRESSED"
            assert not column.has_dictionary_page
            assert set(column.encodings) <= {"PLAIN", "RLE", "BIT_PACKED"}
            assert column.is_stats_set != vector
        assert not any(f.nullable for f in file.schema_arrow if f.name in ("k", "v", "q", "kv_head", "pos"))
    rows = pq.read_table(tmp_path / "t" / KV).select(["kv_head", "pos"]).to_pylist()
    assert rows == sorted(rows, key=lambda r: (r["kv_head"], r["pos"]))


def test_the_manifest_names_every_file_and_no_machine(tmp_path):
    with writer(tmp_path / "t", created="2020-01-01T00:00:00Z") as w:
        fill(w)
    text = (tmp_path / "t" / "manifest.json").read_text()
    content = json.loads(text)
    assert {k: content[k] for k in ("schema", "kind", "status", "dtype", "byte_order", "created")} == {
        "schema": "kvsim.trace/1",
        "kind": "attention",
        "status": "complete",
        "dtype": "float16",
        "byte_order": "little",
        "created": "2020-01-01T00:00:00Z",
    }
    on_disk = {str(p.relative_to(tmp_path / "t")) for p in (tmp_path / "t").rglob("*") if p.is_file()}
    assert set(content["files"]) == on_disk - {"manifest.json", "journal.jsonl"}
    journal = [json.loads(line) for line in (tmp_path / "t" / "journal.jsonl").read_text().splitlines()]
    assert {line["path"]: {k: line[k] for k in ("bytes", "sha256", "rows")} for line in journal} == content["files"]
    assert [(line["first"], line["last"]) for line in journal if line["path"] in (KV, Q)] == [(0, 7), (3, 7)]
    assert str(tmp_path) not in text


def test_requests_can_be_described_anew_as_a_capture_ends(tmp_path):
    with writer(tmp_path / "t", requests=[REQUEST | {"total_tokens": 99}]) as w:
        fill(w)
        w.describe([REQUEST | {"token_ids": list(range(8))}])
        shutil.copytree(tmp_path / "t", tmp_path / "killed")
    assert open_trace(tmp_path / "t").requests[0].total == 8
    assert open_trace(tmp_path / "killed", allow_partial=True).requests[0].total == 8
    assert [p.name for p in (tmp_path / "t" / "requests").iterdir()] == ["part-1.parquet"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_trace_is_on_disk_before_its_journal_says_so(tmp_path, monkeypatch, durable):
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(os.fstat(fd).st_ino))
    with writer(tmp_path / "t", durable=durable) as w:
        fill(w)
    root = tmp_path / "t"
    segment = [p.stat().st_ino for p in (root / KV, (root / KV).parent, root / "journal.jsonl")]
    if durable:
        at = seen.index(segment[0])
        assert seen[at : at + 3] == segment
        assert seen[-2:] == [(root / "manifest.json").stat().st_ino, root.stat().st_ino]
    else:
        assert seen == []


# ------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize("there", ["file", "folder"])
def test_something_there_already_is_refused_and_left_alone(tmp_path, there):
    path = tmp_path / "t"
    if there == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").write_text("mine")
    with pytest.raises(WrongUse, match="there is something already"):
        writer(path)
    assert (path if there == "file" else path / "mine").read_text() == "mine"


def test_an_empty_folder_will_do(tmp_path):
    with writer(tmp_path) as w:
        fill(w)
    assert open_trace(tmp_path).requests[0].total == 8


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"compression": "gzip"}])
def test_unknown_options_are_refused(tmp_path, options):
    with pytest.raises(WrongUse, match="expected"):
        writer(tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_a_description_no_reader_would_take_is_refused(tmp_path):
    with pytest.raises(BadTrace, match="4 q_heads over 3 kv_heads"):
        writer(tmp_path / "t", layers=[LAYER | {"kv_heads": 3}])
    assert not (tmp_path / "t").exists()


WRONG = {
    "float32 numbers": (lambda w: w.kv(0, 0, 0, numbers((2, 8, 4), "float32"), numbers((2, 8, 2))), r"float32\[2, 8, 4\]; expected float16"),
    "too few heads": (lambda w: w.kv(0, 0, 0, numbers((1, 8, 4)), numbers((2, 8, 2))), r"float16\[1, 8, 4\]; expected float16\[2, 8, 4\]"),
    "v as wide as k": (lambda w: w.kv(0, 0, 0, numbers((2, 8, 4)), numbers((2, 8, 4))), r"v is float16\[2, 8, 4\]; expected float16\[2, 8, 2\]"),
    "a gap": (lambda w: w.kv(0, 0, 1, numbers((2, 7, 4)), numbers((2, 7, 2))), "starts at position 1; expected 0"),
    "an unknown request": (lambda w: w.kv(5, 0, 0, numbers((2, 8, 4)), numbers((2, 8, 2))), "request 5, layer 0: not described"),
    "steps backwards": (lambda w: w.q(0, 0, [1, 0], numbers((2, 4, 4))), r"steps \[1, 0\]; expected ascending"),
    "steps again": (lambda w: [w.q(0, 0, [0, 1], numbers((2, 4, 4))), w.q(0, 0, [1], numbers((1, 4, 4)))], r"steps \[1\]"),
    "k_pre in some": (
        lambda w: [w.kv(0, 0, 0, numbers((2, 3, 4)), numbers((2, 3, 2))), w.kv(0, 0, 3, *(numbers((2, 5, d)) for d in (4, 2, 4)))],
        r"has \['k', 'k_pre', 'v'\]; expected \['k', 'v'\]",
    ),
    "rows that end early": (lambda w: fill(w, 0, 7), "rows end at .*'kv': 7.* expected kv .* to 8"),
    "no queries": (lambda w: w.kv(0, 0, 0, numbers((2, 8, 4)), numbers((2, 8, 2))), "'q': None"),
    "values that end early": (lambda w: [fill(w), w.values(0, 0, 0, np.ones((4, 3), np.float32))], "'values': 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rows_are_refused_and_no_manifest_is_written(tmp_path, case):
    call, match = WRONG[case]
    with pytest.raises(WrongUse, match=match), writer(tmp_path / "t") as w:
        call(w)
    assert not (tmp_path / "t" / "manifest.json").exists()


def test_the_bits_of_bfloat16_are_asked_for_by_name(tmp_path):
    with pytest.raises(WrongUse, match=r"expected uint16 \(the bits of bfloat16\)"), writer(tmp_path / "t", "bfloat16") as w:
        fill(w)


# ------------------------------------------------------------------------------------------------ kills
def check_prefix(killed: Path, whole: Path) -> int:
    """A partial trace is a prefix of the whole one; how many positions."""
    with suppress(BadTrace):
        part = open_trace(killed, allow_partial=True)
        return same_prefix(part, open_trace(whole))
    with pytest.raises(BadTrace, match=r"partial, and no request|the table \w+ is missing"):
        open_trace(killed, allow_partial=True)
    return 0


def same_prefix(part: Trace, full: Trace) -> int:
    (r,) = part.requests
    for layer in part.captured_layers:
        a, b = part.lane(r, layer), full.lane(full.requests[0], layer)
        steps = b.steps < r.total - r.prompt
        assert a.request.roles.tolist() == b.request.roles[: r.total].tolist()
        for name in ("k", "v", "k_pre", "wo_norm"):
            if getattr(a, name) is not None:
                assert np.array_equal(getattr(a, name), getattr(b, name)[:, : r.total]), name
        for name in ("steps", "t", "q", "out", "lse"):
            assert np.array_equal(getattr(a, name), getattr(b, name)[steps]), name
        assert np.array_equal(a.window_q, b.window_q)
    return r.total


def test_every_prefix_of_a_journal_is_a_readable_trace_or_a_named_refusal(tmp_path):
    synthesize(tmp_path / "whole", layers=2, prompt=20, steps=6, segment=2)
    killed = Path(shutil.copytree(tmp_path / "whole", tmp_path / "killed"))
    (killed / "manifest.json").unlink()
    journal = (killed / "journal.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(journal) if byte == ord("\n")]
    reached = []
    for end in [0, *ends, *(e - 20 for e in ends)]:  # a whole last line, or one torn by the kill
        (killed / "journal.jsonl").write_bytes(journal[:end])
        reached.append(check_prefix(killed, tmp_path / "whole"))
    whole = reached[1 : len(ends) + 1]
    assert sorted(whole) == whole
    assert set(whole) == {0, 20, 22, 24, 26}  # prompt, then a segment of two steps at a time, in both layers
    assert set(reached) == set(whole)


CAPTURE = """
import sys
from kvsim.trace.bits import narrow
from kvsim.trace.write import TraceWriter
from tests.trace.test_write import LAYER, numbers
rows = [{"request": 0, "prompt_tokens": 8, "total_tokens": 1000, "mode": "greedy"}]
with TraceWriter(sys.argv[1], "bfloat16", {"model": "m"}, {"tool": "test"}, rows, [LAYER]) as w:
    w.kv(0, 0, 0, numbers((2, 8, 4), "bfloat16"), numbers((2, 8, 2), "bfloat16"))
    for step in range(992):
        w.kv(0, 0, 8 + step, numbers((2, 1, 4), "bfloat16", step), numbers((2, 1, 2), "bfloat16", step))
        w.q(0, 0, [step], numbers((1, 4, 4), "bfloat16", step))
        print(step, flush=True)
"""


def test_what_was_closed_survives_a_kill(tmp_path):
    command = [sys.executable, "-c", CAPTURE, str(tmp_path / "t")]
    root, env = Path(__file__).parents[2], os.environ | {"PYTHONPATH": "."}
    child = subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(5):
        done = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with pytest.raises(BadTrace, match="partial"):
        open_trace(tmp_path / "t")
    t = open_trace(tmp_path / "t", allow_partial=True)
    lane = t.lane(t.requests[0], t.layers[0])
    assert t.dtype == "bfloat16"
    assert len(lane.steps) > done
    assert lane.k.shape[1] == 8 + len(lane.steps)
    for step in lane.steps:
        assert np.array_equal(lane.k[:, 8 + step], numbers((2, 1, 4), "bfloat16", step)[:, 0])
        assert np.array_equal(lane.q[step], numbers((1, 4, 4), "bfloat16", step)[0])


def test_an_error_leaves_a_partial_trace(tmp_path):
    def fail():
        with writer(tmp_path / "t") as w:
            fill(w)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert open_trace(tmp_path / "t", allow_partial=True).requests[0].total == 8


def test_a_partial_request_keeps_the_spans_it_has(tmp_path):
    spans = [{"label": str(b), "start": a, "stop": b, "kind": "evidence"} for a, b in ((1, 3), (5, 7), (6, 8))]
    w = writer(tmp_path / "t", requests=[REQUEST | {"spans": spans}])
    fill(w, 0, 7)
    (r,) = open_trace(tmp_path / "t", allow_partial=True).requests
    assert (r.total, [s.label for s in r.spans]) == (7, ["3", "7"])


def test_a_torn_line_elsewhere_is_refused(tmp_path):
    with writer(tmp_path / "t") as w:
        fill(w)
    (tmp_path / "t" / "manifest.json").unlink()
    journal = (tmp_path / "t" / "journal.jsonl").read_text().splitlines(keepends=True)
    journal[1] = journal[1][:30] + "\n"
    (tmp_path / "t" / "journal.jsonl").write_text("".join(journal))
    with pytest.raises(BadTrace, match="line 2 is not a segment"):
        open_trace(tmp_path / "t", allow_partial=True)
