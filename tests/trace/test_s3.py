"""A trace on object storage is the trace on disk: the same arrays, by reads of no more than what is needed."""

from __future__ import annotations

import pickle
import socket

import numpy as np
import pytest

from kvsim.errors import BadTrace, WrongUse
from kvsim.places import place
from kvsim.synth.generate import synthesize
from kvsim.trace.check import check_trace
from kvsim.trace.open import Lane, open_trace

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
from tests.bucket import bucket  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("traces") / "t", layers=3, prompt=3000, steps=24, head_dim=64, segment=8)


@pytest.fixture(scope="module")
def there(bucket, here):  # noqa: F811
    return bucket.upload(here.path, "traces/t")


def arrays(lane: Lane):
    return {name: x for name, x in vars(lane).items() if isinstance(x, np.ndarray)}


def test_a_lane_is_the_one_on_disk(here, there):
    trace = open_trace(there)
    assert (trace.id, trace.sha256, trace.layers) == (here.id, here.sha256, here.layers)
    for layer in here.layers:
        a, b = (arrays(t.lane(t.requests[0], layer)) for t in (here, trace))
        assert a.keys() == b.keys()
        assert all((a[name] == b[name]).all() for name in a)


def test_a_layer_is_read_once_and_nothing_of_the_others(bucket, here, there):  # noqa: F811
    layer = here.layers[1]
    mine = sum(f.stat().st_size for f in here.path.rglob(f"layer={layer.id}/*.parquet"))
    trace = open_trace(there)
    bucket.read()
    trace.lane(trace.requests[0], layer)
    assert all(f"/layer={layer.id}/" in path for _, path, _ in bucket.requests)
    assert 0.95 * mine < bucket.read() <= 1.1 * mine


def test_opening_reads_no_vectors(bucket, here, there):  # noqa: F811
    bucket.read()
    open_trace(there)
    assert bucket.read() < 0.15 * sum(f.stat().st_size for f in here.path.rglob("*.parquet"))


def test_an_open_trace_can_be_sent_to_another_process(here, there):
    trace = pickle.loads(pickle.dumps(open_trace(there)))
    assert (trace.lane(trace.requests[0], here.layers[0]).k == here.lane(here.requests[0], here.layers[0]).k).all()


def test_a_sound_trace_is_sound_there(there):
    assert list(check_trace(there)) == []


def test_what_is_missing_or_short_is_named(bucket, here, there):  # noqa: F811
    root = place(there)
    other = place(bucket.place("traces/harmed"))
    for name in root.names() - {"q/request=0/layer=0/seg-00000.parquet"}:
        (other / name).create((root / name).read_bytes())
    with pytest.raises(BadTrace, match=r"q/request=0/layer=0/seg-00000\.parquet.*: the manifest lists it and it is missing"):
        open_trace(other)
    (other / "q/request=0/layer=0/seg-00000.parquet").create(b"PAR1")
    with pytest.raises(BadTrace, match=r"4 bytes, the manifest says \d+: the file is truncated"):
        open_trace(other)
    with pytest.raises(BadTrace, match="no such folder"):
        open_trace(bucket.place("traces/none"))


# ------------------------------------------------------------------------------------------------ places
def test_an_object_is_created_once(bucket):  # noqa: F811
    file = place(bucket.place("once/a"))
    assert file.create(b"first")
    assert not file.create(b"second")
    assert file.read_bytes() == b"first"
    assert file.sha256() == "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e"
    file.parent.remove()
    assert not file.is_file()


def test_a_put_that_is_cut_off_leaves_nothing(bucket):  # noqa: F811
    host, port = bucket.endpoint.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"PUT /bucket/failed/a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
    assert place(bucket.place("failed")).names() == set()


def test_refused_credentials_are_told_in_one_line(bucket, monkeypatch):  # noqa: F811
    monkeypatch.setattr(bucket, "denies", True)
    with pytest.raises(
        WrongUse, match=r"^s3://bucket/traces/t\S*: access refused: check AWS_ACCESS_KEY_ID or AWS_PROFILE, [^\n]*$"
    ):
        open_trace(bucket.place("traces/t"))


def test_places():
    found = place("s3://b/x/y?region=eu-west-1&endpoint=http://h:1")
    assert str(found / "z") == "s3://b/x/y/z?endpoint=http%3A%2F%2Fh%3A1&region=eu-west-1"
    assert (found.name, found.parent.key, found.with_name("w").key) == ("y", "x", "x/w")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s3://", "expected s3://BUCKET/PREFIX"),
        ("s3://b", "expected s3://BUCKET/PREFIX"),
        ("s3://b/x?key=1", "unknown option 'key'"),
    ],
)
def test_what_is_no_place(text, told):
    with pytest.raises(WrongUse, match=told):
        place(text)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    from kvsim import s3

    s3._store.cache_clear()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    yield s3
    s3._store.cache_clear()


def test_credentials_of_a_profile(fresh, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = A\naws_secret_access_key = B\n[default]\naws_access_key_id = C\n"
    )
    (tmp_path / "config").write_text("[profile work]\nregion = eu-west-1\nendpoint_url = http://h:1\noutput = json\n")
    assert fresh._profile() == {"access_key_id": "C"}
    monkeypatch.setenv("AWS_PROFILE", "work")
    expected = {"access_key_id": "A", "secret_access_key": "B", "region": "eu-west-1", "endpoint": "http://h:1"}
    assert fresh._profile() == expected
    monkeypatch.setenv("AWS_PROFILE", "gone")
    with pytest.raises(WrongUse, match="AWS_PROFILE is 'gone', which neither"):
        fresh._profile()


def test_the_environment_comes_before_the_default_profile(fresh, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = C\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "A")
    assert fresh._profile() == {}
