"""Writing behind the model: in order, never lost in silence, and whatever stops it leaves what was closed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from kvsim.capture.recorder import Keep
from kvsim.capture.run import capture, planned
from kvsim.capture.writer import ROOM, Writer
from kvsim.errors import BadTrace, KvsimError
from kvsim.trace.open import open_trace
from kvsim.trace.write import TraceWriter
from tests.capture import tiny

IDS = tiny.tokens(30)


class Slow:
    """A TraceWriter in what a Writer asks of it; its n-th segment may fail."""

    path = Path("trace")

    def __init__(self, fails_at: int | None = None) -> None:
        self.written: list[int] = []
        self.fails_at = fails_at

    def kv(self, n: int) -> None:
        if n == self.fails_at:
            raise OSError(28, "No space left on device")
        time.sleep(0.002)
        self.written.append(n)


def test_all_is_written_in_order():
    trace = Slow()
    writer = Writer(trace)
    for n in range(3 * ROOM):
        writer.put("kv", n)
    writer.close()
    assert trace.written == list(range(3 * ROOM))
    assert writer.stalled_seconds > 0  # the queue was full for most of the time


def test_an_error_reaches_the_caller_and_nobody_waits_for_ever():
    trace = Slow(fails_at=2)
    writer = Writer(trace)

    def puts() -> None:
        for n in range(100 * ROOM):
            writer.put("kv", n)

    with pytest.raises(KvsimError, match=r"trace: writing failed .*No space left on device.*allow_partial"):
        puts()
    with pytest.raises(KvsimError, match="No space left"):
        writer.close()
    assert trace.written == [0, 1]  # nothing after a hole


def test_what_was_put_is_there_after_a_drain():
    slow = Slow()
    writer = Writer(slow)
    for n in range(5):
        writer.put("kv", n)
    writer.drain()
    assert slow.written == list(range(5))
    writer.put("kv", 5)
    writer.close()
    assert slow.written == list(range(6))
    writer = Writer(Slow(fails_at=1))
    for n in range(3):
        writer.put("kv", n)
    with pytest.raises(KvsimError, match="writing failed"):
        writer.drain()
    writer.abandon()


def test_an_error_in_the_last_segment_is_raised_at_the_end():
    writer = Writer(Slow(fails_at=0))
    writer.put("kv", 0)
    with pytest.raises(KvsimError, match="No space left"):
        writer.close()


def test_a_disk_that_fills_in_mid_capture(tmp_path, monkeypatch):
    model, write = tiny.model("llama"), TraceWriter.kv

    def kv(self: TraceWriter, request: int, layer: int, pos0: int, *rows: Any) -> None:
        if pos0 >= 30 + 64:
            raise OSError(28, "No space left on device")
        write(self, request, layer, pos0, *rows)

    monkeypatch.setattr(TraceWriter, "kv", kv)
    with pytest.raises(KvsimError, match="No space left on device") as e:
        capture(model, IDS, tmp_path / "t", steps=130)
    assert "\n" not in str(e.value)
    assert_partial(tmp_path / "t")
    assert open_trace(tmp_path / "t", allow_partial=True).requests[0].total == 30 + 64


def test_a_disk_that_is_too_small_is_told_before(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(KvsimError, match=r"takes [\d,]+ bytes and the disk has 1,000 left"):
        capture(tiny.model("llama"), IDS, tmp_path / "t")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_the_estimate_is_what_it_takes(family, chunk, tmp_path):
    model, latent = tiny.model(family), family.startswith("deepseek")
    for name, keep in {"all": Keep(k_pre=not latent, q_stats=not latent), "least": Keep(0, False, False, False)}.items():
        plan = planned(model, IDS, steps=70, keep=keep, chunk=chunk)
        options = {
            "window_rows": keep.window_rows,
            "prefill_mass": keep.prefill_mass,
            "k_pre": keep.k_pre,
            "wo_norm": keep.wo_norm,
            "q_stats": keep.q_stats,
        }
        report = capture(model, IDS, tmp_path / name, steps=70, chunk=chunk, **options)
        assert plan.total_bytes == pytest.approx(report.bytes, rel=0.03)
        for table in ("kv", "index_k", "index_q") if family == "deepseek_v32" else ("kv",):
            on_disk = sum(p.stat().st_size for p in (tmp_path / name / table).rglob("*.parquet"))
            assert plan.bytes[table] == pytest.approx(on_disk, rel=0.01 if table == "kv" else 0.05)


# ------------------------------------------------------------------------------------------------ kill -9
def assert_partial(path: Path) -> None:
    """Every segment of the journal is whole; the trace opens as a partial one or not at all."""
    entries = [json.loads(line) for line in (path / "journal.jsonl").read_bytes().split(b"\n")[:-1]]
    for entry in entries:
        content = (path / entry["path"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert pq.read_table(path / entry["path"], partitioning=None).num_rows == entry["rows"]
    with pytest.raises(BadTrace, match=r"partial|not a trace"):
        open_trace(path)
    prompts = {Path(e["path"]).parent for e in entries if e["path"].startswith(("kv", "q"))}
    if len(prompts) < 4:  # killed before both layers had theirs
        with pytest.raises(BadTrace, match=r"no request has its whole prompt|is missing"):
            open_trace(path, allow_partial=True)
        return
    trace = open_trace(path, allow_partial=True)
    for layer in trace.captured_layers:
        lane = trace.lane(trace.requests[0], layer)
        assert lane.k.shape[1] == trace.requests[0].total >= 30


def child(path: str) -> None:
    """Captures for as long as it lives."""
    import torch

    torch.set_num_threads(1)
    capture(tiny.model("llama", max_position_embeddings=100_000), IDS, path, steps=50_000)


def limited(path: str, most: int) -> None:
    """Captures with files of at most `most` bytes: what a full disk looks like; exits 0 when refused in one line."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        capture(tiny.model("llama"), IDS, path, steps=200)
    except KvsimError as e:
        os._exit(0 if "File too large" in str(e) and "\n" not in str(e) else 1)
    os._exit(2)


@pytest.fixture(scope="module")
def spawner():
    """Children that share one import of torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "pyarrow.parquet", "pytest"])
    return context


def test_kill_9_leaves_every_closed_segment(spawner, tmp_path):
    rng = random.Random(7)
    for n in range(4):
        path = tmp_path / str(n)
        process = spawner.Process(target=child, args=(str(path),))
        process.start()
        while not (path / "journal.jsonl").exists():
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.6))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert_partial(path)


def test_a_file_that_may_not_grow(spawner, tmp_path):
    process = spawner.Process(target=limited, args=(str(tmp_path / "t"), 10_000))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert_partial(tmp_path / "t")
