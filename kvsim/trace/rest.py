"""What an earlier capture left in a folder, so that another may go on: finished requests stay, half-written ones go."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.errors import BadTrace, WrongUse
from kvsim.tables import LAYERS, REQUESTS
from kvsim.trace.closing import replacing
from kvsim.trace.folder import AGAIN, TABLE, Key, draft_of, read_journal, read_rows, segment_of

Row = Mapping[str, Any]
Files = dict[str, dict[str, Any]]
OWN = ("created", "seed")  # what may differ between the captures of one trace


@dataclass(frozen=True)
class Rest:
    requests: Sequence[Row]  # finished, of the table `requests`
    files: Files  # closed and kept: {bytes, sha256, rows}
    parts: dict[str, int]  # the next number of a segment in each folder
    ends: dict[Key, int]  # the position after the last one written
    created: str


def rest_of(root: Path, draft: Row, layers: Sequence[Row]) -> Rest | None:
    """What stays of the trace in `root`, a manifest as known before it completes and the layers given as another capture would
    begin with; None where there is nothing. All else that a capture had written is removed, the journal last of what is kept.

    Raises WrongUse: something else is there, or a trace of another capture; BadTrace: its journal and its files disagree."""
    journal = root / "journal.jsonl"
    if not journal.exists():
        if any(root.iterdir()):
            raise WrongUse(f"{root}: there is something already, and no capture's journal; write to a new folder")
        return None
    closed = _closed(root, read_journal(journal, journal.read_bytes()))
    if "layers/part-0.parquet" not in closed:
        _sweep(root, {})
        return None
    written = segment_of("layers/part-0.parquet", root / "layers/part-0.parquet", closed["layers/part-0.parquet"])
    created = _same(root, draft, draft_of(written), layers, read_rows([written], LAYERS))
    finished = _finished(root, closed)
    kept = {name: entry for name, entry in closed.items() if (r := _request(name)) is None or r in finished}
    _sweep(root, kept)
    return Rest(
        requests=list(finished.values()),
        files={name: {k: entry[k] for k in ("bytes", "sha256", "rows")} for name, entry in kept.items()},
        parts=_parts(kept),
        ends=_ends(kept),
        created=created,
    )


def _closed(root: Path, listed: Files) -> Files:
    """The files of the journal that are there, which all are but descriptions of requests that newer ones replaced. Raises BadTrace."""
    found = {}
    for name, entry in listed.items():
        file = root / name
        if file.is_file() and file.stat().st_size == entry["bytes"]:
            found[name] = entry
        elif TABLE.fullmatch(name) is None or not name.startswith("requests/"):
            raise BadTrace(f"{file}: not as the journal lists it, {entry['bytes']} bytes; {AGAIN}")
    return found


def _finished(root: Path, closed: Files) -> dict[int, Row]:
    """The requests of a complete trace, and those that have their tokens, by id."""
    file = root / "manifest.json"
    sealed = json.loads(file.read_bytes())["files"] if file.exists() else {}
    found: dict[int, Row] = {}
    for name in (name for name in closed if name.startswith("requests/")):
        rows = read_rows([segment_of(name, root / name, closed[name])], REQUESTS)
        found |= {row["request"]: row for row in rows if name in sealed or row["token_ids"] is not None}
    return found


def _same(root: Path, mine: Row, theirs: Row, layers: Sequence[Row], written: Sequence[Row]) -> str:
    """When the capture there was begun, if it was of the same kind. Raises WrongUse."""
    before, now = _flat(theirs), _flat(json.loads(json.dumps(mine)))
    for what in sorted(before.keys() | now.keys()):
        if before.get(what) != now.get(what):
            told = f"{what} {before.get(what)!r} there, {now.get(what)!r} now"
            raise WrongUse(f"{root}: another capture: {told}; go on as it was begun, or write to another folder")
    if [dict(x) for x in written] != [{c: x.get(c) for c in LAYERS.names} for x in layers]:
        raise WrongUse(
            f"{root}: another capture: its layers are not those of this model; go on as it was begun, or write to another folder"
        )
    return str(theirs["created"])


def _flat(manifest: Row, name: str = "") -> dict[str, Any]:
    """{place: value} of what must be the same in all captures of one trace."""
    found: dict[str, Any] = {}
    for key, value in manifest.items():
        if key not in OWN:
            found |= _flat(value, f"{name}{key} ") if isinstance(value, dict) else {f"{name}{key}": value}
    return found


def _sweep(root: Path, kept: Files) -> None:
    """The journal with the lines of what is kept; then everything else that a capture writes is removed."""
    with replacing(root / "journal.jsonl", durable=True) as f:
        f.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in kept.values()))
    for file in list(root.rglob("*.parquet*")):
        name = file.relative_to(root).as_posix()
        if name not in kept and TABLE.fullmatch(name.removesuffix(".tmp")):
            file.unlink()


def _request(name: str) -> int | None:
    found = TABLE.fullmatch(name)
    return int(found[3]) if found and found[2] else None


def _parts(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for folder, file in (name.rsplit("/", 1) for name in names):
        found[folder] = max(found.get(folder, 0), int(file.split("-")[1].split(".")[0]) + 1)
    return found


def _ends(kept: Files) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for name, entry in kept.items():
        match = TABLE.fullmatch(name)
        if match and match[2]:
            key = (match[2], int(match[3]), int(match[4]))
            found[key] = max(found.get(key, 0), int(entry["last"]) + 1)
    return found
