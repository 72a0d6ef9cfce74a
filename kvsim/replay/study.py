"""What a study.toml asks for: traces, and policies with names in braces that a grid gives values to."""

from __future__ import annotations

import ast
import difflib
import fnmatch
import itertools
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsim.errors import WrongUse
from kvsim.places import S3
from kvsim.trace.bundled import NAMES, bundled

Value = int | float | str
Options = dict[str, Any]

KEYS = {
    "traces": "a list of paths; * and ? stand for several",
    "policies": "a list of expressions, with {NAME} where the grid has values",
    "policy_files": "a list of Python files with policies of your own",
    "grid": "a table: NAME = [VALUE, ...]",
    "where": "a list of comparisons between names of the grid",
    "layers": "a list of ids",
    "requests": "a list of ids",
    "steps": "a list of decode steps",
    "baselines": "true or false",
    "plans": "true or false",
    "explain": "true or false",
    "kv_dtype": "a dtype",
    "allocator": "head or layer",
}
LISTS = {"traces": str, "policies": str, "policy_files": str, "where": str, "layers": int, "requests": int, "steps": int}
OPTIONS = ("layers", "requests", "steps", "baselines", "plans", "explain", "kv_dtype", "allocator")
NAME = re.compile(r"\{(\w*)\}")
MOST = 1_000_000  # policies of a study


@dataclass(frozen=True)
class Study:
    """A study as asked. traces: paths or s3:// places; policies: expressions, every one once; options: those of a replay."""

    traces: tuple[str, ...]
    policies: tuple[str, ...]
    policy_files: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)


def read_study(file: str | Path, most: int = MOST) -> Study:
    """A study.toml; paths in it are relative to its folder. Raises WrongUse for an unknown key, a value of another kind, a name
    that the grid does not have or no policy uses, a constraint that is none, or more than `most` policies."""
    path = Path(file)
    try:
        asked = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise WrongUse(f"{path}: {e.strerror if isinstance(e, OSError) else 'not a text'}; expected a study.toml") from None
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise WrongUse(f"{path}: not TOML: {e}") from None
    try:
        _check(asked)
        policies = _policies(asked["policies"], asked.get("grid", {}), asked.get("where", []), most)
        traces = tuple(t for text in asked["traces"] for t in _traces(text, path.parent))
        files = tuple(str(path.parent / f) for f in asked.get("policy_files", []))
    except WrongUse as e:
        raise WrongUse(f"{path}: {e}") from None
    policies = tuple(f"@{path.parent / p[1:]}" if p.startswith("@") else p for p in policies)
    return Study(traces, policies, files, {name: asked[name] for name in OPTIONS if name in asked})


def _check(asked: Mapping[str, Any]) -> None:
    for key, value in asked.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(KEYS)}"
            raise WrongUse(f"unknown key {key!r}, {hint}")
        if not _fits(key, value):
            raise WrongUse(f"{key} is {value!r}; expected {KEYS[key]}")
    for key in ("traces", "policies"):
        if not asked.get(key):
            raise WrongUse(f"no {key}; expected {KEYS[key]}")


def _fits(key: str, value: Any) -> bool:
    if key in LISTS:
        return isinstance(value, list) and all(type(x) is LISTS[key] for x in value)
    if key == "grid":
        values = [x for v in value.values() for x in v] if _lists(value) else [None]
        return all(isinstance(x, Value) and not isinstance(x, bool) for x in values)
    return isinstance(value, str if key in ("kv_dtype", "allocator") else bool)


def _lists(grid: Any) -> bool:
    return isinstance(grid, dict) and all(isinstance(v, list) and v for v in grid.values())


def _traces(text: str, folder: Path) -> list[str]:
    """What is beside the study comes before what is bundled."""
    if text.startswith(S3):
        return [text]
    come_along = [str(bundled(name)) for name in fnmatch.filter(NAMES, text)]
    if not any(c in text for c in "*?["):
        return [str(folder / text)] if (folder / text).exists() or not come_along else come_along
    try:
        found = sorted(str(p) for p in folder.glob(text) if p.is_dir()) or come_along
    except (ValueError, NotImplementedError, OSError) as e:
        raise WrongUse(f"traces: {text!r} is no pattern of folders ({e})") from None
    if not found:
        raise WrongUse(f"traces: {text!r} matches no folder beside the study, and no bundled trace ({', '.join(NAMES)})")
    return found


