"""Where a trace, a part or a run lies: a local folder, or a prefix of an S3 bucket, under the few verbs that both have.

Files are written once and whole: by a rename on a local disk, by a create-only put on object storage. Nothing is ever renamed there."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import uuid
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvsim.errors import BadTrace

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

S3 = "s3://"


def place(where: str | Path | S3Path) -> Path | S3Path:
    """A path, or "s3://bucket/prefix". Raises WrongUse for one without a bucket, or where the extra is not installed."""
    if not isinstance(where, str):
        return where
    if not where.startswith(S3):
        return Path(where)
    from kvsim.s3 import s3_path

    return s3_path(where)


def write_once(file: Path | S3Path, content: bytes) -> bool:
    """A new file, whole and on disk when this returns; False, and nothing is written, where there is one already. Its folder is made
    when only that is missing: what a late writer has for a place that is gone stays gone. Raises FileNotFoundError then."""
    if not isinstance(file, Path):
        return file.create(content)
    if file.exists():
        return False
    file.parent.mkdir(exist_ok=True)
    aside = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}")  # of this writer alone, on whichever machine it is
    with aside.open("xb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    aside.replace(file)
    return True


def file_hash(file: Path | S3Path) -> str:
    """sha256 of a file, read a piece at a time."""
    if not isinstance(file, Path):
        return file.sha256()
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def from_json(text: str | bytes) -> Any:
    """What a file says. Raises ValueError for whatever is no JSON; json.loads has another error for one nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def names_in(folder: Path | S3Path) -> set[str]:
    """The files below a folder, by their paths inside it, without those that are still being written."""
    if not isinstance(folder, Path):
        return folder.names()
    found = (Path(root, name).relative_to(folder) for root, _, files in os.walk(folder) for name in files)
    return {file.as_posix() for file in found if not file.name.startswith(".")}


def at_hand(folder: str | Path | S3Path) -> Path:
    """The folder itself; of one on object storage a copy that lasts as long as this process, since all of it is going to be read."""
    there = place(folder)
    if isinstance(there, Path):
        return there
    if not (there / "run.json").is_file():
        raise BadTrace(f"{there}: no run.json, so not a finished run")
    return _copy(there)


@cache
def _copy(there: S3Path) -> Path:
    kept = TemporaryDirectory(prefix="kvsim-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name) / there.name
    folder.mkdir()
    for name in sorted(n for n in there.names() if "/" not in n):
        (folder / name).write_bytes((there / name).read_bytes())
    return folder
