"""One replay for all tests of pricing."""

from __future__ import annotations

import pytest

from kvsim.metrics.run import open_run
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize
from tests.cost.runs import CHAIN, POLICIES


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cost")
    trace = synthesize(folder / "trace", layers=2, q_heads=4, kv_heads=2, head_dim=16, prompt=205, steps=6, dtype="float16").path
    return open_run(replay(trace, [*POLICIES, CHAIN], folder / "run", workers=1).path)
