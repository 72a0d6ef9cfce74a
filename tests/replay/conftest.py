"""One small synthetic trace for all tests of replays, and one run of it under a policy of every kind."""

from __future__ import annotations

import pytest

from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize

POLICIES = (
    "quest(read=tokens(24), page=8)",
    'quest(read=pages(2), page=8, heads="max", recent=8)',
    "h2o(hold=tokens(30), sinks=2) >> quest(read=pages(2), page=8)",
    "tova(hold=share(0.5))",
    "streaming_llm(hold=tokens(20))",
    "kivi(bits=4, group=8, residual=16)",
)


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("traces") / "small", requests=2, layers=2, prompt=60, steps=10)


@pytest.fixture(scope="session")
def run(trace, tmp_path_factory):
    return replay(trace, POLICIES, tmp_path_factory.mktemp("runs") / "run", plans=True, workers=1)
