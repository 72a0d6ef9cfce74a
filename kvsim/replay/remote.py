"""A run on object storage while it is written. Nothing can be renamed there, so run.json is put last and makes the run complete.

There is no lock either: two sweeps of one study may work on the same parts, and each part is still created once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from kvsim.errors import BadTrace, WrongUse
from kvsim.places import from_json, write_once
from kvsim.replay.asked import Task
from kvsim.replay.folder import BEGUN, Draft, check_same, key, partial, tables_of
from kvsim.replay.parts import Parts, merge
from kvsim.s3 import S3Path


class RemoteDraft(Draft):
    """OUT.partial under the prefix of a bucket: begun.json and the parts of finished tasks."""

    def __init__(self, out: S3Path, about: dict[str, Any]) -> None:
        self.out, self.path = out, partial(out)  # type: ignore[assignment]  # the verbs used are those that both have
        self.about = about
        self.parts = Parts(self.path / "parts", key(about))

    def __enter__(self) -> RemoteDraft:
        """Raises WrongUse when OUT.partial belongs to another replay, or the bucket cannot be written."""
        begun = self.path / BEGUN
        if not write_once(begun, json.dumps(self.about, indent=1, ensure_ascii=False).encode()):
            try:
                before = from_json(begun.read_bytes())
            except ValueError:
                raise WrongUse(
                    f"{begun}: altered, so nothing can go on from it; choose another -o, or remove {self.path}"
                ) from None
            check_same(before, self.about, self.path)
            self.about = before
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """What nothing was done in leaves nothing behind."""
        if not any(name.endswith(".json") for name in self.parts.root.names()):  # type: ignore[union-attr]
            self.path.remove()  # type: ignore[attr-defined]

    def finish(self, tasks: list[Task], ids: list[str], also: Callable[[Path], None]) -> None:
        """The parts become tables in a temporary folder, which are then put one by one, run.json last."""
        with TemporaryDirectory(prefix="kvsim-") as folder:
            whole = Path(folder)
            floors = merge(self.parts, whole, tasks, ids)
            also(whole)
            found = {"noise_floor": floors, "tables": tables_of(whole)}
            for file in sorted(whole.iterdir()):
                content = file.read_bytes()
                if not write_once(self.out / file.name, content) and (self.out / file.name).read_bytes() != content:
                    raise BadTrace(f"{self.out / file.name}: exists already with another content; remove {self.out} and repeat")
            write_once(self.out / "run.json", json.dumps(self.about | found, indent=1, ensure_ascii=False).encode())
        self.path.remove()  # type: ignore[attr-defined]
