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
