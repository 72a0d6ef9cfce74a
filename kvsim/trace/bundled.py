"""The traces that kvsim brings along, by their names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import kvsim
from kvsim.errors import BadTrace
from kvsim.places import place

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

NAMES = ("smollm2-needle", "smollm2-reversal")


def bundled(name: str = NAMES[0]) -> Path:
    """Where a bundled trace is: inside the package, or beside it in a checkout. Raises BadTrace when neither is there."""
    package = Path(kvsim.__file__).parent
    for home in (package / "_traces", package.parent / "traces"):
        if (home / name / "manifest.json").is_file():
            return home / name
    raise BadTrace(f"{package}: the bundled trace is missing; install kvsim again, or name a trace: kvsim demo TRACE")


def trace_place(where: str | Path | S3Path) -> Path | S3Path:
    """A path or "s3://bucket/prefix"; the name of a bundled trace means that one, unless there is something of that name here."""
    return bundled(where) if isinstance(where, str) and where in NAMES and not Path(where).exists() else place(where)
