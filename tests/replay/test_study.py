"""A study.toml becomes policies: every combination once, only what the constraints allow; what is wrong is said in one line."""

from __future__ import annotations

import pytest

from kvsim.errors import WrongUse
from kvsim.replay.study import read_study
from kvsim.trace.bundled import bundled

BARE = 'traces = ["t"]\npolicies = ["full()"]\n'


def study(tmp_path, text):
    (tmp_path / "study.toml").write_text(text)
    return read_study(tmp_path / "study.toml")


def grid(tmp_path, policies, values, where=()):
    lines = [f"{name} = {list(v)!r}" for name, v in values.items()]
    return study(
        tmp_path, f"traces = ['t']\npolicies = {list(policies)!r}\nwhere = {list(where)!r}\n[grid]\n" + "\n".join(lines)
    ).policies


def test_a_policy_has_every_combination_of_the_names_in_it(tmp_path):
    found = grid(tmp_path, ["a({n}, {p})", "b({n})", "c()"], {"n": [1, 2], "p": ["x", 0.5]})
    assert found == ("a(1, x)", "a(1, 0.5)", "a(2, x)", "a(2, 0.5)", "b(1)", "b(2)", "c()")


def test_nothing_twice(tmp_path):
    assert grid(tmp_path, ["a({n})", "a(1)"], {"n": [1, 1, 2]}) == ("a(1)", "a(2)")


def test_equal_read_bytes(tmp_path):
    """As many tokens read, and so bytes of K and V, whatever the page size."""
    found = grid(tmp_path, ["{pages}x{page}"], {"pages": [16, 32, 64], "page": [8, 16, 32, 64]}, ["pages * page == 1024"])
    assert found == ("16x64", "32x32", "64x16")


def test_a_constraint_binds_only_policies_with_all_its_names(tmp_path):
    found = grid(tmp_path, ["{a}-{b}", "{a}"], {"a": [1, 2], "b": [1, 2]}, ["a < b"])
    assert found == ("1-2", "1", "2")
    assert grid(tmp_path, ["{a}-{b}"], {"a": [0.1, 0.3], "b": [3, 1]}, ["1 <= a * b + 0.7 <= 1.0"]) == ("0.1-3", "0.3-1")


def test_a_policy_that_a_constraint_leaves_nothing_of_is_not_dropped_in_silence(tmp_path):
    with pytest.raises(WrongUse, match=r"no combination of the grid for \{a\}x\{b\} satisfies"):
        grid(tmp_path, ["{a}", "{a}x{b}"], {"a": [1, 2], "b": [3, 4]}, ["a * b == 5"])


def test_traces_stand_beside_the_study(tmp_path):
    for name in ("b1", "b2", "c"):
        (tmp_path / name).mkdir()
    found = study(tmp_path, 'traces = ["c", "b*", "s3://bucket/x"]\npolicies = ["full()"]')
    assert found.traces == tuple([str(tmp_path / name) for name in ("c", "b1", "b2")] + ["s3://bucket/x"])


def test_a_bundled_trace_goes_by_its_name_wherever_the_study_is(tmp_path):
    found = study(tmp_path, 'traces = ["smollm2-needle", "smollm2-rev*"]\npolicies = ["full()"]')
    assert found.traces == (str(bundled("smollm2-needle")), str(bundled("smollm2-reversal")))
    (tmp_path / "smollm2-needle").mkdir()
    (tmp_path / "smollm2-revised").mkdir()
    beside = study(tmp_path, 'traces = ["smollm2-needle", "smollm2-rev*"]\npolicies = ["full()"]')
    assert beside.traces == (str(tmp_path / "smollm2-needle"), str(tmp_path / "smollm2-revised"))


def test_policy_files_stand_beside_the_study(tmp_path):
    found = study(tmp_path, 'traces = ["t"]\npolicies = ["@mix{n}.toml"]\npolicy_files = ["mine.py"]\n[grid]\nn = [1, 2]')
    assert found.policies == (f"@{tmp_path / 'mix1.toml'}", f"@{tmp_path / 'mix2.toml'}")
    assert found.policy_files == (str(tmp_path / "mine.py"),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BARE + "polices = []", r"study\.toml: unknown key 'polices', did you mean 'policies'\?"),
        (BARE + "zzz = 1", "unknown key 'zzz', expected some of traces, policies"),
        (BARE + "layers = ['0']", "layers is .*; expected a list of ids"),
        (BARE + "baselines = 1", "baselines is 1; expected true or false"),
        (BARE + "[grid]\nn = 3", "grid is .*; expected a table: NAME = "),
        (BARE + "[grid]\nn = []", "grid is .*; expected a table: NAME = "),
        (BARE + "[grid]\nn = [true]", "grid is .*; expected a table: NAME = "),
        ('policies = ["full()"]', "no traces; expected a list of paths"),
        ('traces = ["t"]\npolicies = []', "no policies; expected a list of expressions"),
        (BARE + "[grid]\nn = [1]", "the grid has 'n', which no policy uses"),
        (
            'traces = ["t"]\npolicies = ["{page}"]\n[grid]\npages = [1]',
            "use {page}, which the grid does not have; did you mean 'pages'",
        ),
        ('traces = ["none-*"]\npolicies = ["full()"]', "'none-\\*' matches no folder"),
        ("traces = ", "not TOML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, told):
    with pytest.raises(WrongUse, match=told):
        study(tmp_path, text)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("n", "expected a comparison"),
        ("1 == 1", "expected a comparison"),
        ("n ==", "expected a comparison"),
        ("n ** 2 == 4", "expected a comparison"),
        ("n / 0 == 4", "expected a comparison"),
        ("n in [1]", "expected a comparison"),
        ("__import__('os') == n", "names '__import__', which the grid does not have"),
        ("m == 1", "names 'm', which the grid does not have; it has n, s"),
        ("s == 1", "s is 'x'; only numbers can be compared"),
        ("n > 5", r"no combination of the grid for \{n\}\{s\} satisfies"),
    ],
)
def test_a_constraint_that_is_none(tmp_path, where, told):
    with pytest.raises(WrongUse, match=told):
        grid(tmp_path, ["{n}{s}"], {"n": [1, 2], "s": ["x"]}, [where])


def test_a_grid_that_is_too_large_is_refused_before_it_is_made(tmp_path):
    names = "abcdefgh"
    values = "\n".join(f"{n} = {list(range(100))}" for n in names)
    with pytest.raises(WrongUse, match=r"makes 10,000,000,000,000,000 policies, more than 1,000,000"):
        study(tmp_path, f"traces = ['t']\npolicies = ['{''.join('{' + n + '}' for n in names)}']\n[grid]\n{values}")


def test_no_such_file(tmp_path):
    with pytest.raises(WrongUse, match=r"none\.toml: No such file"):
        read_study(tmp_path / "none.toml")
