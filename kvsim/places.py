"""Where a trace, a part or a run lies: a local folder, or a prefix of an S3 bucket, under the few verbs that both have.

Files are written once and whole: by a rename on a local disk, by a create-only put on object storage. Nothing is ever renamed there."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

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
    """A new file, whole and on disk when this returns; False, and nothing is written, where there is one already."""
    if not isinstance(file, Path):
        return file.create(content)
    if file.exists():
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}")  # of this writer alone, on whichever machine it is
    with aside.open("xb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    aside.replace(file)
    return True


def names_in(folder: Path | S3Path) -> set[str]:
    """The files below a folder, by their paths inside it, without those that are still being written."""
    if not isinstance(folder, Path):
        return folder.names()
    found = (Path(root, name).relative_to(folder) for root, _, files in os.walk(folder) for name in files)
    return {file.as_posix() for file in found if not file.name.startswith(".")}
