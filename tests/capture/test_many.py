"""Many requests in one trace: written one after the other, gone on with after a crash, added to when complete, sampled."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvsim.capture.check import verify
from kvsim.capture.decode import answer
from kvsim.capture.prompt import CONTEXT, FORCED, FREE, HOLE, QUESTION, Prompt
from kvsim.capture.recorder import Keep
from kvsim.capture.run import capture, capture_all, planned, recording
from kvsim.capture.sample import drawn
from kvsim.capture.session import How
from kvsim.errors import BadTrace, KvsimError, WrongUse
from kvsim.metrics.quality import measures, quality
from kvsim.metrics.run import open_run
from kvsim.replay.run import replay
from kvsim.trace.check import check_trace
from kvsim.trace.open import open_trace
from tests.capture import tiny
from tests.capture.test_writer import spawner  # noqa: F401

HOW = How(steps=8, compression="zstd")


def prompts(n: int, length: int = 24) -> dict[int, Prompt]:
    """Of other lengths and tokens each."""
    return {i: Prompt(tuple(tiny.tokens(length + i, seed=i)), (CONTEXT,) * (length + i), length + i) for i in range(n)}


def content(path: Path) -> dict[str, str]:
    """Every row that a reader sees, by (request, layer): hashes of all arrays."""
    trace, found = open_trace(path), {}
    for r in trace.requests:
        for layer in trace.captured_layers:
            lane = trace.lane(r, layer)
            arrays = (lane.k, lane.v, lane.k_pre, lane.q, lane.out, lane.mass, lane.wo_norm, lane.steps, r.roles)
            found[f"{r.id}/{layer.id}"] = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()
    return found


def rows(path: Path) -> list[dict]:
    return sorted(pq.read_table(path / "requests").to_pylist(), key=lambda r: r["request"])


def run(path: Path, asked: dict[int, Prompt], how: How = HOW, **options) -> list[int]:
    """-> the requests captured."""
    return [r.request for r in capture_all(tiny.model("llama"), asked, path, how, **options)]


# ------------------------------------------------------------------------------------------------ one trace
def test_each_request_is_what_it_is_alone(tmp_path):
    asked = prompts(3)
    assert run(tmp_path / "all", asked) == [0, 1, 2]
    assert list(check_trace(tmp_path / "all")) == []
    for i, p in asked.items():
        run(tmp_path / str(i), {i: p})
        alone = content(tmp_path / str(i))
        assert alone == {k: v for k, v in content(tmp_path / "all").items() if k in alone}
        assert rows(tmp_path / str(i)) == [rows(tmp_path / "all")[i]]
    assert [r["total_tokens"] for r in rows(tmp_path / "all")] == [24 + 8, 25 + 8, 26 + 8]
    model = tiny.model("llama")
    found = verify(tmp_path / "all", model)
    assert [(x.request, x.sound) for x in found] == [(i, True) for i in range(3) for _ in range(2)]
    plan = planned(model, list(asked.values()), how=How(steps=8))
    run(tmp_path / "plain", asked, How(steps=8))
    size = sum(p.stat().st_size for p in (tmp_path / "plain").rglob("*") if p.is_file())
    assert plan.total_bytes == pytest.approx(size, rel=0.35)  # each request is counted with a manifest of its own


def test_a_replay_of_many_is_each_of_them(tmp_path):
    run(tmp_path / "all", prompts(3))
    run(tmp_path / "one", {1: prompts(3)[1]})
    both = [replay(tmp_path / name, "quest(read=tokens(16), page=8)", tmp_path / f"run-{name}") for name in ("all", "one")]
    heads = [x.heads.filter(x.heads["request"] == 1).drop("policy") for x in both]
    assert heads[0].equals(heads[1])
    assert set(both[0].heads["request"]) == {0, 1, 2}


# ------------------------------------------------------------------------------------------------ append
def test_more_requests_are_added_to_a_complete_trace(tmp_path):
    asked = prompts(4)
    run(tmp_path / "once", asked)
    run(tmp_path / "twice", {i: asked[i] for i in (0, 1)})
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "twice/kv").rglob("*.parquet")}
    assert run(tmp_path / "twice", asked, append=True) == [2, 3]
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert content(tmp_path / "twice") == content(tmp_path / "once")
    assert rows(tmp_path / "twice") == rows(tmp_path / "once")
    assert list(check_trace(tmp_path / "twice")) == []
    assert run(tmp_path / "twice", asked, append=True) == []
    assert content(tmp_path / "twice") == content(tmp_path / "once")


def test_own_code_adds_a_request_too(tmp_path):
    model = tiny.model("llama")
    for i in range(2):
        with recording(model, prompts(2)[i], tmp_path / "t", steps=4, append=i > 0) as found:
            import torch

            out = model.generate(torch.tensor([prompts(2)[i].tokens]), max_new_tokens=5, do_sample=False)
            found.tokens, found.mode = out[0].tolist(), "sampled"
    report = capture(model, prompts(3)[2], tmp_path / "t", steps=4, append=True)
    assert report.request == 2
    assert [r.mode for r in open_trace(tmp_path / "t").requests] == ["sampled", "sampled", "greedy"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (How(steps=9, compression="zstd"), "another capture: capture options steps 8 there, 9 now"),
        (How(steps=8, layers=[1]), r"another capture: capture layers \[0, 1\] there, \[1\] now"),
        (How(steps=8, keep=Keep(window_rows=3)), "window_rows 64 there, 3 now"),
        (How(steps=8, keep=Keep(every=2)), "every 1 there, 2 now"),
    ],
)
def test_another_capture_is_not_added(tmp_path, how, words):
    run(tmp_path / "t", prompts(1))
    before = content(tmp_path / "t")
    with pytest.raises(WrongUse, match=words):
        run(tmp_path / "t", prompts(2), how, append=True)
    assert content(tmp_path / "t") == before
    assert list(check_trace(tmp_path / "t")) == []


def test_another_prompt_under_the_same_number_is_told(tmp_path):
    run(tmp_path / "t", prompts(1))
    other = prompts(2)
    with pytest.raises(WrongUse, match="request 0 has another prompt there"):
        run(tmp_path / "t", {0: other[1]}, append=True)
    with pytest.raises(WrongUse, match=r"expected restart \(--restart\) or append"):
        run(tmp_path / "t", other, append=True, restart=True)
    with pytest.raises(WrongUse, match="add requests to a trace with append=True"):
        run(tmp_path / "t", other)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("")
    with pytest.raises(WrongUse, match="there is something already"):
        run(tmp_path / "mine", other, append=True)
    assert list(check_trace(tmp_path / "t")) == []


def test_two_captures_do_not_write_one_trace(tmp_path):
    model = tiny.model("llama")
    reports = capture_all(model, prompts(2), tmp_path / "t", HOW)
    next(reports)
    with pytest.raises(WrongUse, match="another capture is writing there"):
        run(tmp_path / "t", prompts(2), append=True)
    assert [r.request for r in reports] == [1]


def test_a_prompt_longer_than_the_model_is_told_before_it_runs(tmp_path):
    asked = prompts(2) | {2: Prompt(tuple(tiny.tokens(250)), (CONTEXT,) * 250, 250)}
    with pytest.raises(WrongUse, match="make 258 tokens, the model has 256 positions"):
        run(tmp_path / "t", asked)
    assert not list(tmp_path.iterdir())


def test_an_append_that_fails_leaves_the_trace_that_was_there(tmp_path, monkeypatch):
    from kvsim.trace.write import TraceWriter

    write = TraceWriter.q

    def full(self, request, *given):
        if request == 2:
            raise OSError(28, "No space left on device")
        write(self, request, *given)

    run(tmp_path / "t", prompts(1))
    before = content(tmp_path / "t")
    monkeypatch.setattr(TraceWriter, "q", full)
    with pytest.raises(KvsimError, match="No space left"):
        run(tmp_path / "t", prompts(3), append=True)
    assert content(tmp_path / "t") == before
    monkeypatch.undo()
    assert run(tmp_path / "t", prompts(3), append=True) == [2]  # 1 had been finished
    run(tmp_path / "once", prompts(3))
    assert content(tmp_path / "t") == content(tmp_path / "once")
    assert list(check_trace(tmp_path / "t")) == []


# ------------------------------------------------------------------------------------------------ kill -9
def child(path: str, n: int) -> None:
    import torch

    torch.set_num_threads(1)
    list(capture_all(tiny.model("llama"), prompts(n), path, How(steps=12), append=True))


KILLS = int(os.environ.get("KVSIM_KILLS", "6")) // 2


@pytest.mark.parametrize("complete", [False, True])
def test_a_killed_capture_goes_on_with_the_next_request(spawner, tmp_path, complete):  # noqa: F811
    """Killed again and again, each time gone on with: never a half segment, a request twice, or a complete trace lost."""
    rng, path, n, kills = random.Random(11), tmp_path / "t", max(8, KILLS), 0
    if complete:
        run(path, prompts(1), How(steps=12))
    while kills < KILLS:
        process = spawner.Process(target=child, args=(str(path), n))
        process.start()
        lines = count(path)
        target = lines + rng.randrange(1, 16)
        while process.is_alive() and count(path) == lines:  # it sweeps, then writes
            time.sleep(0.002)
        while process.is_alive() and count(path) < target:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        assert_whole(path, complete)
    assert len(list((path / "kv").iterdir())) < n  # killed before the end, or it says nothing
    run(path, prompts(n), How(steps=12), append=True)
    run(tmp_path / "once", prompts(n), How(steps=12))
    assert content(path) == content(tmp_path / "once")
    assert rows(path) == rows(tmp_path / "once")
    assert list(check_trace(path)) == []


def count(path: Path) -> int:
    journal = path / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def assert_whole(path: Path, complete: bool) -> None:
    """Every segment closed is the one listed, none is listed twice, and what opens has whole requests."""
    entries = [json.loads(line) for line in (path / "journal.jsonl").read_bytes().split(b"\n")[:-1]]
    names = [e["path"] for e in entries]
    assert len(names) == len(set(names))
    for entry in entries:
        file = path / entry["path"]
        if file.exists() or not entry["path"].startswith("requests/"):
            assert hashlib.sha256(file.read_bytes()).hexdigest() == entry["sha256"]
            assert pq.read_table(file, partitioning=None).num_rows == entry["rows"]
    if complete:
        assert 0 in [r.id for r in open_trace(path).requests]
        return
    if (path / "manifest.json").exists():
        return
    if not any(name.startswith("requests/") for name in names) or not whole_prompts(names):
        with pytest.raises(BadTrace, match=r"no request|is missing"):
            open_trace(path, allow_partial=True)
        return
    trace = open_trace(path, allow_partial=True)
    for r in trace.requests:
        lane = trace.lane(r, trace.captured_layers[-1])
        assert lane.k.shape[1] == r.total >= r.prompt


def whole_prompts(names: list[str]) -> int:
    """Requests whose two layers have keys and queries."""
    folders = {name.rsplit("/", 1)[0] for name in names}
    return sum({f"{t}/request={i}/layer={n}" for t in ("kv", "q") for n in (0, 1)} <= folders for i in range(60))


def limited(path: str, most: int) -> None:
    """Adds requests with files of at most `most` bytes: what a full disk looks like; exits 0 when refused in one line."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        run(Path(path), prompts(1) | {1: prompts(1, length=200)[0]}, How(steps=12), append=True)
    except KvsimError as e:
        os._exit(0 if "File too large" in str(e) and "\n" not in str(e) else 1)
    os._exit(2)


