"""A row's bytes depend on its policy and step alone (docs/decisions/0002)."""

from __future__ import annotations

import pytest

from kvsim.engine import attend, evolve
from tests.engine.lanes import ROWS, differing, first_steps, lane, run
from tests.engine.policies import ALL as ON_THE_DEVICE
from tests.engine.policies import HOSTED, SEEING

ALL = ON_THE_DEVICE + HOSTED
# Nine heads a group: 28 steps are a block of 256 rows, so 60 steps are three blocks; 540 positions are two tiles.
WIDE = {"key_dim": 64, "prompt": 480, "steps": 60, "kv_heads": 1, "group": 9, "evidence": ((3, 9), (500, 515))}


@pytest.fixture(scope="module")
def source():
    return lane(**WIDE)


@pytest.fixture(scope="module")
def whole(source):
    """Every policy beside all others."""
    return dict(zip(ALL, run(source, *ALL, plans=True), strict=True))


@pytest.mark.parametrize("policy", ALL)
def test_alone_or_beside_others(source, whole, policy):
    assert differing(whole[policy], run(source, policy, plans=True), names=(*ROWS, "curves")) == []


@pytest.mark.parametrize("policy", ALL)
def test_whatever_steps_are_written(source, whole, policy):
    for steps in ([17], [0, 1, 2, 11, 27, 28, 40, 59]):
        assert differing(whole[policy], run(source, policy, plans=True, steps=steps), steps) == []


@pytest.mark.parametrize("policy", [p for p in ALL if p not in SEEING])
def test_a_prefix_of_the_trace_gives_a_prefix_of_the_rows(source, whole, policy):
    for steps in (1, 30):
        assert differing(whole[policy], run(first_steps(source, steps), policy, plans=True), range(steps)) == []


@pytest.mark.parametrize("rows", [64, 512])
def test_whatever_the_block_of_steps(source, whole, monkeypatch, rows):
    monkeypatch.setattr(attend, "ROWS", rows)
    for policy, tables in zip(ALL, run(source, *ALL, plans=True), strict=True):
        assert differing(whole[policy], tables) == [], policy


@pytest.mark.parametrize("rows", [9, 640])
def test_whatever_the_block_of_observations(source, whole, monkeypatch, rows):
    monkeypatch.setattr(evolve, "OBSERVED_ROWS", rows)
    watching = [policy for policy in ALL if policy.startswith(("h2o", "tova", "pools", "qevict", "zipcache"))]
    for policy, tables in zip(watching, run(source, *watching, plans=True), strict=True):
        assert differing(whole[policy], tables) == [], policy
