"""Which policies and indexes exist: the files of keep/, store/, read/ and index/, and what users load from files of their own.

A file NAME.py holds the class NAME; there is nothing to register, and nothing is imported before it is asked for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from kvsim.errors import WrongUse, in_a_line
from kvsim.policies.parameters import unknown
from kvsim.policies.protocol import KINDS, Part
from kvsim.units import WORDS

PACKAGES = {"policy": ("keep", "store", "estimate", "read"), "index": ("index",)}
_loaded: dict[str, dict[str, str]] = {"policy": {}, "index": {}}  # {name: module} from policy files


def names(what: str) -> dict[str, str]:
    """{name: module} of every "policy" or "index"."""
    found: dict[str, str] = {}
    for package in PACKAGES[what]:
        home = importlib.import_module(f"kvsim.policies.{package}")
        found |= {m.name: f"{home.__name__}.{m.name}" for m in pkgutil.iter_modules(home.__path__)}
    return found | _loaded[what]


def named(what: str, name: str) -> type:
    """The class of that name; WrongUse with the nearest name when there is none."""
    homes = names(what)
    if name not in homes:
        absent(what, name, homes)
    cls: type = getattr(importlib.import_module(homes[name]), name)
    return cls


def absent(what: str, name: str, among: Iterable[str]) -> NoReturn:
    """Raises WrongUse: what is there instead, or which file beside may hold it."""
    if name.isidentifier() and os.path.isfile(f"{name}.py"):  # which is False for a name that no file can have
        raise WrongUse(
            f"unknown {what} {name!r}, and there is a file {name}.py: a policy of your own takes --policy-file {name}.py"
        )
    unknown(what, name, among)


def known() -> dict[str, type[Part]]:
    """Every policy by name."""
    return {name: named("policy", name) for name in names("policy")}


def load_file(path: str | Path) -> dict[str, type]:
    """Makes the public policies and indexes of a Python file available by name; loading it again changes nothing.

    The file is run, as any import is. Raises WrongUse when it cannot be, holds no policy, or uses a name that is taken."""
    path = Path(path).resolve()
    name = f"kvsim_policy_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return _public(sys.modules[name])
    module = _run(name, path)
    try:
        found = _public(module)
        if not found:
            raise WrongUse(
                f"policy file {path}: no policy in it; expected a frozen dataclass that extends Keep, Store, Estimate or Read"
            )
        for policy, cls in found.items():
            _acceptable(path, policy, cls)
    except WrongUse:
        del sys.modules[name]
        raise
    for policy, cls in found.items():
        _loaded["policy" if issubclass(cls, Part) else "index"][policy] = name
    return found


def _run(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise WrongUse(f"policy file {path}: not found, or not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their types there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        raise WrongUse(f"policy file {path}: {type(e).__name__}: {in_a_line(e)}") from e
    return module


def _public(module: ModuleType) -> dict[str, type]:
    """The policies and indexes that a module itself defines."""
    classes = {n: c for n, c in vars(module).items() if isinstance(c, type) and not n.startswith("_")}
    own = {n: c for n, c in classes.items() if (c.__module__, c.__name__) == (module.__name__, n)}
    return {n: c for n, c in own.items() if issubclass(c, Part) or hasattr(c, "summarise")}


def _acceptable(path: Path, name: str, cls: type) -> None:
    taken = {u.__name__: u.__module__ for u in WORDS} | names("policy") | names("index")
    if name in taken:
        raise WrongUse(f"policy file {path}: {name!r} is already the name of {taken[name]}.{name}; give it another")
    if issubclass(cls, Part) and cls.kind not in KINDS:
        raise WrongUse(f"policy file {path}: {name} must extend Keep, Store, Estimate or Read")
    if "__dataclass_params__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
        raise WrongUse(f"policy file {path}: {name} must be a frozen dataclass: @dataclass(frozen=True, kw_only=True)")
