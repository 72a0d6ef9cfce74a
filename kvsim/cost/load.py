"""Profilers' exports -> one table of samples, and an account of everything that did not become a row."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from kvsim.cost.classes import load_rules
from kvsim.cost.gate import marked
from kvsim.cost.hardware import Gpu, named_gpu
from kvsim.cost.heads import read_geometry
from kvsim.cost.probe import device_of
from kvsim.cost.readers import aic, kineto, llmservingsim, ncu, nsys, proton
from kvsim.cost.readers.found import Found, Told
from kvsim.cost.samples import STATUSES, frame, read_samples
from kvsim.cost.shaped import shaped
from kvsim.errors import BadProfile, WrongUse

FORMATS = ("ncu", "nsys", "nsys-sqlite", "kineto", "proton", "aic", "llmservingsim", "samples")


@dataclass(frozen=True)
class Loaded:
    """Samples, and per file what `kvsim cost import` prints: rows by status, what was left out and why, the unclassed share."""

    samples: pl.DataFrame
    files: list[dict[str, Any]]


def load(
    paths: Iterable[str | Path],
    format: str = "auto",
    *,
    gpu: str | None = None,
    geometry: str | Path | None = None,
    classes: str | Path | None = None,
    batch: int | None = None,
    context: int | None = None,
    cache: str | None = None,
    pages: int | None = None,
    page: int | None = None,
) -> Loaded:
    """Reads each file with its reader and marks rows that cannot be true. Raises BadProfile or WrongUse with file, row and column.

    batch, context, pages of page tokens, cache and geometry say what a file does not; a GPU (default: the one the file names) gives
    the limits of the gate."""
    if format not in ("auto", *FORMATS):
        raise WrongUse(f"unknown format {format!r}: one of auto, {', '.join(FORMATS)}")
    told = Told("", load_rules(classes), read_geometry(geometry) if geometry else None, batch, context, cache)
    card = named_gpu(gpu) if gpu else None
    parts, files = [], []
    for path in map(Path, paths):
        samples, about = _one(path, format, told, card)
        parts.append(shaped(samples, told, pages, page))
        files.append(about)
    return Loaded(pl.concat(parts) if parts else frame([]), files)


def _one(path: Path, format: str, told: Told, card: Gpu | None) -> tuple[pl.DataFrame, dict[str, Any]]:
    raw = path.read_bytes()
    sha = hashlib.sha256(raw).hexdigest()
    kind = format if format != "auto" else detect(path, raw)
    found = _read(path, raw, kind, replace(told, label=f"{path.name}@{sha[:8]}"))
    samples = found if isinstance(found, pl.DataFrame) else frame(found.rows)
    about = Found() if isinstance(found, pl.DataFrame) else found
    card = card or _own_gpu(samples, about)
    samples = marked(samples, card)
    if card:
        samples = samples.with_columns(pl.col("gpu").fill_null(card.name))
    counts = dict(samples["status"].value_counts().iter_rows())
    return samples, {
        "file": path.name, "sha256": sha, "format": kind, "gpu": card.name if card else None,
        "rows": {s: counts.get(s, 0) for s in STATUSES}, "left_out": {k: n for k, n in sorted(about.left_out.items()) if n},
        "unclassed_share": about.unclassed_share, "facts": about.facts, "notes": about.notes,
    }  # fmt: skip


def _own_gpu(samples: pl.DataFrame, found: Found) -> Gpu | None:
    """The GPU that a file names, if it is one and we know it."""
    names = {n for n in [found.facts.get("name"), *samples["gpu"].unique()] if isinstance(n, str) and n}
    try:
        return device_of(names.pop(), samples) if len(names) == 1 else None
    except WrongUse:
        return None


def detect(path: Path, raw: bytes) -> str:
    """The format of a file by what is in it. Raises BadProfile for an unknown one."""
    head = _text(raw, path.name)[:4000] if raw[:4] != b"PAR1" and not raw.startswith(nsys.SQLITE) else ""
    if raw.startswith(nsys.SQLITE):
        return "nsys-sqlite"
    if raw[:4] == b"PAR1" and aic.knows(list(pl.read_parquet_schema(path))):
        return "aic"
    first = head.split("\n")[0].strip()
    if first.startswith("class,variant,"):
        return "samples"
    if llmservingsim.knows(first):
        return "llmservingsim"
    if aic.knows(first.split(",")):
        return "aic"
    if head.lstrip()[:1] in ("{", "["):
        return _json_kind(path, raw)
    return _csv_kind(path, _text(raw, path.name))


def _json_kind(path: Path, raw: bytes) -> str:
    trace = kineto.parse(_text(raw, path.name), path.name)
    if proton.knows(trace):
        return "proton"
    if (isinstance(trace, dict) and "traceEvents" in trace) or isinstance(trace, list):
        return "kineto"
    raise BadProfile(_unknown(path))


def _csv_kind(path: Path, text: str) -> str:
    """The program's own output may stand before the header."""
    if nsys.knows(text):
        return "nsys"
    if ncu.knows(text):
        return "ncu"
    raise BadProfile(_unknown(path))


def _unknown(path: Path) -> str:
    return f"{path.name}: of no format that kvsim reads; name it with --format ({', '.join(FORMATS)})"


def _read(path: Path, raw: bytes, kind: str, told: Told) -> Found | pl.DataFrame:
    match kind:
        case "ncu":
            return ncu.read(_text(raw, path.name), told)
        case "nsys":
            return nsys.read(_text(raw, path.name), told)
        case "nsys-sqlite":
            return nsys.read_sqlite(path, told)
        case "kineto":
            return kineto.read(kineto.parse(_text(raw, path.name), told.label), told)
        case "proton":
            return proton.read(kineto.parse(_text(raw, path.name), told.label), told)
        case "aic":
            return aic.read(path, told)
        case "llmservingsim":
            return llmservingsim.read(_text(raw, path.name), told)
        case _:
            return read_samples(path)


def _text(raw: bytes, name: str) -> str:
    """Bytes that are no UTF-8 become replacement characters: they are in names that nothing depends on."""
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError) as e:
            raise BadProfile(f"{name}: gzipped, and cut short or damaged ({e})") from None
    return raw.decode("utf-8-sig", errors="replace")


def lines(found: Loaded) -> list[str]:
    """What `kvsim cost import` says: a line a file, then what it left out and why, indented."""
    said = []
    for about in found.files:
        rows = ", ".join(f"{n} {s}" for s, n in about["rows"].items() if n) or "no rows"
        said.append(f"{about['file']}: {about['format']}, {about['gpu'] or 'GPU unknown'}: {rows}")
        said += [f"  left out: {n} {why}" for why, n in about["left_out"].items()]
        if about["unclassed_share"]:
            said.append(f"  unclassed: {about['unclassed_share']:.1%} of kernel time; name those kernels with --classes")
        said += [f"  {note}" for note in about["notes"]]
    return said
