"""`trace check` finds what opening a trace does not look at, and a trace it calls sound is the trace that was written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvsim.errors import BadTrace
from kvsim.synth.generate import synthesize
from kvsim.trace import check
from kvsim.trace.bits import narrow, widen
from kvsim.trace.check import check_trace
from kvsim.trace.info import describe
from kvsim.trace.open import Trace, open_trace
from tests.trace.forge import KV, LAYERS, PREFILL, Q, cell, manifest, put, relist, rewrite


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "sound"
    synthesize(path, prompt=24, steps=4)
    return path


@pytest.fixture
def trace(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "t"))


def found(path: Path) -> list[str]:
    """Problems, but for the journal's: it cannot know of a file forged later."""
    return [p for p in check_trace(path) if "journal.jsonl" not in p]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 8.0, "learned_sinks": True, "window": 20, "value_dim": 5, "segment": 3},
        {"layers": 2, "captured": (1,), "requests": 2, "stride": 3, "compression": "zstd"},
    ],
)
def test_a_sound_trace_has_no_problems(tmp_path, dtype, options):
    synthesize(tmp_path / "t", dtype=dtype, **options)
    assert list(check_trace(tmp_path / "t")) == []


def test_a_row_group_too_long_is_found(trace, monkeypatch):
    monkeypatch.setattr(check, "ROWS", 27)
    (problem,) = check_trace(trace)
    assert "a row group of 28 rows; expected at most 27" in problem


def test_what_cannot_be_opened_is_one_problem(trace):
    (trace / "manifest.json").unlink()
    (problem,) = check_trace(trace)
    assert "partial" in problem
    assert list(check_trace(trace, allow_partial=True)) == []


def test_an_altered_byte_is_found(trace):
    data = bytearray((trace / KV).read_bytes())
    data[len(data) // 2] ^= 1
    (trace / KV).write_bytes(data)
    assert open_trace(trace).requests  # opening does not read the values
    assert any(KV in p and "sha256" in p for p in check_trace(trace))


def test_a_journal_that_disagrees_is_found(trace):
    lines = (trace / "journal.jsonl").read_text().splitlines(keepends=True)
    (trace / "journal.jsonl").write_text("".join(line for line in lines if KV not in line))
    (problem,) = check_trace(trace)
    assert "journal.jsonl" in problem
    assert KV in problem


def test_files_never_read_are_found(trace):
    (trace / "kv" / "notes.txt").write_text("hm")
    other = KV.replace("layer=0", "layer=5")
    (trace / other).parent.mkdir()
    shutil.copy(trace / KV, trace / other)
    relist(trace, other)
    problems = found(trace)
    assert len(problems) == 2
    assert any("notes.txt" in p and "not listed" in p for p in problems)
    assert any("layer=5" in p and "never read" in p for p in problems)


def test_byte_stream_split_is_found(trace):
    rewrite(trace, KV, lambda t: t, column_encoding={"k": "BYTE_STREAM_SPLIT"})
    (problem,) = found(trace)
    assert "'k' is encoded as BYTE_STREAM_SPLIT" in problem


def scaled(column, by, head):
    """The vectors of one q head or kv head times a factor."""

    def change(t):
        heads = t["q_head" if "q_head" in t.column_names else "kv_head"].to_pylist()
        cells = [np.frombuffer(b, np.float16) for b in t[column].to_pylist()]
        return put(
            t,
            column,
            [(narrow(widen(x) * by, "float16") if h == head else x).tobytes() for x, h in zip(cells, heads, strict=True)],
        )

    return change


VALUES = {
    "an output of another scale": (Q, scaled("out", 1.1, 2), ["q head 2", "`out`"]),
    "a query of another scale": (Q, scaled("q", 1.5, 1), ["q head 1", "`lse`"]),
    "a log sum elsewhere": (Q, lambda t: cell(t, "lse", t.num_rows - 1, 90.0), ["q head 3", "`lse`"]),
    "a log sum that is NaN": (Q, lambda t: cell(t, "lse", t.num_rows - 1, np.nan), ["q head 3", "`lse`"]),
    "an output that is NaN": (Q, scaled("out", np.nan, 0), ["q head 0", "`out`"]),
    "k_pre that is k": (KV, lambda t: put(t, "k_pre", t["k"].to_pylist()), ["kv head 0", "`k_pre`"]),
    "masses too large": (PREFILL, lambda t: put(t, "mass", [2 * x for x in t["mass"].to_pylist()]), ["q head 0", "sum to 48", "24"]),
    "counts of queries": (PREFILL, lambda t: put(t, "queries", [24] * t.num_rows), [PREFILL, "queries is 24 at position 1", "23"]),
    "another scale": (LAYERS, lambda t: put(t, "scale", [1.0]), ["q head 0", "`out`"]),
    "another softcap": (LAYERS, lambda t: put(t, "softcap", [2.0]), ["q head 0", "`out`"]),
    "a window that was not": (LAYERS, lambda t: put(t, "window", [4]), ["q head 0", "`out`"]),
    "NaN": (KV, scaled("v", np.nan, 1), [KV, "v holds NaN"]),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_values_that_contradict_each_other_are_found(trace, case):
    name, change, mentions = VALUES[case]
    assert found(trace) == []
    rewrite(trace, name, change)
    assert any(all(m in p for m in mentions) for p in found(trace)), found(trace)


def everything(trace: Trace) -> list[bytes]:
    lanes = [trace.lane(r, layer) for r in trace.requests for layer in trace.captured_layers]
    names = ("k", "v", "k_pre", "steps", "q", "window_q", "mass", "wo_norm", "out", "lse")
    return [repr((trace.dtype, trace.requests, trace.layers)).encode()] + [getattr(x, n).tobytes() for x in lanes for n in names]


def test_no_flipped_byte_passes_the_check_and_changes_the_trace(trace):
    rng, before = np.random.default_rng(0), everything(open_trace(trace))
    passed = 0
    for file in sorted(p for p in trace.rglob("*") if p.is_file()):
        data = file.read_bytes()
        for at in rng.choice(len(data), 12, replace=False):
            file.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.integers(8))]) + data[at + 1 :])
            if list(check_trace(trace)) == []:
                assert everything(open_trace(trace)) == before, (file, at)
                passed += 1
        file.write_bytes(data)
    assert passed < 12  # of 120: a date or a model's name in the manifest, or a position in the journal, may change unseen


