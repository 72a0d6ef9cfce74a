"""Whose code an error comes from, and which need it forgot to declare."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

from kvsim import geometry
from kvsim.errors import in_a_line
from kvsim.policies.protocol import Part, Seen, View

NEEDED = {  # by what may be looked at, the name of the need that it is there for
    Seen: {
        "a": "ATTENTION", "wo_norm": "WO_NORM", "key_norm": "KEY_NORM", "keys": "KEYS", "values": "VALUES", "q": "QUERIES", "future": "FUTURE",
    },
    View: {"truth": "TRUTH", "learned": "INDEX", "before": "BEFORE"},
}  # fmt: skip


def told(error: BaseException) -> str:
    """One line: the policy, the file and the line whose code raised it, if it was a policy's, the error, and what mends it where that is a
    need that was not declared."""
    said = f"{type(error).__name__}: {in_a_line(error) or 'no message'}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        part = frame.f_locals.get("self")
        if isinstance(part, Part):
            hint = _undeclared(frame, part) if "NoneType" in said else ""
            return f"{type(part).__name__} ({Path(frame.f_code.co_filename).name}, line {line}): {said}{hint}"
    return said


def _undeclared(frame: FrameType, part: Part) -> str:
    """What the function looks at and was not given, as nobody asked for it."""
    declared = {need.name for need in part.needs}
    for name, shown in frame.f_locals.items():
        for field, need in NEEDED.get(type(shown), {}).items():
            if field in frame.f_code.co_names and getattr(shown, field) is None and getattr(geometry, need).name not in declared:
                return f"; {name}.{field} is None because it is not declared: add {need} to needs"
    return ""
