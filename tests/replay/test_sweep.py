"""A sweep makes the run that a replay of each trace would make, byte for byte; it goes on where it stopped, and a failure stops nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.errors import BadTrace, KvsimError, WrongUse
from kvsim.metrics.run import open_run
from kvsim.replay import work
from kvsim.replay.estimate import duration, size
from kvsim.replay.run import replay
from kvsim.replay.study import Study
from kvsim.replay.sweep import sweep
from kvsim.synth.generate import synthesize
from tests.replay.test_resume import Stop
from tests.replay.test_run import same_files

ROOT = Path(__file__).parents[2]
POLICIES = ("quest(read=tokens(24), page=8)", "quest(read=tokens(16), page=8)", "h2o(hold=tokens(30), sinks=2)", "full()")
TASKS = 2 * 2 + 2


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    one = synthesize(folder / "one", requests=2, layers=2, prompt=60, steps=10)
    two = synthesize(folder / "two", seed=1, layers=2, prompt=40, steps=6)
    return Study((str(one.path), str(two.path)), POLICIES, options={"plans": True})


@pytest.fixture(scope="module")
def expected(study, tmp_path_factory):
    """The runs of replays, by name."""
    out = tmp_path_factory.mktemp("replays")
    return {Path(t).name: replay(t, POLICIES, out / Path(t).name, plans=True, workers=1).path for t in study.traces}


def same(runs, expected):
    return [r.path.name for r in runs] == list(expected) and all(same_files(r.path, expected[r.path.name]) for r in runs)


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_are_those_of_replays(study, expected, tmp_path, workers):
    runs = sweep(study, tmp_path / "out", workers=workers)
    assert same(runs, expected)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["one", "study.json", "two"]
    assert len(open_run(runs[0].path).policies) == len(POLICIES)


def test_policies_a_few_at_a_time_where_memory_is_short(study, expected, tmp_path, monkeypatch):
    asked = []
    tables = work.Work._tables
    monkeypatch.setattr(work.Work, "_tables", lambda self, s, x, some: (asked.append(len(some)), tables(self, s, x, some))[1])
    monkeypatch.setattr("kvsim.replay.memory.ROW", 10 << 20)  # a row is so large that the rows of one policy fill it
    runs = sweep(study, tmp_path / "out", workers=1, memory="1GiB")
    assert sum(asked) == TASKS * len(POLICIES)
    assert max(asked) < len(POLICIES)
    assert same(runs, expected)


def test_a_repeated_sweep_has_nothing_to_do(study, tmp_path, monkeypatch):
    out = tmp_path / "out"
    before = sweep(study, out, workers=1)
    made = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    monkeypatch.setattr(work.Work, "do", None)
    told = []
    assert [r.path for r in sweep(study, out, tell=told.append)] == [r.path for r in before]
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == made
    assert told == ["2 of 2 runs are done; no run is missing"]


@pytest.mark.parametrize("tasks", [1, 4, 5])
def test_a_stopped_sweep_goes_on_and_does_nothing_twice(study, expected, tmp_path, monkeypatch, tasks):
    with pytest.raises(Stop):
        sweep(study, tmp_path / "out", workers=1, progress=Stop.at(tasks))
    done = []
    do = work.Work.do
    monkeypatch.setattr(work.Work, "do", lambda self, task: (done.append(task), do(self, task)))
    assert same(sweep(study, tmp_path / "out", workers=1), expected)
    assert len(done) == TASKS - tasks


SCRIPT = """
import os, kvsim
from kvsim.replay.study import Study

def stop(done, tasks):
    if done == 2:
        os.kill(os.getpid(), 9)

