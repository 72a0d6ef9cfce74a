"""Runs and sweeps on object storage: the same bytes as on disk, every object created once, nothing under the final name before all is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsim.errors import BadTrace, WrongUse
from kvsim.metrics.run import open_run
from kvsim.places import place
from kvsim.replay.parts import Parts, merge, write_part
from kvsim.replay.run import replay
from kvsim.replay.study import Study
from kvsim.replay.sweep import sweep
from tests.replay.conftest import POLICIES as ALL
from tests.replay.test_parts import events
from tests.replay.test_resume import Stop
from tests.replay.test_run import same_files

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
from tests.bucket import bucket  # noqa: F401  (a fixture)

POLICIES = ALL[:1] + ALL[2:3]


@pytest.fixture(scope="module")
def run(trace, tmp_path_factory):
    return replay(trace, POLICIES, tmp_path_factory.mktemp("runs") / "run", plans=True, workers=1)


@pytest.fixture(scope="module")
def there(bucket, trace):  # noqa: F811
    return bucket.upload(trace.path, "traces/small")


def test_from_there_to_there(bucket, there, run):  # noqa: F811
    made = replay(there, POLICIES, bucket.place("runs/a"), plans=True, workers=2)
    assert same_files(made.path, run.path)
    assert open_run(bucket.place("runs/a")).heads.collect().equals(open_run(run.path).heads.collect())
    puts = [path for method, path, _ in bucket.requests if method == "PUT" and "/runs/a" in path]
    assert len(puts) == len(set(puts))
    assert puts[-1] == "/bucket/runs/a/run.json"
    assert place(bucket.place("runs/a.partial")).names() == set()


def test_a_stopped_run_goes_on_and_only_with_itself(bucket, there, run):  # noqa: F811
    out = bucket.place("runs/b")
    with pytest.raises(Stop):
        replay(there, POLICIES, out, plans=True, workers=1, progress=Stop.at(2))
    with pytest.raises(BadTrace, match=r"no run\.json"):
        open_run(out)
    with pytest.raises(WrongUse, match="begun with another --plans"):
        replay(there, POLICIES, out, workers=1)
    assert same_files(replay(there, POLICIES, out, plans=True, workers=1).path, run.path)
    with pytest.raises(WrongUse, match="exists already"):
        replay(there, POLICIES, out, plans=True, workers=1)


def test_a_run_in_which_nothing_was_done_leaves_nothing(bucket, there):  # noqa: F811
    with pytest.raises(Stop):
        replay(there, POLICIES, bucket.place("runs/c"), workers=1, progress=Stop.at(0))
    assert place(bucket.place("runs/c.partial")).names() == set()


def test_a_sweep(bucket, there, run):  # noqa: F811
    study = Study((there,), POLICIES, options={"plans": True})
    [made] = sweep(study, bucket.place("sweeps/a"), workers=1)
    assert same_files(made.path, run.path)
    assert {name.split("/")[0] for name in place(bucket.place("sweeps/a")).names()} == {"study.json", "small"}
    told = []
    sweep(study, bucket.place("sweeps/a"), tell=told.append)
    assert told == ["1 of 1 runs are done; no run is missing"]
    with pytest.raises(WrongUse, match="belongs to another study, with another set of policies"):
        sweep(Study((there,), POLICIES[:1], options={"plans": True}), bucket.place("sweeps/a"))


def test_a_failed_write_leaves_no_object(bucket):  # noqa: F811
    class Broken(dict):
        def get(self, name):
            raise OSError("no memory")

    parts = Parts(place(bucket.place("parts/a")), "key")
    with pytest.raises(OSError, match="no memory"):
        write_part(parts, (0, 1), [[{"events": events((0, 1), 0, 1)}], [Broken(events=None)]])
    assert parts.root.names() == set()


def test_an_altered_object_is_noticed(bucket, tmp_path):  # noqa: F811
    parts = Parts(place(bucket.place("parts/b")), "key")
    write_part(parts, (0, 1), [[{"events": events((0, 1), 0, 5)}]])
    file = parts.folder((0, 1)) / "events.parquet"
    whole = file.read_bytes()
    file.remove()
    assert file.create(whole[:90] + bytes([whole[90] ^ 4]) + whole[91:])
    with pytest.raises(BadTrace, match="cut short or altered"):
        merge(parts, tmp_path, [(0, 1)], ["one"])


def test_credentials_that_fail_are_refused_before_work(bucket, trace, monkeypatch):  # noqa: F811
    monkeypatch.setattr("kvsim.replay.work.Work.do", None)
    monkeypatch.setattr(bucket, "denies", True)
    with pytest.raises(WrongUse, match="access refused"):
        sweep(Study((str(trace.path),), POLICIES), bucket.place("sweeps/b"), workers=1)


def test_no_copy_of_a_run_stays(bucket, run):  # noqa: F811
    bucket.upload(run.path, "runs/d")
    assert isinstance(open_run(bucket.place("runs/d")).path, Path)