@pytest.mark.parametrize("complete", [False, True])
def test_a_disk_that_fills_leaves_nothing_half_written(spawner, tmp_path, complete):  # noqa: F811
    path = tmp_path / "t"
    if complete:
        run(path, prompts(1), How(steps=12))
    before = content(path) if complete else {}
    process = spawner.Process(target=limited, args=(str(path), 20_000))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert not list(path.rglob("*.tmp"))
    for file in path.rglob("*.parquet"):
        pq.read_table(file, partitioning=None)
    if complete:
        assert content(path) == before
    else:
        assert [r.id for r in open_trace(path, allow_partial=True).requests] == [0]


# ------------------------------------------------------------------------------------------------ turns
def test_the_model_fills_the_holes_of_a_prompt(tmp_path):
    model, ids = tiny.model("llama"), tiny.tokens(40)
    tokens = (*ids[:20], *ids[20:25], *[HOLE] * 6, *ids[25:30])
    roles = (*[CONTEXT] * 20, *[QUESTION] * 5, *[FREE] * 6, *[QUESTION] * 5)
    report = capture(model, Prompt(tokens, roles, 20), tmp_path / "t", steps=20)
    alone = tiny.generated(model, list(ids[:25]), 6)
    assert report.tokens[25:31] == tuple(alone)
    assert report.tokens[31:36] == tokens[31:36]
    assert report.tokens[36:] == tuple(tiny.generated(model, list(report.tokens[:36]), 4))
    row = rows(tmp_path / "t")[0]
    assert (HOLE in row["token_ids"], row["roles"][25:31]) == (False, [FREE] * 6)
    assert all(x.sound for x in verify(tmp_path / "t", model))


