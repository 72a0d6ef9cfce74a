"""Files that appear under their name when they are whole, in a folder that one capture writes at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvsim.errors import WrongUse


def locked(folder: Path) -> int:
    """An open folder that no other capture writes into, until it is closed or the process ends. Raises WrongUse."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise WrongUse(f"{folder}: another capture is writing there; wait for its end, or write to another folder") from None
    return opened


@contextmanager
def replacing(path: Path, durable: bool) -> Iterator[IO[bytes]]:
    """A file that appears under its name when it is whole, and if durable on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as f:
            yield f
            f.flush()
            if durable:
                os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
