"""The noise floor is the distance of recorded outputs from dense attention, and nothing where none were recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvsim.replay import floor
from kvsim.replay.floor import noise_floor
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize
from kvsim.trace.bits import widen
from kvsim.truth.dense import dense


@pytest.fixture(scope="module")
def lane(trace):
    return trace.lane(trace.requests[0], trace.layers[0])


def test_a_shift_of_known_size_is_found(lane):
    exact = dense(lane, top=0).out.swapaxes(0, 1)
    size = np.linspace(0.01, 0.2, exact.shape[0])[:, None, None]  # a relative error of its own at each step
    shifted = replace(lane, dtype="float32", out=(exact * (1 + size)).astype(np.float32))
    found = noise_floor(shifted)
    each = np.repeat(size.ravel(), exact.shape[1])
    assert found["median"] == pytest.approx(np.median(each), rel=1e-4)
    assert found["p95"] == pytest.approx(np.percentile(each, 95), rel=1e-4)


def test_rounding_to_the_captured_dtype_is_small_and_not_nothing(lane):
    found = noise_floor(lane)
    assert 1e-6 < found["median"] <= found["p95"] < 2e-3
    assert np.abs(widen(lane.out)).max() > 0


def test_few_steps_stand_for_many(lane, monkeypatch):
    whole = noise_floor(lane)
    monkeypatch.setattr(floor, "SAMPLE", 3)
    assert noise_floor(lane)["median"] == pytest.approx(whole["median"], rel=0.5)


def test_no_outputs_no_floor(lane):
    assert noise_floor(replace(lane, out=None)) is None
    assert noise_floor(replace(lane, out=np.full_like(lane.out, np.inf))) is None


def test_run_json_has_a_floor_for_every_layer_whatever_the_workers(run, trace, tmp_path):
    floors = run.info["noise_floor"]
    assert [(f["request"], f["layer"]) for f in floors] == [(r.id, layer.id) for r in trace.requests for layer in trace.layers]
    assert all(0 < f["median"] <= f["p95"] for f in floors)
    two = replay(trace, ["streaming_llm(hold=tokens(20))"], tmp_path / "two", workers=2)
    assert two.info["noise_floor"] == floors


def test_a_trace_without_outputs_says_so_by_an_empty_list(tmp_path):
    bare = synthesize(tmp_path / "bare", layers=1, prompt=20, steps=2, without=("out",))
    assert replay(bare, ["streaming_llm(hold=tokens(8))"], tmp_path / "run").info["noise_floor"] == []
