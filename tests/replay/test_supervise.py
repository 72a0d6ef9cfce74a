"""Every task once, whoever dies: innocents are done, a poison is found by name, and an engine that cannot work is not tried for ever."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kvsim.errors import KvsimError
from kvsim.replay.pool import Pool, do_all
from kvsim.replay.supervise import supervise


class Crash(Exception):
    pass


class Engine:
    """Futures that are done at once. A poison takes all that is out with it, or with `alone` only itself, as a cluster does."""

    workers, crash, tries = 2, (Crash,), 3

    def __init__(self, poison=(), wrong=(), accidents=0, alone=False):
        self.poison, self.wrong, self.accidents, self.alone = set(poison), set(wrong), accidents, alone
        self.random = random.Random(0)
        self.done, self.tried, self.most, self.renewed = Counter(), Counter(), 0, 0
        self.held = []  # given out together, decided together

    def submit(self, task):
        future = Future()
        self.tried[task] += 1
        self.held.append((task, future))
        self.most = max(self.most, len(self.held))
        return future

    def renew(self):
        self.renewed += 1

    def decide(self):
        """What happens while the driver waits."""
        held, self.held = self.held, []
        accident = self.random.random() < 0.3 and self.accidents > 0
        self.accidents -= accident
        broken = accident or any(task in self.poison for task, _ in held)
        for i, (task, future) in enumerate(held):
            first = i == 0 and self.random.random() < 0.5 and task not in self.poison  # was done before the others were lost
            if task in self.poison or (broken and not self.alone and not first):
                future.set_exception(Crash())
            elif task in self.wrong:
                future.set_exception(KvsimError(f"{task} is wrong"))
            else:
                self.done[task] += 1
                future.set_result(None)


@pytest.fixture
def drive(monkeypatch):
    def run(engine, tasks):
        from concurrent.futures import wait

        def decided(futures, timeout, return_when):
            engine.decide()
            return wait(futures, timeout, return_when)

        monkeypatch.setattr("kvsim.replay.supervise.wait", decided)
        ticks = []
        return supervise(engine, tasks, lambda: ticks.append(1), lambda task: f"task {task}"), len(ticks)

    return run


@pytest.mark.parametrize("alone", [False, True])
def test_one_poison_among_many_is_the_only_failure(drive, alone):
    engine = Engine(poison=[200], alone=alone)
    failures, ticks = drive(engine, range(400))
    assert [task for task, _ in failures] == [200]
    assert str(failures[0][1]).startswith("task 200: its worker process died each time")
    assert set(engine.done) == set(range(400)) - {200}
    assert set(engine.done.values()) == {1}
    assert ticks == 400
    assert engine.tried[200] == 1 + 3
    assert engine.most == 6


def test_accidents_are_nobodys_fault(drive):
    engine = Engine(accidents=30)
    assert drive(engine, range(200)) == ([], 200)
    assert engine.done == Counter(range(200))
    assert engine.renewed > 5


def test_what_a_task_says_is_told_in_the_order_of_tasks(drive):
    failures, _ = drive(Engine(wrong=[7, 3], poison=[5]), range(10))
    assert [task for task, _ in failures] == [3, 5, 7]
    assert [str(e).split(" ")[-1] for _, e in failures][::2] == ["wrong", "wrong"]


def test_workers_that_always_die_are_not_tried_for_ever(drive):
    engine = Engine(poison=range(1000))
    with pytest.raises(KvsimError, match=r"3 tasks in a row failed, so it is not the tasks: task \d+: its worker process died"):
        drive(engine, range(1000))
    assert engine.tried.total() < 30


def test_an_engine_that_broke_between_two_results_is_renewed(drive):
    class Broke(Engine):
        def submit(self, task):
            if task == 3 and not self.renewed:
                raise Crash
            return super().submit(task)

    engine = Broke()
    assert drive(engine, range(8)) == ([], 8)
    assert engine.renewed == 1


def test_nothing_to_do(drive):
    assert drive(Engine(), []) == ([], 0)


# ------------------------------------------------------------------------------------------------ real processes
ENDLESS = """
import signal
from concurrent.futures import Future
from types import SimpleNamespace

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started deaf to it
import polars
from kvsim.replay.supervise import supervise

engine = SimpleNamespace(workers=1, crash=(), tries=1, submit=lambda task: print("given", flush=True) or Future())
supervise(engine, ["a task"], lambda: None)
"""


def test_ctrl_c_ends_the_wait_for_a_task_that_never_ends():
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout.readline() == b"given\n"
            time.sleep(1)  # it waits now
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT
        finally:
            process.kill()


class Deadly:
    """Writes a file for each task, and dies of one of them."""

    asked = SimpleNamespace(entries=())

    def __init__(self, folder):
        self.folder = folder

    def name(self, task):
        return f"task {task}"

    def do(self, task):
        if task == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / f"{task}").touch()


class Counting(Deadly):
    """How many threads each library would take."""

    def do(self, task):
        import numba
        import polars as pl
        import pyarrow as pa
        from threadpoolctl import threadpool_info

        blas = {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}
        said = [*blas, numba.get_num_threads(), numba.config.NUMBA_NUM_THREADS, pa.cpu_count(), pl.thread_pool_size()]
        (self.folder / f"{task}").write_text(" ".join(map(str, said)))


def test_a_process_that_is_killed_by_a_task_takes_no_other_task_with_it(tmp_path):
    failures = do_all(Deadly(tmp_path), range(20), 2, lambda: None)
    assert [task for task, _ in failures] == [5]
    assert {int(p.name) for p in tmp_path.iterdir()} == set(range(20)) - {5}


def test_every_library_has_one_thread_in_a_worker(tmp_path):
    before = dict(os.environ)
    with Pool(Counting(tmp_path), 2) as pool:
        assert supervise(pool, [0, 1, 2], lambda: None) == []
    assert {word for p in tmp_path.iterdir() for word in p.read_text().split()} == {"1"}
    assert dict(os.environ) == before
