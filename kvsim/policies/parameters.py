"""How a policy is called, alike from an expression and from Python: names and types are checked against its fields, a preset
fills in the rest, and every value has one way to be written down. Which values make sense, a policy says in __post_init__."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, NoReturn

from kvsim.errors import WrongUse
from kvsim.units import READ_UNITS, WORDS, tokens

TOLD = ("source", "claim")  # of a preset, beside its parameters: where they are from, and the size that was published with them


class Checked(type):
    """Metaclass of policies and indexes: what is given to `quest(...)` is checked, by name, before the dataclass sees it."""

    def __call__(cls, *args: Any, preset: str | None = None, **given: Any) -> Any:
        name, known = cls.__name__, parameters(cls)
        if args:
            named = f"given by name, such as {name}({next(iter(known))}=...)" if known else "none"
            raise WrongUse(f"{name}({written(args[0])}): its parameters are {named}")
        for parameter in given:
            if parameter not in known:
                unknown(f"parameter of {name}", parameter, known)
        given = (_preset(cls, preset) if preset is not None else {}) | given
        for parameter, (hint, required) in known.items():
            if parameter in given:
                given[parameter] = _fitting(name, parameter, hint, given[parameter])
            elif required:
                raise WrongUse(f"{name}: {parameter}= is missing; {_expected(parameter, hint)}")
        return super().__call__(**given)


def expect(part: object, parameter: str, holds: bool, what: str) -> None:
    """Raises WrongUse naming the part, the parameter and its value, unless `holds`."""
    if not holds:
        raise WrongUse(f"{type(part).__name__}({parameter}={written(getattr(part, parameter))}): expected {what}")


def written(value: Any) -> str:
    """A value as the language writes it, so that it parses back: dataclasses as calls, defaults included
    (those of fields with repr=False left out); 1.0 is 1."""
    if type(value) in WORDS:
        first, *rest = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        shown = [written(first[1])] + [f"{f.name}={written(x)}" for f, x in rest]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        shown = [f"{f.name}={written(x)}" for f, x in fields if f.repr or x != f.default]
    elif isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    elif isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(float(value))
    else:
        return repr(value)
    return f"{type(value).__name__}({', '.join(shown)})"


def unknown(what: str, name: str, names: Iterable[str]) -> NoReturn:
    """Raises WrongUse with the nearest of `names`, or all of them when none is near."""
    near = difflib.get_close_matches(str(name), names := sorted(names), 1)
    rest = f", did you mean {near[0]!r}?" if near else f": one of {', '.join(names)}" if names else ": there are none"
    raise WrongUse(f"unknown {what} {name!r}{rest}")


@functools.cache
def parameters(cls: type) -> dict[str, tuple[Any, bool]]:
    """{name: (type, required)} of a dataclass, in the order of its fields; a default of None that the type does not name is none."""
    try:
        hints = typing.get_type_hints(cls)
    except (AttributeError, NameError, TypeError):  # a type that its author has for the type checker only
        hints = {}
    given = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]  # read from a class, never called
    taken = {p.name: (hints.get(p.name, Any), p.default) for p in given}
    return {n: (hint, x is inspect.Parameter.empty or (x is None and not _fits(hint, None))) for n, (hint, x) in taken.items()}


def _preset(cls: type, name: str) -> dict[str, Any]:
    presets: dict[str, dict[str, Any]] = getattr(cls, "presets", {})
    if name not in [*presets]:
        unknown(f"preset of {cls.__name__}", name, presets)
    return {k: v for k, v in presets[name].items() if k not in TOLD}


def _fitting(name: str, parameter: str, hint: Any, value: Any) -> Any:
    """The value, if its type is one the parameter takes; a count written tokens(4) is 4."""
    if isinstance(value, tokens) and int in (hint, *typing.get_args(hint)):
        value = value.n
    if not _fits(hint, value):
        raise WrongUse(f"{name}({parameter}={written(value)}): {_expected(parameter, hint)}")
    return value


def _fits(hint: Any, value: Any) -> bool:
    if isinstance(hint, dataclasses.InitVar):
        return _fits(hint.type, value)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(h, value) for h in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return type(value) is str and value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**53
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    plain = isinstance(hint, type) and hint is not Any and not getattr(hint, "_is_protocol", False)
    return isinstance(value, hint) if plain else True


def _expected(parameter: str, hint: Any) -> str:
    """What the parameter takes, in words."""
    hints = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    units = [f"{h.__name__}()" for h in hints if h in READ_UNITS]
    if units:
        return f"a {parameter} budget is one of {', '.join(units)}, for example tokens(512)"
    return "expected " + " or ".join(dict.fromkeys(map(_kind, hints)))


def _kind(hint: Any) -> str:
    if isinstance(hint, dataclasses.InitVar):
        return _kind(hint.type)
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(written, typing.get_args(hint)))
    names = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "True or False", type(None): "None"}
    return names.get(hint, str(getattr(hint, "__name__", hint)))
