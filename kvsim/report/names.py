"""What a policy's canonical form says, read as text: short labels that tell policies apart, its family, the tokens it is made to read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from itertools import chain, count
from typing import NamedTuple

SILENT = {"full", "everything"}  # parts that change nothing: named only when alone
BASELINES = ("full", "oracle", "random_read", "recency")
LONGEST = 48


class Part(NamedTuple):
    """One part of a chain: its name and its parameters as they are written."""

    name: str
    parameters: dict[str, str]


def parts(policy: str) -> tuple[Part, ...]:
    """keep(...) >> store(...) >> read(...) -> its parts; () for an id that is no such expression (a policy file)."""
    try:
        calls = _calls(ast.parse(policy, mode="eval").body)
        return tuple(
            Part(c.func.id, {k.arg: ast.unparse(k.value) for k in c.keywords if k.arg})
            for c in calls
            if isinstance(c.func, ast.Name)
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _calls(tree: ast.expr) -> list[ast.Call]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.RShift):
        return _calls(tree.left) + _calls(tree.right)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return [tree]
    raise ValueError("not a chain of policies")


def family(policy: str) -> str:
    """Its parts that do something, such as "quest" or "h2o >> quest"; an id that cannot be read is its own family."""
    return " >> ".join(p.name for p in _speaking(parts(policy))) or policy


def labels(policies: Iterable[str]) -> dict[str, str]:
    """{id: label}, all different: the family with its budgets, then the parameters in which policies of one family differ."""
    ids = list(dict.fromkeys(policies))
    read = {p: _speaking(parts(p)) for p in ids}
    twins: dict[str, list[str]] = {}
    for p in ids:
        twins.setdefault(" >> ".join(_short(x, ()) for x in read[p]), []).append(p)
    found: dict[str, str] = {}
    for same in twins.values():
        for p in same:
            text = " >> ".join(_short(x, _differing([read[q][i].parameters for q in same])) for i, x in enumerate(read[p])) or p
            text = _clipped(" ".join(text.split()))
            found[p] = next(t for t in chain((text,), (f"{text} #{n}" for n in count(2))) if t not in found.values())
    return {p: found[p] for p in ids}


def forced(policy: str) -> str:
    """The tokens read whatever their score, in words; "none", or "not recorded" for an id that cannot be read."""
    chain = parts(policy)
    if not chain:
        return "not recorded"
    read = chain[-1].parameters
    words = [
        f"{word} {read[n]}"
        for n, word in (("sinks", "first"), ("recent", "newest"))
        if "read" in read and read.get(n, "0") != "0"
    ]
    return ", ".join(words + ["newest page"] * ("forced" in read.get("tail", ""))) or "none"


def budget(text: str) -> str:
    """A budget or rule as the language writes it -> a short form: tokens(256) is 256, share(0.2, of='visible') is 20%."""
    unit, _, inner = text.partition("(")
    first, *rest = (x.strip() for x in inner.rstrip(")").split(","))
    if unit == "tokens":
        return first
    if unit == "share" and first.replace(".", "", 1).isdigit():
        of = next((f" of {r.split('=')[1].strip(chr(39))}" for r in rest if r.startswith("of=") and "visible" not in r), "")
        return f"{float(first) * 100:g}%{of}"
    return {"pages": f"{first} pages", "mib": f"{first} MiB", "kib": f"{first} KiB"}.get(unit, text)


def _clipped(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _speaking(chain: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(p for p in chain if p.name not in SILENT) or chain[:1]


def _short(part: Part, also: Iterable[str]) -> str:
    budgets = [budget(part.parameters[n]) for n in ("hold", "read") if n in part.parameters]
    return ", ".join([" ".join([part.name, *budgets]), *(f"{n}={part.parameters[n]}" for n in also if n in part.parameters)])


def _differing(settings: list[Mapping[str, str]]) -> list[str]:
    named = dict.fromkeys(n for s in settings for n in s if n not in ("hold", "read"))
    return [n for n in named if len({s.get(n) for s in settings}) > 1]
