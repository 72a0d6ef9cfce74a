"""Arrays that somebody saved, by name: a .npz or .safetensors file, or a folder of them. Read with numpy alone, never unpickled."""

from __future__ import annotations

import struct
from collections import ChainMap, Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import BadTrace, WrongUse, in_a_line
from kvsim.npz import DAMAGED
from kvsim.places import from_json

Saved = Mapping[str, NDArray[Any]]

BFLOAT16 = np.dtype("V2")  # numpy has none: two bytes without a meaning, as arrays of ml_dtypes are saved too
_SAFETENSORS = {"BF16": BFLOAT16} | {  # https://huggingface.co/docs/safetensors: the header of a file
    name: np.dtype(kind)
    for name, kind in (
        ("F16", "<f2"),
        ("F32", "<f4"),
        ("F64", "<f8"),
        ("I32", "<i4"),
        ("I64", "<i8"),
        ("U8", "u1"),
        ("BOOL", "?"),
    )
}


def open_dump(path: str | Path) -> Saved:
    """The arrays of a file, or of all files of a folder; each is read when it is asked for. Text in a safetensors file's metadata
    is an array of one string. Raises WrongUse: no such file; BadTrace: not what its name says, or a name in two files."""
    path = Path(path)
    files = sorted(p for p in path.iterdir() if p.suffix in _READERS) if path.is_dir() else [path]
    if not files or not all(f.is_file() and f.suffix in _READERS for f in files):
        raise WrongUse(f"{path}: expected a .npz or .safetensors file, or a folder of them")
    found = [_READERS[file.suffix](file) for file in files]
    twice = [name for name, n in Counter(name for each in found for name in each).items() if n > 1]
    if twice:
        raise BadTrace(f"{path}: {twice[0]!r} is in more than one of its files; expected every name once")
    return ChainMap(*found)  # type: ignore[arg-type]  # never written to


def _npz(file: Path) -> Saved:
    try:
        found = np.load(file, allow_pickle=False)
    except DAMAGED as e:
        raise BadTrace(f"{file}: not a .npz file ({in_a_line(e)}); save it with numpy.savez") from None
    if not isinstance(found, Mapping):
        raise BadTrace(f"{file}: one array without a name; save several by name with numpy.savez")
    return found


def _safetensors(file: Path) -> Saved:
    data = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)
    try:
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = from_json(data[8 : 8 + length].tobytes())
        texts = {name: np.array(text) for name, text in header.pop("__metadata__", {}).items()}
        return texts | {name: _tensor(data[8 + length :], **entry) for name, entry in header.items()}
    except (struct.error, ValueError, TypeError, AttributeError) as e:
        raise BadTrace(f"{file}: not a .safetensors file, or one that was cut ({in_a_line(e)})") from None


def _tensor(data: NDArray[np.uint8], dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> NDArray[Any]:
    if dtype not in _SAFETENSORS:
        raise ValueError(f"a tensor of {dtype}; expected one of {', '.join(_SAFETENSORS)}")
    return data[slice(*data_offsets)].view(_SAFETENSORS[dtype]).reshape(shape)


_READERS = {".npz": _npz, ".safetensors": _safetensors}