def test_what_is_scored_is_what_was_said_last():
    class Letters:
        def decode(self, ids, skip_special_tokens):
            return " ".join(map(str, ids))

    p = Prompt((1, 2, HOLE, 4), (CONTEXT, QUESTION, FREE, QUESTION), 1, answers=("7",))
    assert answer(p, [1, 2, 7, 4, 8], Letters()) == {"said": "8", "score": 0, "solved": False}
    assert answer(p, [1, 2, 8, 4, 7], Letters()) == {"said": "7", "score": 1, "solved": True}


# ------------------------------------------------------------------------------------------------ samples
def test_a_sample_is_drawn_one_by_one():
    many = drawn(range(10_000), 0.01, seed=3)
    assert 70 < len(many) < 130
    assert drawn(range(4_000), 0.01, seed=3) == [i for i in many if i < 4_000]
    assert set(drawn(range(10_000), 0.05, seed=3)) > set(many)
    assert drawn(range(50), 1) == list(range(50))
    assert set(drawn(range(10_000), 0.01, seed=4)) != set(many)
    for rate in (0, -1, 1.5, float("nan")):
        with pytest.raises(WrongUse, match="expected a part of the requests"):
            drawn(range(3), rate)


def test_a_request_ends_with_its_text_or_at_the_most(tmp_path):
    model, ids = tiny.model("llama"), prompts(1)[0]
    free = tiny.generated(model, list(ids.tokens), 30)
    end = free[9]
    model.generation_config.eos_token_id = end
    first = free.index(end)
    [short] = capture_all(model, {0: ids}, tmp_path / "short", How(most=64))
    assert (short.tokens[-1], short.steps) == (end, first + 1)
    [most] = capture_all(model, {0: ids}, tmp_path / "most", How(most=first))
    assert most.steps == first
    long = Prompt(ids.tokens + tuple(tiny.tokens(9)), ids.roles + (FORCED,) * 9, ids.prefill)
    [cut] = capture_all(model, {0: long}, tmp_path / "cut", How(most=5))
    assert (cut.steps, cut.tokens) == (5, long.tokens[: ids.prefill + 5])
    assert [r.total - r.prompt for r in open_trace(tmp_path / "short").requests] == [first + 1]


