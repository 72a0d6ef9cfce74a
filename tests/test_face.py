"""The public face: everything by name, loaded when asked for, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvsim

ROOT = Path(__file__).parents[1]


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("name", kvsim.__all__)
def test_every_public_name_is_there(name):
    assert callable(getattr(kvsim, name))


def test_a_policy_is_found_by_name():
    assert kvsim.quest(read=kvsim.tokens(64)).page == 16
    assert {"full", "quest"} <= {p.__name__ for p in (kvsim.full, kvsim.quest)}


def test_an_unknown_name_is_refused_with_the_way_to_the_known_ones():
    with pytest.raises(AttributeError, match="kvsim policies"):
        _ = kvsim.qest


def test_a_verb_stays_callable_after_its_package_was_imported():
    assert (
        fresh("import kvsim.replay.run, kvsim; print(callable(kvsim.replay), kvsim.replay.run.__name__)")
        == "True kvsim.replay.run"
    )
    assert fresh("import kvsim, inspect; print('policies' in inspect.signature(kvsim.replay).parameters)") == "True"
