"""Kernel names -> kernel classes, by rules that a file of the user can put before ours."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

from kvsim.cost.samples import CLASSES
from kvsim.errors import WrongUse

Rules = list[tuple[re.Pattern[str], str]]
UNCLASSED = "unclassed"


def load_rules(path: str | Path | None = None) -> Rules:
    """The rules of a TOML file (`[[rule]]` with `class` and `match`), then the built-in ones. Raises WrongUse for a bad rule."""
    own = _parsed(Path(path).read_bytes(), Path(path).name) if path else []
    return own + _parsed(files("kvsim.cost").joinpath("classes.toml").read_bytes(), "classes.toml")


def _parsed(raw: bytes, name: str) -> Rules:
    try:
        rules = tomllib.loads(raw.decode("utf-8")).get("rule", [])
    except (ValueError, RecursionError) as e:  # not TOML, or not UTF-8
        raise WrongUse(f"{name}: not TOML ({e})") from None
    if not isinstance(rules, list):
        raise WrongUse(f"{name}: rule is one table; expected [[rule]] for each")
    found: Rules = []
    for i, rule in enumerate(rules, 1):
        if not isinstance(rule, dict) or set(rule) != {"class", "match"} or rule["class"] not in list(CLASSES):
            raise WrongUse(f"{name}, rule {i}: expected class (one of {', '.join(CLASSES)}) and match (a regular expression)")
        try:
            found.append((re.compile(rule["match"]), rule["class"]))
        except (re.error, TypeError) as e:
            raise WrongUse(f"{name}, rule {i}: match is no regular expression ({e})") from None
    return found


def classify(kernel: str, rules: Rules) -> str:
    """The class of a kernel's full name, or "unclassed"."""
    return next((cls for pattern, cls in rules if pattern.search(kernel)), UNCLASSED)


def symbol(kernel: str) -> str:
    """`void ns::kernel<T>(T*)` -> `ns::kernel`: what tools agree on, and nothing that could be a path.

    Profilers spell template arguments and return types each in their own way, and a frame of Triton may be a file name."""
    text = re.sub(r"\(anonymous namespace\)|<unnamed>", "", kernel)
    before = None
    while before != text:
        before, text = text, re.sub(r"<[^<>]*>", "", text)
    text = text.split("<")[0].split("(")[0].strip().replace("\\", "/").split("/")[-1]
    parts = [p for p in text.split(" ")[-1].split("::") if p]
    return "::".join(parts[-2:])[:80] or "kernel"