# ------------------------------------------------------------------------------------------------ the grid
def _policies(templates: Sequence[str], grid: Mapping[str, list[Value]], where: Sequence[str], most: int) -> tuple[str, ...]:
    """Every template with every combination of the values of the names in it that the constraints allow."""
    names = [list(dict.fromkeys(NAME.findall(t))) for t in templates]
    used = {name for mine in names for name in mine}
    for name in sorted(used - set(grid)):
        near = difflib.get_close_matches(name, grid, 1)
        raise WrongUse(
            f"policies use {{{name}}}, which the grid does not have" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    for name in sorted(set(grid) - used):
        raise WrongUse(f"the grid has {name!r}, which no policy uses; write {{{name}}} in one")
    if (many := sum(math.prod(len(grid[n]) for n in mine) for mine in names)) > most:
        raise WrongUse(
            f"the grid makes {many:,} policies, more than {most:,}; ask for fewer values, or allow more with --max-tasks"
        )
    constraints = [_Constraint(text, set(grid)) for text in where]
    found: dict[str, None] = {}
    for template, mine in zip(templates, names, strict=True):
        filled = dict.fromkeys(_filled(template, mine, grid, constraints))
        if not filled:
            raise WrongUse(f"no combination of the grid for {template} satisfies every constraint of where")
        found |= filled
    return tuple(found)


def _filled(template: str, names: list[str], grid: Mapping[str, list[Value]], where: Iterable[_Constraint]) -> Iterator[str]:
    mine = [c for c in where if c.names <= set(names)]
    for values in itertools.product(*(grid[name] for name in names)):
        given = dict(zip(names, values, strict=True))
        if all(c.holds(given) for c in mine):
            pieces = NAME.split(template)  # texts and names, in turn
            yield "".join(str(given[piece]) if i % 2 else piece for i, piece in enumerate(pieces))


_WORK = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9)


def _unequal(a: float, b: float) -> bool:
    return not _equal(a, b)


_COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Eq: _equal,
    ast.NotEq: _unequal,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class _Constraint:
    """A comparison such as "pages * page == 1024" between numbers and names of the grid. It binds the policies that use all of its
    names."""

    def __init__(self, text: str, known: set[str]) -> None:
        self.text = text
        try:
            self.tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._wrong() from None
        self.names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        if not isinstance(self.tree, ast.Compare) or not self.names:
            raise self._wrong()
        if unknown := sorted(self.names - known):
            raise WrongUse(
                f"where: {text!r} names {unknown[0]!r}, which the grid does not have; it has {', '.join(sorted(known))}"
            )

    def holds(self, given: Mapping[str, Value]) -> bool:
        assert isinstance(self.tree, ast.Compare)
        sides = [self._number(node, given) for node in (self.tree.left, *self.tree.comparators)]
        if any(type(op) not in _COMPARE for op in self.tree.ops):
            raise self._wrong()
        try:
            return all(_COMPARE[type(op)](a, b) for op, a, b in zip(self.tree.ops, sides, sides[1:], strict=False))
        except OverflowError:  # a whole number beyond float
            raise self._wrong() from None

    def _number(self, node: ast.expr, given: Mapping[str, Value]) -> float:
        try:
            match node:
                case ast.Constant(value=int() | float() as value):
                    return value
                case ast.Name(id=name):
                    if isinstance(number := given[name], int | float):
                        return number
                    raise WrongUse(f"where: {self.text!r}: {name} is {given[name]!r}; only numbers can be compared")
                case ast.BinOp(left, op, right) if type(op) in _WORK:
                    return float(_WORK[type(op)](self._number(left, given), self._number(right, given)))
        except (ZeroDivisionError, OverflowError):
            pass
        raise self._wrong()

    def _wrong(self) -> WrongUse:
        return WrongUse(
            f"where: {self.text!r}: expected a comparison of names of the grid and numbers, such as 'pages * page == 1024'"
        )