kvsim.sweep(Study(*{study!r}, options={{"plans": True}}), {out!r}, workers=2, progress=stop)
"""


def test_a_killed_driver_leaves_what_the_next_one_finishes(study, expected, tmp_path):
    out = tmp_path / "out"
    script = SCRIPT.format(study=(study.traces, study.policies), out=str(out))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert same(sweep(study, out, workers=1), expected)


def test_a_task_that_fails_stops_no_other(study, expected, tmp_path, monkeypatch):
    tables = work.Work._tables

    def failing(self, source, layer, entries):
        if (self.trace.id, source.request.id, layer.id) == ("one", 1, 0):
            raise ValueError("no more")
        return tables(self, source, layer, entries)

    monkeypatch.setattr(work.Work, "_tables", failing)
    told = []
    with pytest.raises(
        KvsimError, match=r"failed: one, request 1, layer 0: ValueError: no more \(1 of 6 tasks\); 1 of 2 runs are whole"
    ):
        sweep(study, tmp_path / "out", workers=1, tell=told.append)
    assert told[1:] == ["failed: one, request 1, layer 0: ValueError: no more"]
    assert same_files(tmp_path / "out" / "two", expected["two"])
    assert len(list((tmp_path / "out" / "one.partial" / "parts").glob("*/part.json"))) == 3
    monkeypatch.undo()
    assert same(sweep(study, tmp_path / "out", workers=1), expected)


def test_an_altered_part_ends_in_no_run(study, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        sweep(study, out, workers=1, progress=Stop.at(5))
    file = next((out / "one.partial" / "parts").glob("request=1,layer=1,*/heads.parquet"))
    file.write_bytes(file.read_bytes()[:-7] + b"\0" + file.read_bytes()[-6:])
    with pytest.raises(BadTrace, match=r"heads\.parquet: cut short or altered; remove .* and repeat"):
        sweep(study, out, workers=1)
    assert not (out / "one").exists()
    shutil.rmtree(file.parent)
    assert len(sweep(study, out, workers=1)) == 2


# ------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"policies": POLICIES[:1]}, "another set of policies"),
        ({"options": {}}, "another plans"),
        ({"options": {"plans": True, "steps": [0]}}, "another requests, layers or steps"),
        ({"traces": 1}, "another set of traces"),
    ],
)
def test_a_folder_of_another_study_is_refused(study, tmp_path, change, told):
    with pytest.raises(Stop):
        sweep(study, tmp_path / "out", workers=1, progress=Stop.at(1))
    given = {"traces": study.traces, "policies": study.policies, "options": study.options} | change
    given["traces"] = study.traces[: given["traces"]] if given["traces"] == 1 else given["traces"]
    with pytest.raises(WrongUse, match=f"belongs to another study, with {told}"):
        sweep(Study(**given), tmp_path / "out", workers=1)


def test_a_folder_of_someone_else_is_refused(study, tmp_path):
    (tmp_path / "thesis").write_text("mine")
    with pytest.raises(WrongUse, match="no sweep that can go on"):
        sweep(study, tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.json").write_text("{")
    with pytest.raises(WrongUse, match="altered"):
        sweep(study, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_tasks": 23}, r"24 replays of a layer \(6 layers of requests, up to 4 policies\), more than 23"),
        ({"memory": "1MiB"}, "alone takes about"),
        ({"workers": 0}, "expected 1 or more"),
    ],
)
def test_what_cannot_be_done_is_refused_before_work_starts(study, tmp_path, options, told):
    with pytest.raises(WrongUse, match=told):
        sweep(study, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_two_traces_of_one_name_are_refused(study, tmp_path):
    shutil.copytree(study.traces[0], tmp_path / "one")
    with pytest.raises(WrongUse, match="a second trace with the name 'one'"):
        sweep(Study((*study.traces, str(tmp_path / "one")), ("full()",)), tmp_path / "out")


def test_a_dry_run_tells_and_does_nothing(study, tmp_path):
    told = []
    assert sweep(study, tmp_path / "out", dry_run=True, workers=2, tell=told.append) == []
    assert len(told) == 1
    assert told[0].startswith("4 policies on 6 layers of 2 traces, 2 workers: about 1 s, 0.3 GiB a worker at most, ")
    assert not (tmp_path / "out").exists()


def test_a_study_json_says_nothing_of_the_machine(study, tmp_path):
    sweep(study, tmp_path / "out", workers=1)
    text = (tmp_path / "out" / "study.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["schema"] == "kvsim.sweep/1"


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (6000, "2 h"), (3 * 86400, "3 days")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("n", "text"), [(0, "0 KiB"), (3 << 20, "3.0 MiB"), (5 << 29, "2.5 GiB")])
def test_sizes_as_told(n, text):
    assert size(n) == text
