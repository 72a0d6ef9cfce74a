"""The layout is a promise: names, depth, who imports whom, what an import costs, and how kernels are compiled."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "kvsim").rglob("*.py"))
HEAVY = {"altair", "numba", "numpy", "polars", "pyarrow", "scipy", "torch"}
SAFE_MATH = {"contract", "nsz", "reassoc"}  # what leaves -inf and NaN alone


def names(modules: list[Path]) -> list[str]:
    return [str(m.relative_to(ROOT)) for m in modules]


def test_no_drawer_for_everything():
    forbidden = {"utils", "util", "common", "helpers", "helper", "misc", "implementations"}
    assert not [m for m in MODULES if forbidden & {*m.relative_to(ROOT).with_suffix("").parts}]


def test_packages_are_at_most_three_deep():
    assert not [m for m in MODULES if len(m.relative_to(ROOT).parts) > 4]  # kvsim/policies/keep/h2o.py


def test_import_table():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_import_table_refuses_what_it_does_not_name():
    from tools.import_table import permitted, read_row

    package, allowed = read_row("trace: units tables | numpy")
    assert package == "trace"
    assert all(permitted("trace", name, allowed) for name in ("trace", "units", "tables", "| numpy"))
    assert not any(permitted("trace", name, allowed) for name in ("engine", "kvsim", "| polars", "numpy"))
    assert permitted("cli", "engine", {"*"})
    assert not permitted("cli", "| torch", {"*"})


def test_import_kvsim_loads_nothing_heavy():
    code = "import sys, kvsim; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "kvsim" in loaded
    assert not HEAVY & {*loaded}


@pytest.mark.parametrize("path", names(sorted((ROOT / "kvsim/kernels").rglob("*.py"))))
def test_kernels_are_compiled_alike(path):
    assert faults((ROOT / path).read_text()) == []


def faults(source: str) -> list[str]:
    """What is wrong with the decorators of a kernel module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found += [f"{node.name}: {fault}" for d in node.decorator_list if called(d) in NUMBA for fault in decorator_faults(d)]
    return found


NUMBA = {"njit", "jit", "vectorize", "guvectorize"}


def called(node: ast.expr) -> str:
    target = node.func if isinstance(node, ast.Call) else node
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def decorator_faults(node: ast.expr) -> list[str]:
    given = {k.arg: k.value for k in node.keywords} if isinstance(node, ast.Call) else {}
    literal = {k: ast.literal_eval(v) for k, v in given.items()}
    wrong = [
        f"{k}={v!r} expected" for k, v in {"nogil": True, "cache": True, "error_model": "numpy"}.items() if literal.get(k) != v
    ]
    wrong += ["parallel is forbidden"] if literal.get("parallel") else []
    fastmath = literal.get("fastmath", set())
    wrong += (
        [] if isinstance(fastmath, set) and fastmath <= SAFE_MATH else [f"fastmath={fastmath!r}: at most {sorted(SAFE_MATH)}"]
    )
    return wrong + ([] if called(node) == "njit" else ["njit expected"])


GOOD = '@njit(nogil=True, cache=True, error_model="numpy", fastmath={"nsz"})\ndef f(): ...'


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("nogil=True, ", ""), "nogil"),
        (("cache=True", "cache=False"), "cache"),
        (("numpy", "python"), "error_model"),
        (('{"nsz"}', "True"), "fastmath"),
        (('{"nsz"}', '{"nnan"}'), "fastmath"),
        (("cache=True", "cache=True, parallel=True"), "parallel"),
        (("njit(", "vectorize("), "njit"),
    ],
)
def test_the_lint_of_kernels_can_fail(change, fault):
    assert faults(GOOD) == []
    assert [f for f in faults(GOOD.replace(*change)) if fault in f]


def test_a_bare_njit_is_refused():
    assert len(faults("@njit\ndef f(): ...")) == 3
