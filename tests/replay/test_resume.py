"""A replay that stopped goes on, and ends in the same bytes; a directory that belongs to another one is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvsim
from kvsim.errors import BrokenLaw, WrongUse
from kvsim.replay import laws, work
from kvsim.replay.folder import Draft
from kvsim.replay.run import replay
from tests.replay.conftest import POLICIES as ALL
from tests.replay.test_run import same_files

ROOT = Path(__file__).parents[2]
POLICIES = ALL[:1] + ALL[2:3]
QUEST = POLICIES[0]


@pytest.fixture(scope="module")
def run(trace, tmp_path_factory):
    return replay(trace, POLICIES, tmp_path_factory.mktemp("runs") / "run", plans=True, workers=1)


class Stop(KeyboardInterrupt):
    """As Ctrl-C, when the second task is done."""

    @classmethod
    def at(cls, tasks):
        def progress(done, many):
            if done == tasks:
                raise cls

        return progress


def stopped(trace, out, policies=POLICIES, tasks=2, **options):
    with pytest.raises(Stop):
        replay(trace, policies, out, workers=1, progress=Stop.at(tasks), **options)
    assert not out.exists()


SCRIPT = """
import multiprocessing, os, kvsim
print("begun", flush=True)

def stop(done, tasks):
    if done == 2:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), 9)

kvsim.replay({trace!r}, {policies!r}, {out!r}, plans=True, workers=2, progress=stop)
"""


def test_a_run_killed_with_9_ends_its_workers_and_goes_on_to_the_same_bytes(trace, run, tmp_path):
    """By a script without a main guard, whose top level a worker must not run again."""
    out = tmp_path / "run"
    (tmp_path / "script.py").write_text(SCRIPT.format(trace=str(trace.path), policies=POLICIES, out=str(out)))
    with (tmp_path / "said").open("w") as said:  # a pipe would stay open as long as the workers
        command = [sys.executable, str(tmp_path / "script.py")]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, stdout=said, stderr=said, check=False)
    assert done.returncode == -signal.SIGKILL
    begun, *lines = (tmp_path / "said").read_text().splitlines()
    workers = [int(pid) for pid in lines[0].split()]
    assert (begun, len(workers)) == ("begun", 2)
    assert "begun" not in lines
    for _ in range(500):
        if not any(map(alive, workers)):
            break
        time.sleep(0.02)
    else:
        pytest.fail("the workers outlive the process that started them")
    assert not out.exists()
    created = json.loads((tmp_path / "run.partial" / "begun.json").read_text())["created"]
    again = replay(trace, POLICIES, out, plans=True, workers=1)
    assert same_files(again.path, run.path)
    assert again.info["created"] == created
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "said", "script.py"]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] if Path("/proc/self/stat").exists() else True


def test_what_is_finished_is_not_done_again(trace, tmp_path, monkeypatch):
    stopped(trace, tmp_path / "run")
    done = []
    do = work.Work.do
    monkeypatch.setattr(work.Work, "do", lambda self, task: (done.append(task), do(self, task)))
    replay(trace, POLICIES, tmp_path / "run", workers=1)
    assert done == [(1, 0), (1, 1)]


def test_an_unfinished_part_is_done_again(trace, run, tmp_path):
    stopped(trace, tmp_path / "run", plans=True)
    [part] = (tmp_path / "run.partial" / "parts").glob("request=0,layer=1,*")
    (part / "part.json").unlink()
    (part / "heads.parquet").rename(part / ".heads.parquet.123")
    assert same_files(replay(trace, POLICIES, tmp_path / "run", plans=True, workers=1).path, run.path)


def test_an_interrupt_before_anything_is_finished_leaves_nothing(trace, tmp_path):
    stopped(trace, tmp_path / "run", tasks=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"policies": [QUEST]}, "set of policies"),
        ({"baselines": True}, "set of policies"),
        ({"steps": [1, 2]}, "--steps"),
        ({"layers": [0]}, "--layers"),
        ({"requests": [0]}, "--requests"),
        ({"plans": True}, "--plans"),
        ({"allocator": "layer"}, "--allocator"),
        ({"kv_dtype": "float32"}, "--kv-dtype"),
    ],
)
def test_another_replay_is_refused_with_what_differs(trace, tmp_path, change, told):
    stopped(trace, tmp_path / "run")
    options = {"policies": POLICIES} | change
    with pytest.raises(WrongUse, match=rf"run\.partial: begun with another {told}[^,]*; .*another -o, or remove it"):
        replay(trace, options.pop("policies"), tmp_path / "run", **options)
    assert len(list((tmp_path / "run.partial" / "parts").iterdir())) == 2


def test_another_version_is_refused(trace, tmp_path, monkeypatch):
    stopped(trace, tmp_path / "run")
    begun = tmp_path / "run.partial" / "begun.json"
    begun.write_text(begun.read_text().replace(f'"kvsim": "{kvsim.__version__}"', '"kvsim": "0.0.9"'))
    with pytest.raises(WrongUse, match="another version of kvsim"):
        replay(trace, POLICIES, tmp_path / "run")


def test_an_edited_policy_file_is_another_policy(trace, tmp_path):
    file = tmp_path / "newest.py"
    source = Path(__file__).with_name("last_few.py").read_text().replace("last_few", "newest")
    file.write_text(source)
    kvsim.policies.language.load_file(file)
    stopped(trace, tmp_path / "run", "newest(hold=tokens(9))")
    file.write_text(source + "\n")
    with pytest.raises(WrongUse, match="another set of policies"):
        replay(trace, "newest(hold=tokens(9))", tmp_path / "run")


@pytest.mark.parametrize("content", ["", "[]", '{"schema"'])
def test_an_altered_beginning_is_refused(trace, tmp_path, content):
    stopped(trace, tmp_path / "run")
    (tmp_path / "run.partial" / "begun.json").write_text(content)
    with pytest.raises(WrongUse, match=r"begun\.json: altered"):
        replay(trace, POLICIES, tmp_path / "run")


def test_a_folder_of_someone_else_is_left_alone(trace, tmp_path):
    (tmp_path / "run.partial").mkdir()
    (tmp_path / "run.partial" / "thesis").write_text("mine")
    with pytest.raises(WrongUse, match="not a replay that can go on"):
        replay(trace, POLICIES, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run.partial").iterdir()] == ["thesis"]


def test_two_replays_do_not_write_one_run(trace, tmp_path):
    with Draft(tmp_path / "run", {}), pytest.raises(WrongUse, match="another replay is writing it"):
        replay(trace, POLICIES, tmp_path / "run")


def test_strict_checks_what_was_finished_before(trace, tmp_path, monkeypatch):
    stopped(trace, tmp_path / "run", tasks=4)
    monkeypatch.setattr(laws, "MASS", -1.0)
    with pytest.raises(BrokenLaw, match="sum to 1"):
        replay(trace, POLICIES, tmp_path / "run", strict=True)
