"""A surface makes something good once (`prepare`) and tries something odd many times (`attempt`). An attempt may raise KvsimError; any other
exception is a finding, and `Finding` is raised where something wrong was believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kvsim.errors import KvsimError

Corpus = dict[str, bytes]


class Finding(Exception):
    """Something wrong was believed, or something left its place."""


@dataclass(frozen=True)
class Surface:
    what: str
    prepare: Callable[[Path], Any]  # an empty folder -> what every attempt begins with
    attempt: Callable[[Random, Any, Path], None]  # in an empty folder


def nothing(root: Path) -> None:
    return None


def tried(do: Callable[[], Any]) -> Any:
    """What it gives, or None where it refuses."""
    try:
        return do()
    except KvsimError:
        return None


def replayed(trace: Path, policies: Any, out: Path, strict: bool = True) -> Any:
    """A run; strict: whose tables keep the laws. A replay tells whatever went wrong as its own error, with the cause; here the cause is told."""
    from kvsim.errors import BrokenLaw
    from kvsim.replay.run import replay

    try:
        return replay(trace, policies, out, workers=1, strict=strict)
    except BrokenLaw as e:
        if "masses sum" in str(e):  # refused: in float32 logits of thousands have too few digits for so strict a law
            raise
        raise Finding(str(e)) from e
    except KvsimError as e:
        if e.__cause__ is not None and not isinstance(e.__cause__, KvsimError):
            raise e.__cause__ from None
        raise
