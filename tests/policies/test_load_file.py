"""Policies from a user's own file: available by name, whole or not at all, and never in place of another."""

from __future__ import annotations

import pickle
import sys

import pytest

from kvsim.errors import WrongUse
from kvsim.policies import names
from kvsim.policies.language import canonical, known, load_file, parse

NEWEST = '''
from dataclasses import dataclass

import numpy as np

from kvsim.policies.protocol import Hold, Keep, Ranking, Read, State
from kvsim.policies.read.quest import quest


@dataclass(frozen=True, kw_only=True)
class newest(Keep):
    act = "holds the newest tokens"
    hold: Hold
    slack: int | None = 3

    def start(self, prefix, seen):
        return State(), Ranking(seen.pos.astype(float))

    step = start


@dataclass(frozen=True, kw_only=True)
class middle:
    """An index."""

    dtype: str = "float32"
    bound = False

    def summarise(self, keys, valid, closed):
        return {"mean": keys.mean(1)}

    def score(self, q, summary):
        return q @ summary["mean"].swapaxes(-1, -2)

    def numbers(self, dim):
        return dim


class _hidden(Read):
    pass
'''


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a test loads is gone after it."""
    monkeypatch.setattr(names, "_loaded", {"policy": {}, "index": {}})
    before = {*sys.modules}
    yield
    for module in {*sys.modules} - before:
        del sys.modules[module]


def saved(tmp_path, text, name="mine.py"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_the_policies_of_a_file_are_there_by_name(tmp_path):
    found = load_file(saved(tmp_path, NEWEST))
    assert [*found] == ["newest", "middle"]
    assert known()["newest"] is found["newest"]
    assert {"middle", "quest"} & {*known()} == {"quest"}
    chain = parse("newest(hold=tokens(8), slack=None) >> quest(read=tokens(8), index=middle())")
    assert parse(canonical(chain)) == chain
    assert canonical(chain).startswith("newest(hold=tokens(8), slack=None) >> quest(")
    assert pickle.loads(pickle.dumps(chain)) == chain


def test_they_are_checked_as_all_policies_are(tmp_path):
    load_file(saved(tmp_path, NEWEST))
    for text, words in {
        "newest()": "newest: hold= is missing; a hold budget is one of",
        "newest(hold=12)": r"newest\(hold=12\): a hold budget is one of",
        "newest(hold=tokens(8), slack='x')": "expected a whole number or None",
        "newst(hold=tokens(8))": "did you mean 'newest'",
        "newest(hold=tokens(8), slak=1)": "did you mean 'slack'",
    }.items():
        with pytest.raises(WrongUse, match=words):
            parse(text)


def test_a_file_loaded_again_changes_nothing(tmp_path):
    path = saved(tmp_path, NEWEST)
    assert load_file(path) == load_file(str(path))


REFUSED = {
    "": "no policy in it; expected a frozen dataclass that extends Keep, Store, Estimate or Read",
    "from kvsim.policies.read.quest import quest": "no policy in it",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "class quest(": "SyntaxError: ",
    NEWEST.replace("class newest", "class h2o"): "'h2o' is already the name of kvsim.policies.keep.h2o.h2o; give it another",
    NEWEST.replace("class newest", "class tokens"): "'tokens' is already the name of kvsim.units.tokens; give it another",
    NEWEST.replace(
        "class middle", "class boxes"
    ): "'boxes' is already the name of kvsim.policies.index.boxes.boxes; give it another",
    NEWEST.replace("frozen=True, ", ""): "newest must be a frozen dataclass: @dataclass(frozen=True, kw_only=True)",
    NEWEST.replace("newest(Keep)", "newest(Part)").replace(
        "import Hold,", "import Hold, Part,"
    ): "newest must extend Keep, Store, Estimate or Read",
    "from kvsim.policies.protocol import Keep\nclass newest(Keep): pass": "newest must be a frozen dataclass",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_whole_and_in_one_line(tmp_path, text):
    with pytest.raises(WrongUse) as refused:
        load_file(path := saved(tmp_path, text))
    assert str(refused.value).startswith(f"policy file {path}: ")
    assert REFUSED[text] in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "newest" not in known()
    path.write_text(NEWEST)
    assert "newest" in load_file(path)


def test_two_files_cannot_share_a_name(tmp_path):
    load_file(saved(tmp_path, NEWEST))
    with pytest.raises(WrongUse, match="'newest' is already the name of kvsim_policy_file_mine_"):
        load_file(saved(tmp_path, NEWEST, "other.py"))


@pytest.mark.parametrize("name", ["gone.py", "", "mine.txt"])
def test_what_is_not_a_python_file(tmp_path, name):
    (tmp_path / "mine.txt").write_text(NEWEST)
    with pytest.raises(WrongUse, match="not found, or not a Python file"):
        load_file(tmp_path / name)