def test_sampled_steps_are_those_of_the_whole(tmp_path):
    """K and V of all steps, queries of one in three: what a replay measures at these is what it measures with all of them."""
    asked = prompts(2)
    run(tmp_path / "all", asked, How(steps=20))
    run(tmp_path / "some", asked, How(steps=20, keep=Keep(every=3)))
    lanes = [open_trace(tmp_path / name).lane(*first(tmp_path / name)) for name in ("all", "some")]
    steps = list(range(0, 20, 3))
    assert lanes[1].steps.tolist() == steps
    assert (lanes[1].k == lanes[0].k).all()
    assert (lanes[1].q == lanes[0].q[::3]).all()
    policy = "quest(read=tokens(16), page=8)"
    some = replay(tmp_path / "some", policy, tmp_path / "run-some")
    whole = replay(tmp_path / "all", policy, tmp_path / "run-all", steps=steps)
    assert some.heads.drop("read_churn").equals(whole.heads.drop("read_churn"))
    assert some.heads["read_churn"].null_count() == len(some.heads)  # of steps in turn only
    assert some.ledger.equals(whole.ledger)
    assert list(check_trace(tmp_path / "some")) == []
    assert all(x.sound for x in verify(tmp_path / "some", tiny.model("llama")))
    for stateful in ("h2o(hold=tokens(16))", "quest(read=tokens(16), page=8, refresh=2)"):
        with pytest.raises(WrongUse, match="the steps captured have gaps"):
            replay(tmp_path / "some", stateful, tmp_path / "no")


def first(path: Path):
    trace = open_trace(path)
    return trace.requests[0], trace.captured_layers[0]


def test_equal_weights_change_no_number(tmp_path):
    """Every row of a sample stands for as many others, so a mean or a ratio of sums over weighted rows is the one over plain rows."""
    run(tmp_path / "t", prompts(2), How(steps=12, keep=Keep(every=2)))
    heads = open_run(replay(tmp_path / "t", "quest(read=tokens(16), page=8)", tmp_path / "run").path).heads.collect()
    import polars as pl

    weighted = pl.concat([heads] * 2)  # each row twice
    a, b = (quality(x.lazy(), "layer").drop("rows") for x in (heads, weighted))
    for name in a.columns[2:]:
        assert a[name].to_list() == pytest.approx(b[name].to_list())
    assert measures(heads.lazy()).collect().height == 1


def test_the_manifest_tells_what_was_sampled(tmp_path):
    how = How(steps=8, layers=[1], keep=Keep(every=4), most=8, sampled={"rate": 0.5, "seed": 3})
    run(tmp_path / "t", prompts(1), how)
    told = json.loads((tmp_path / "t/manifest.json").read_text())["capture"]
    assert told["requests_sampled"] == {"rate": 0.5, "seed": 3}
    assert (told["layers"], told["heads"], told["steps"], told["options"]["max_steps"]) == ([1], "all", "1 of 4", 8)
