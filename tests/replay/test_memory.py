"""How many workers: never more than tasks, fewer when they would not fit, one when there is little to do."""

from __future__ import annotations

import pytest

from kvsim.errors import WrongUse
from kvsim.policies.read.quest import quest
from kvsim.replay import memory
from kvsim.replay.asked import resolve
from kvsim.replay.memory import in_bytes, task_bytes, workers_for
from kvsim.replay.run import replay


@pytest.fixture
def asked(trace):
    return resolve(trace, "quest(read=pages(2))")


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(memory.os, "sched_getaffinity", lambda pid: set(range(3)), raising=False)
    monkeypatch.setattr(memory, "WORTH", 0)


def test_as_many_as_cores_and_tasks(trace, asked, cores):
    assert workers_for(trace, asked, asked.tasks, None, None) == 3
    assert workers_for(trace, asked, asked.tasks[:2], None, None) == 2
    assert workers_for(trace, asked, asked.tasks, 8, None) == 4
    assert workers_for(trace, asked, [], None, None) == 1


def test_little_work_is_done_here(trace, asked, cores, monkeypatch):
    monkeypatch.setattr(memory, "WORTH", 4 * (10 * 70 * 4) + 1)  # tasks, steps, tokens, query heads
    assert workers_for(trace, asked, asked.tasks, None, None) == 1
    assert workers_for(trace, asked, asked.tasks, 2, None) == 2
    monkeypatch.setattr(memory, "WORTH", 4 * (10 * 70 * 4))
    assert workers_for(trace, asked, asked.tasks, None, None) == 3


def test_a_policy_of_a_script_stays_in_its_process(trace, asked, cores, monkeypatch):
    assert workers_for(trace, asked, asked.tasks, None, None) == 3
    monkeypatch.setattr(quest, "__module__", "__main__")
    assert workers_for(trace, asked, asked.tasks, None, None) == 1
    with pytest.raises(WrongUse, match=r"cannot be sent to another process .* put it in a file of its own, or ask for 1 worker"):
        replay(trace, "quest(read=pages(2))", workers=2)


def test_fewer_when_they_would_not_fit(trace, asked, cores):
    one = task_bytes(trace.requests[0], trace.layers[0], trace.dtype, asked)
    assert workers_for(trace, asked, asked.tasks, 3, 2 * one) == 2
    assert workers_for(trace, asked, asked.tasks, 3, 2 * one - 1) == 1
    with pytest.raises(WrongUse, match=r"memory .*: request 0, layer 0 alone takes about 0\.\d GiB"):
        workers_for(trace, asked, asked.tasks, 3, one - 1)


def test_a_task_takes_more_the_more_it_holds(trace, asked):
    def takes(policies):
        return task_bytes(trace.requests[0], trace.layers[0], trace.dtype, resolve(trace, policies))

    quest, h2o = "quest(read=pages(2))", "h2o(hold=tokens(30))"
    assert memory.PROCESS < takes(quest) < takes(h2o) < takes([h2o, quest])


@pytest.mark.parametrize(
    ("size", "n"), [(4096, 4096), ("4096", 4096), ("8GiB", 8 << 30), ("1.5 gib", 3 << 29), ("2MB", 2_000_000), ("64 kib", 65536)]
)
def test_sizes(size, n):
    assert in_bytes(size) == n


@pytest.mark.parametrize("size", ["", "GiB", "8 potatoes", "-1", "8GiBx"])
def test_what_is_no_size(size):
    with pytest.raises(WrongUse, match="8GiB"):
        in_bytes(size)
