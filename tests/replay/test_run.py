"""The same rows, whatever the workers, the steps and the company; a directory that is whole or not there."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

import kvsim
from kvsim.errors import BadTrace, KvsimError, WrongUse
from kvsim.policies.language import load_file, parse
from kvsim.replay.run import replay
from kvsim.tables import RUN_TABLES
from tests.replay.conftest import POLICIES

LAST_FEW = Path(__file__).with_name("last_few.py")
ROWS = ("ledger", "heads", "plans", "tiers", "events")  # curves are over the steps written
QUEST, H2O = POLICIES[0], POLICIES[2]


def same_files(a: Path, b: Path) -> bool:
    names = sorted(p.name for p in a.iterdir())
    tables = [n for n in names if n.endswith(".parquet")]
    return names == sorted(p.name for p in b.iterdir()) and all((a / n).read_bytes() == (b / n).read_bytes() for n in tables)


def rows(run, table, policy):
    """The rows of one policy, its name apart."""
    return run.scan(table).filter(pl.col("policy").cast(str) == parse_id(policy)).drop("policy").collect()


def parse_id(policy):
    from kvsim.policies.language import parse_policy

    return parse_policy(policy).id


# ------------------------------------------------------------------------------------------------ the same rows
def test_two_workers_write_the_same_bytes_also_with_a_policy_file(trace, tmp_path):
    load_file(LAST_FEW)
    policies = [*POLICIES, "last_few(hold=tokens(9))"]
    one, two = (replay(trace, policies, tmp_path / f"{n}", plans=True, workers=n) for n in (1, 2))
    assert same_files(one.path, two.path)
    assert one.ledger.height == 7 * 2 * 2 * 2 * 10  # policies, requests, layers, kv heads, steps


@pytest.mark.parametrize("steps", [[4], [0, 3, 9]])
def test_chosen_steps_are_the_rows_of_the_full_run(trace, run, steps):
    some = replay(trace, POLICIES, steps=steps, plans=True, workers=1)
    for table in ROWS:
        full = run.scan(table).filter(pl.col("step").is_in([-1, *steps])).collect()
        assert_frame_equal(getattr(some, table), full, check_exact=True)


@pytest.mark.parametrize("policy", [QUEST, H2O, POLICIES[5]])
def test_a_policy_alone_has_the_rows_it_has_in_company(trace, run, policy):
    alone = replay(trace, policy, plans=True, workers=1)
    for table in RUN_TABLES:
        assert_frame_equal(rows(alone, table, policy), rows(run, table, policy), check_exact=True)


def test_one_layer_of_one_request_is_a_part_of_all(trace, run):
    part = replay(trace, QUEST, layers=[1], requests=[1], workers=1)
    full = rows(run, "heads", QUEST).filter(pl.col("layer") == 1, pl.col("request") == 1)
    assert_frame_equal(part.heads.drop("policy"), full, check_exact=True)


def test_rows_stand_by_policy_as_asked_then_request_then_layer(run):
    order = run.ledger.select("policy", "request", "layer").unique(maintain_order=True)
    ids = [parse_id(p) for p in POLICIES]
    assert order.rows() == [(p, r, layer) for p in ids for r in (0, 1) for layer in (0, 1)]


def test_tables_have_the_columns_of_their_schemas(run):
    written = {file.stem for file in run.path.glob("*.parquet")}
    assert written == {"ledger", "heads", "curves", "plans", "tiers", "events", "evidence", "reuse"}
    for name in written:
        assert pq.read_schema(run.path / f"{name}.parquet").equals(RUN_TABLES[name]), name


# ------------------------------------------------------------------------------------------------ what is asked
def test_a_policy_given_twice_is_replayed_once(trace):
    run = replay(trace, [QUEST, parse(QUEST), "full() >> " + QUEST], workers=1)
    assert [p["id"] for p in run.info["policies"]] == [parse_id(QUEST)]
    assert run.ledger.height == 2 * 2 * 2 * 10


def test_full_attention_misses_nothing_and_is_billed_whole(trace):
    run = replay(trace, "full()", workers=1)
    assert (run.heads["mass_recall"] - 1).abs().max() < 1e-6
    assert run.heads["rel_l2"].max() == 0
    assert (run.ledger["read_bytes"] == run.ledger["visible_tokens"] * 64).all()  # 16 + 16 numbers of 2 bytes
    assert (run.ledger["host_tokens"] == 0).all()
    assert run.curves.is_empty()
    assert run.plans.is_empty()


def test_the_billing_dtype_changes_bytes_alone(trace, run):
    wide = replay(trace, QUEST, kv_dtype="float32", workers=1)
    ledger = rows(run, "ledger", QUEST)
    assert (wide.ledger["read_bytes"] == ledger["read_bytes"] * 2).all()
    assert (wide.ledger["read_tokens"] == ledger["read_tokens"]).all()
    assert (wide.info["kv_dtype"], run.info["kv_dtype"]) == ("float32", "float16")


def test_a_policy_file_gives_layers_and_heads_their_own(trace, run, tmp_path):
    (tmp_path / "mix.toml").write_text(
        f'default = "{QUEST}"\n[layers]\n"1" = "{POLICIES[4]}"\n[heads.0]\n"1" = "{POLICIES[4]}"\n'
    )
    mix = replay(trace, f"@{tmp_path / 'mix.toml'}", workers=1)
    assert mix.info["policies"][0]["name"] == "mix"
    read, stream = (rows(run, "ledger", p) for p in (QUEST, POLICIES[4]))
    streams = (pl.col("layer") == 1) | (pl.col("kv_head") == 1)
    expected = pl.concat([read.filter(~streams), stream.filter(streams)]).sort("request", "layer", "kv_head", "step")
    assert_frame_equal(mix.ledger.drop("policy").sort("request", "layer", "kv_head", "step"), expected, check_exact=True)
    assert mix.ledger.height == run.ledger.height // len(POLICIES)


def test_without_a_name_the_run_lives_as_long_as_it_is_held(trace):
    run = replay(trace, "full()", workers=1)
    path = run.path
    assert path.is_dir()
    del run
    assert not path.exists()


def test_run_json_tells_what_was_replayed_and_nothing_of_the_machine(trace, run):
    text = (run.path / "run.json").read_text()
    about = json.loads(text)
    assert about == run.info
    assert about["schema"] == "kvsim.run/1"
    assert about["open_loop"] is True
    assert about["kvsim"] == kvsim.__version__
    assert about["trace"]["sha256"] == trace.sha256
    assert about["trace"]["source"]["model"] == "synthetic"
    assert "config" not in about["trace"]["source"]
    assert [p["role"] for p in about["policies"]] == ["asked"] * len(POLICIES)
    assert about["layers"][0]["row_bytes"] == 64
    first = about["requests"][0]
    assert (first["prompt_tokens"], first["total_tokens"], first["mode"], first["steps"]) == (60, 70, "synthetic", 10)
    assert {s["kind"] for s in first["spans"]} == {"evidence", "other"}
    for private in (os.uname().nodename, os.environ.get("HOME", "/root"), str(trace.path.parent)):
        assert private not in text


def test_run_json_differs_by_its_date_alone(trace, run, tmp_path):
    again = replay(trace, POLICIES, tmp_path / "again", plans=True, workers=1)
    assert {k for k in again.info if again.info[k] != run.info[k]} <= {"created"}


def test_progress_counts_the_tasks(trace):
    seen = []
    replay(trace, "full()", workers=1, progress=lambda done, tasks: seen.append((done, tasks)))
    assert seen == [(n, 4) for n in range(5)]


# ------------------------------------------------------------------------------------------------ refused, nothing left
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": [0, 7]}, "layers 7 captured the layers 0-1"),
        ({"requests": [5]}, "requests 5 captured the requests 0-1"),
        ({"steps": [3, 10, 11]}, "steps 10-11 captured the steps 0-9"),
        ({"layers": []}, "no layers 0-1"),
        ({"kv_dtype": "int4"}, "int4 bfloat16"),
        ({"allocator": "page"}, "allocator 'page' 'head' 'layer'"),
        ({"workers": 0}, "workers 0 1 or more"),
        ({"memory": "lots"}, "memory 'lots' 8GiB"),
        ({"memory": 1000}, "memory request 0 layer 0 GiB"),
        ({"policies": []}, "no policy"),
        ({"policies": "qest(read=tokens(8))"}, "qest 'quest'"),
        ({"policies": "streaming_llm(hold=share(0.01))"}, "streaming_llm hold= layer 0"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(trace, tmp_path, options, words):
    policies = options.pop("policies", QUEST) if "policies" in options else QUEST
    with pytest.raises(WrongUse) as refusal:
        replay(trace, policies, tmp_path / "new" / "run", **options)
    assert "\n" not in str(refusal.value)
    assert not [w for w in words.split() if w not in str(refusal.value)]
    assert not list(tmp_path.rglob("*run*"))


def test_what_exists_is_never_overwritten(trace, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("mine")
    with pytest.raises(WrongUse, match=r"exists already.*another -o"):
        replay(trace, QUEST, tmp_path / "run")
    assert (tmp_path / "run" / "mine").read_text() == "mine"


def test_a_bad_trace_leaves_nothing(tmp_path):
    with pytest.raises(BadTrace, match="no such folder"):
        replay(tmp_path / "none", QUEST, tmp_path / "run")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ failures
def test_a_policy_that_fails_is_named_with_its_line(trace, tmp_path):
    load_file(LAST_FEW)
    with pytest.raises(
        KvsimError, match=r"request 0, layer 0: last_few \(last_few.py, line 22\): ValueError: no more \(and 3 more"
    ):
        replay(trace, "last_few(hold=tokens(9), fails=True)", tmp_path / "run", workers=1)
    assert not list(tmp_path.iterdir())


def test_a_failed_task_leaves_the_others(trace, tmp_path):
    load_file(LAST_FEW)
    policy = kvsim.per_layer({1: "last_few(hold=tokens(9), fails=True)"}, default="full()")
    with pytest.raises(
        KvsimError, match=r"request 0, layer 1: .*\(and 1 more of 4 tasks failed\); the 2 finished tasks are kept"
    ):
        replay(trace, policy, tmp_path / "run", workers=1)
    assert [p.name for p in tmp_path.iterdir()] == ["run.partial"]
    kept = (tmp_path / "run.partial" / "parts").iterdir()
    assert sorted(p.name.rpartition(",")[0] for p in kept) == ["request=0,layer=0", "request=1,layer=0"]


class Dying(ThreadPoolExecutor):
    """A pool whose workers die of layer 1."""

    def __init__(self, *args):
        super().__init__(1)

    def submit(self, call, what, task):
        future = Future()
        if task[1] == 1:
            future.set_exception(BrokenProcessPool("a child process terminated abruptly"))
        else:
            future.set_result(self.work.do(task))
        return future


def test_a_worker_that_dies_leaves_what_was_finished(trace, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsim.replay.pool.ProcessPoolExecutor", Dying)
    monkeypatch.setattr("kvsim.replay.pool.packed", lambda work: setattr(Dying, "work", work))
    with pytest.raises(
        KvsimError,
        match=r"request 0, layer 1: its worker process died each time.*\(and 1 more of 4 tasks failed\); the 2 finished tasks are kept",
    ):
        replay(trace, QUEST, tmp_path / "run", workers=2)
    monkeypatch.undo()
    assert replay(trace, QUEST, tmp_path / "run", workers=1).ledger.height == 2 * 2 * 2 * 10