def test_a_flipped_byte_is_read_or_refused_but_never_crashes(trace):
    """Without the check too: whatever the bytes, a lane or BadTrace. Most of it in the footer, where the reader is led astray."""
    rng = np.random.default_rng(1)
    for name in (KV, Q, LAYERS):
        data = (trace / name).read_bytes()
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        for at in [*rng.choice(footer, 10, replace=False), *rng.choice(np.arange(footer, len(data)), 60, replace=False)]:
            (trace / name).write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.integers(8))]) + data[at + 1 :])
            with suppress(BadTrace):
                everything(open_trace(trace))
        (trace / name).write_bytes(data)


@pytest.mark.parametrize("what", ["a codec that does not exist", "a type that is not the column's"])
def test_a_footer_that_pyarrow_would_end_the_process_for_is_refused(trace, what):
    data = (trace / KV).read_bytes()
    columns = [c.path_in_schema for c in map(pq.read_metadata(trace / KV).row_group(0).column, range(5))]
    if what.startswith("a codec"):
        places = [
            at for at in range(len(data)) if data[at : at + 3] == b"\x15\x00\x16"
        ]  # field 4 is UNCOMPRESSED; field 5 begins
        at, value = places[columns.index("v") - 10] + 1, 0x7F  # two row groups of five columns end the file
    else:
        places = [at for at in range(len(data)) if data[at : at + 3] == b"\x15\x02\x19"]  # field 1 is INT32; field 2 begins
        at, value = places[-1] + 1, 0x04
    (trace / KV).write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
    code = f"from kvsim.trace.open import open_trace; t = open_trace({str(trace)!r}); t.lane(t.requests[0], t.layers[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    assert "BadTrace" in done.stderr
    assert KV in done.stderr


# ------------------------------------------------------------------------------------------------ info
def test_a_description_says_what_is_there(tmp_path):
    synthesize(tmp_path / "t", layers=3, captured=(0, 2), prompt=64, without=("k_pre",), window_rows=5)
    d = describe(tmp_path / "t")
    json.dumps(d)
    assert (d["trace"], d["dtype"], d["kv_dtype"], d["status"]) == ("t", "float16", "float16", "complete")
    assert [(r["prompt_tokens"], r["total_tokens"], r["decode_steps"], len(r["evidence"])) for r in d["requests"]] == [
        (64, 72, 8, 1)
    ]
    assert [(x["id"], x["captured"], x["q_heads"], x["rope"]) for x in d["layers"]] == [
        (0, True, 4, True),
        (1, False, 4, True),
        (2, True, 4, True),
    ]
    on_disk = {p: p.stat().st_size for p in (tmp_path / "t").rglob("*.parquet")}
    assert d["bytes"] == sum(on_disk.values())
    assert d["bytes_by_table"]["kv"] == sum(n for p, n in on_disk.items() if "/kv/" in str(p))
    supplied = {name: need["supplied"] for name, need in d["needs"].items()}
    assert supplied == {
        "attention": True,
        "window(5)": True,
        "prefill_mass": True,
        "k_pre": False,
        "wo_norm": True,
        "q_stats": False,
        "index": False,
        "all_layers": False,
    }
    assert d["needs"]["k_pre"]["option"] == "--k-pre"
    assert d["needs"]["all_layers"]["option"] == "--layers all"


def test_a_strided_trace_does_not_supply_attention(tmp_path):
    synthesize(tmp_path / "t", stride=2, window_rows=0)
    needs = describe(tmp_path / "t")["needs"]
    assert not needs["attention"]["supplied"]
    assert not needs["window(1)"]["supplied"]


def test_a_manifest_without_source_is_described(trace):
    manifest(trace, source=None, capture=None)
    assert describe(trace)["model"] is None


def test_partial_traces_are_described(trace):
    (trace / "manifest.json").unlink()
    assert describe(trace, allow_partial=True)["status"] == "partial"
