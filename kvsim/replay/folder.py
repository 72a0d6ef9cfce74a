"""A run directory while it is written: OUT.partial, which a rerun of the same replay goes on with, and which becomes OUT."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvsim.errors import WrongUse
from kvsim.places import from_json
from kvsim.replay.asked import Task
from kvsim.replay.parts import Parts, merge

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

BEGUN = "begun.json"  # what OUT.partial is a part of; run.json once it is complete


class Draft:
    """OUT.partial: begun.json, the parts of finished tasks, and a lock held by the one process that writes."""

    def __init__(self, out: Path, about: dict[str, Any]) -> None:
        self.out, self.path = out, out.with_name(out.name + ".partial")
        self._parts = self.path / "parts"
        self.parts = Parts(self._parts, key(about))
        self.about = about

    def __enter__(self) -> Draft:
        """Raises WrongUse when OUT.partial belongs to another replay or another process is writing it."""
        begun = self.path / BEGUN
        if self.path.exists() and not begun.is_file() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise WrongUse(f"{self.path}: not a replay that can go on; choose another -o, or remove it")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("w")
        if not _locked(self._lock.fileno()):
            self._lock.close()
            raise WrongUse(f"{self.path}: another replay is writing it; wait for it, or choose another -o")
        try:
            if begun.is_file():
                self._go_on(begun)
            else:
                write_json(begun, self.about)
            self._parts.mkdir(exist_ok=True)
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """What nothing was done in leaves nothing behind."""
        if self.path.is_dir() and not any(self._parts.glob("*/*.json")):
            shutil.rmtree(self.path)
        self._lock.close()

    def finish(self, tasks: list[Task], ids: list[str], also: Callable[[Path], None]) -> None:
        """The parts become OUT, at once and whole; `also` may add to it before it has its name."""
        whole = self.path / "run"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        floors = merge(self.parts, whole, tasks, ids)
        also(whole)
        found = {"noise_floor": floors, "tables": tables_of(whole)}
        write_json(whole / "run.json", self.about | found)
        _sync(whole)
        whole.rename(self.out)
        _sync(self.out.parent)
        shutil.rmtree(self.path, ignore_errors=True)  # where a worker of a driver that was killed may be writing still

    def _go_on(self, file: Path) -> None:
        """Only with what was begun by the same version, for the same trace, policies and options."""
        try:
            begun = from_json(file.read_text("utf-8"))
        except ValueError:
            raise WrongUse(f"{file}: altered, so nothing can go on from it; choose another -o, or remove {self.path}") from None
        check_same(begun, self.about, self.path)
        self.about = begun


def check_same(begun: Any, about: dict[str, Any], where: Path | S3Path) -> None:
    """Raises WrongUse unless what was begun is what is asked for now."""
    now = _identity(about)
    try:
        before = _identity(begun)
    except AttributeError:
        raise WrongUse(f"{where / BEGUN}: altered, so nothing can go on from it; choose another -o, or remove {where}") from None
    if differ := [k for k in now if before.get(k) != now[k]]:
        raise WrongUse(
            f"{where}: begun with another {', another '.join(differ)}; repeat that replay to finish it, choose another -o,"
            " or remove it"
        )


def draft(out: Path | S3Path, about: dict[str, Any]) -> Draft:
    """Of a run in a folder, or on object storage."""
    if isinstance(out, Path):
        return Draft(out, about)
    from kvsim.replay.remote import RemoteDraft

    return RemoteDraft(out, about)


def complete(out: Path | S3Path) -> bool:
    return (out / "run.json").is_file()


def partial(out: Path | S3Path) -> Path | S3Path:
    return out.with_name(out.name + ".partial")


def write_json(file: Path, content: dict[str, Any]) -> None:
    aside = file.with_name(f".{file.name}")
    with aside.open("w", encoding="utf-8") as f:
        json.dump(content, f, indent=1, ensure_ascii=False)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    aside.replace(file)


def _identity(about: dict[str, Any]) -> dict[str, Any]:
    """All that the tables depend on, by the name a user knows it by."""
    trace, options = about.get("trace") or {}, about.get("options") or {}
    policies = [(p.get("id"), p.get("version"), p.get("role"), p.get("beside")) for p in about.get("policies") or []]
    names = {"policies": "set of policies (-p or --baselines)", "kvsim": "version of kvsim", "kv_dtype": "--kv-dtype"}
    return {
        "trace": trace.get("sha256"),
        names["kvsim"]: about.get("kvsim"),
        names["policies"]: policies,
        names["kv_dtype"]: about.get("kv_dtype"),
    } | {f"--{name}": options.get(name) for name in ("requests", "layers", "steps", "plans", "explain", "allocator")}


def key(about: dict[str, Any]) -> str:
    """The hash that names the parts of a run: of all that decides what stands in them, and of the library that writes them."""
    identity = _identity(about) | {"pyarrow": pa.__version__}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def tables_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Bytes and sha256 of every table, so that one that was altered is not believed."""
    found = {}
    for file in sorted(folder.glob("*.parquet")):
        with file.open("rb") as f:
            found[file.stem] = {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
    return found


def _locked(handle: int) -> bool:
    """Whether this process now holds the file; the lock ends with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
