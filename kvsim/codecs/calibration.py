"""Calibration files: numbers that a codec needs from other data than it codes (rotations, levels, ranges), and where they came from.

An .npz without pickles: arrays, and "about", a JSON text: schema, kind (whose numbers), options it was made with, trace {id, sha256}; also
kvsim (its version), model, computed (what the arrays are, in words), layers, requests, contexts (digests of their prompts)."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import WrongUse, in_a_line
from kvsim.npz import DAMAGED

SCHEMA = "kvsim.calibration/1"
SAID: dict[str, type] = {
    "kind": str,
    "options": dict,
    "trace": dict,
    "traces": list,
    "contexts": list,
    "layers": list,
}  # in "about"
MAKE = "kvsim calibrate TRACE -p POLICY -o FILE makes one"


@dataclass(frozen=True)
class Sample:
    """The rows of one layer that numbers are learned from, f64: keys and values [Hkv, n, d] of every token, queries [Hkv, m, d] of the captured
    steps, those of a kv head's group one after the other; keys_pre [Hkv, n, d] before RoPE, or None where the trace has none."""

    keys: NDArray[np.float64]
    values: NDArray[np.float64]
    queries: NDArray[np.float64]
    keys_pre: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Calibration:
    """A file as it was read; two are equal when their bytes are."""

    path: str = field(compare=False)
    digest: str  # sha256 of its bytes, 12 digits
    about: dict[str, Any] = field(compare=False, repr=False)
    arrays: dict[str, NDArray[np.float64]] = field(compare=False, repr=False)

    def array(self, name: str, layer: int, head: int | None = None) -> NDArray[np.float64]:
        """The array of that name, of one kv head where it has one for each. Raises WrongUse for a layer or head it does not cover."""
        if name not in self.arrays:
            there = sorted({int(n.split(".")[0]) for n in self.arrays})
            raise WrongUse(f"calibration {self.path}: nothing for layer {layer}, it covers the layers {there}; {MAKE}")
        x = self.arrays[name]
        if head is not None and head >= len(x):
            raise WrongUse(f"calibration {self.path}: layer {layer} has {len(x)} kv heads there, and {head} is another")
        return x if head is None else x[head]


def load(name: str) -> Calibration:
    """name: a path, or PATH@ and the first 12 digits of its sha256. Raises WrongUse for what is no calibration file, or has other digits."""
    path, at, digits = name.rpartition("@")
    if not at or not re.fullmatch("[0-9a-f]{12}", digits):
        path, digits = name, hashlib.sha256(_bytes(name)).hexdigest()[:12]
    return _read(path, digits)


@functools.lru_cache(maxsize=8)
def _read(path: str, digest: str) -> Calibration:
    raw = _bytes(path)
    if (found := hashlib.sha256(raw).hexdigest()[:12]) != digest:
        raise WrongUse(
            f"calibration {path}: its sha256 begins with {found}, expected {digest}: another file; name it without @{digest}"
        )
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as file:
            if sum(x.file_size for x in file.zip.infolist()) > len(raw):
                raise ValueError("compressed, which kvsim calibrate does not do")
            about = json.loads(str(file["about"]))
            arrays = {name: _numbers(name, file[name]) for name in file.files if name != "about"}
    except DAMAGED as e:
        raise WrongUse(f"calibration {path}: not a calibration file ({in_a_line(e)}); {MAKE}") from None
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise WrongUse(f"calibration {path}: not of schema {SCHEMA}; {MAKE}")
    for key, kind in SAID.items():
        if not isinstance(about.setdefault(key, kind()), kind):
            raise WrongUse(f"calibration {path}: {key} is {about[key]!r}, expected a {kind.__name__}; {MAKE}")
    return Calibration(path, digest, about, arrays)


def _numbers(name: str, x: NDArray[Any]) -> NDArray[np.float64]:
    """The array as float64. Raises ValueError for one that no layer has, and for what is no number."""
    if not re.fullmatch(r"[0-9]{1,9}\.[a-z.]+", name):
        raise ValueError(f"an array called {name!r}, expected LAYER.NAME")
    if x.ndim == 0 or x.dtype.kind not in "fiu" or not np.isfinite(x).all():
        raise ValueError(f"{name} is no array of numbers")
    return x.astype(np.float64)


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise WrongUse(f"calibration {path}: {e.strerror or e}; {MAKE}") from None


def save(path: Path, about: dict[str, Any], arrays: dict[str, NDArray[np.float64]]) -> None:
    """The same bytes for the same numbers."""
    text = json.dumps({"schema": SCHEMA} | about, sort_keys=True)
    with path.open("wb") as file:
        np.savez(file, about=np.array(text), **{name: x.astype(np.float32) for name, x in sorted(arrays.items())})  # type: ignore[arg-type]  # its stub takes the arrays for the flag that comes before them
