"""A Dask cluster does what local workers do, and its workers may die; two processes on this machine stand for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvsim.errors import KvsimError, WrongUse
from kvsim.replay.study import Study
from kvsim.replay.supervise import supervise
from kvsim.replay.sweep import sweep
from tests.replay.test_run import same_files
from tests.replay.test_supervise import Counting, Deadly
from tests.replay.test_sweep import expected, study  # noqa: F401  (fixtures)

pytest.importorskip("distributed")
from kvsim.replay.cluster import Cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """A scheduler and two workers with a nanny each, as a user starts them -> its file."""
    file = tmp_path_factory.mktemp("dask") / "scheduler.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    quiet = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    dask = [str(Path(sys.executable).with_name("dask"))]
    options = ["--scheduler-file", str(file)]
    started = [subprocess.Popen([*dask, "scheduler", *options, "--port", "0", "--no-dashboard"], **quiet)]
    worker = [
        *dask,
        "worker",
        *options,
        "--nworkers",
        "2",
        "--nthreads",
        "1",
        "--no-dashboard",
        "--local-directory",
        str(file.parent),
    ]
    started.append(subprocess.Popen(worker, **quiet))
    yield str(file)
    for process in reversed(started):
        process.send_signal(signal.SIGINT)
    for process in started:
        process.wait(30)


@pytest.fixture
def cluster(scheduler):
    for _ in range(600):
        if Path(scheduler).exists():
            break
        time.sleep(0.1)
    found = Cluster(scheduler)
    yield found
    found.close()


def test_a_sweep_is_the_same_as_here(cluster, scheduler, study, expected, tmp_path):  # noqa: F811
    runs = sweep(study, tmp_path / "out", engine="dask", scheduler=scheduler)
    assert all(same_files(run.path, expected[run.path.name]) for run in runs)


def test_a_bundled_trace_goes_by_its_name(cluster, scheduler, tmp_path):
    [run] = sweep(Study(("smollm2-needle",), ("full()",), options={"layers": [4]}), tmp_path, engine="dask", scheduler=scheduler)
    assert run.path == tmp_path / "smollm2-needle"


SCRIPT = """
import os, kvsim
from kvsim.replay.study import Study

def stop(done, tasks):
    if done == 2:
        os.kill(os.getpid(), 9)

study = Study(*{study!r}, options={{"plans": True}})
kvsim.sweep(study, {out!r}, engine="dask", scheduler={scheduler!r}, progress=stop)
"""


def test_a_driver_that_is_killed_leaves_what_the_next_one_finishes(cluster, scheduler, study, expected, tmp_path):  # noqa: F811
    """The workers live on, and may still be writing what the first one gave them."""
    out = tmp_path / "out"
    script = SCRIPT.format(study=(study.traces, study.policies), out=str(out), scheduler=scheduler)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, check=False)
    assert done.returncode == -signal.SIGKILL
    runs = sweep(study, out, engine="dask", scheduler=scheduler)
    assert all(same_files(run.path, expected[run.path.name]) for run in runs)


def test_one_poison_is_the_only_failure(cluster, tmp_path):
    work = Deadly(tmp_path)
    with cluster.given(work) as engine:
        failures = supervise(engine, range(40), lambda: None, work.name)
    assert [task for task, _ in failures] == [5]
    assert str(failures[0][1]).startswith("task 5: its worker process died")
    assert {int(p.name) for p in tmp_path.iterdir()} == set(range(40)) - {5}


def test_every_library_has_one_thread_in_a_worker(cluster, tmp_path):
    with cluster.given(Counting(tmp_path)) as engine:
        assert supervise(engine, range(4), lambda: None) == []
    said = [p.read_text().split() for p in tmp_path.iterdir()]
    assert {word for words in said for word in words[:2]} == {"1"}  # BLAS, numba


def test_what_a_task_says_comes_back(cluster, tmp_path):
    class Wrong(Deadly):
        pass

    with pytest.raises(WrongUse, match="cannot be sent to another process"), cluster.given(Wrong(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": "ray"}, "engine 'ray': expected local or dask"),
        ({"engine": "dask"}, "needs --scheduler"),
        ({"engine": "dask", "scheduler": "tcp://127.0.0.1:9"}, r"scheduler tcp://127\.0\.0\.1:9: nobody answers"),
        ({"engine": "dask", "scheduler": "nonsense://x"}, "scheduler nonsense://x: nobody answers"),
        ({"engine": "dask", "scheduler": "none.json"}, r"scheduler none\.json: no such file, and no address"),
        ({"engine": "dask", "scheduler": "x", "workers": 2}, "a cluster has its own"),
        ({"scheduler": "tcp://127.0.0.1:9"}, "the local engine has none"),
    ],
)
def test_what_is_refused(study, tmp_path, options, told, monkeypatch):  # noqa: F811
    monkeypatch.setattr("kvsim.replay.cluster.ANSWER", 1)
    with pytest.raises(WrongUse, match=told):
        sweep(study, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_scheduler_without_workers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("kvsim.replay.cluster.ARRIVAL", 1)
    dask = Path(sys.executable).with_name("dask")
    file = tmp_path / "s.json"
    command = [str(dask), "scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    alone = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not file.exists():
            time.sleep(0.1)
        with pytest.raises(WrongUse, match="no worker came within 1 s"):
            Cluster(str(file))
    finally:
        alone.send_signal(signal.SIGINT)
        alone.wait(30)


def test_errors_of_tasks_keep_their_kind(cluster, study, tmp_path, scheduler):  # noqa: F811
    with pytest.raises(KvsimError, match="no such folder"):
        sweep(Study((str(tmp_path / "none"),), ("full()",)), tmp_path / "out", engine="dask", scheduler=scheduler)
