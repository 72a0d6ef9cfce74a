"""Odd bytes, odd text and odd JSON out of good ones. All randomness comes from the `rng` given, so a case can be made again."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

NUMBERS = (0, 1, -1, 2**31, -(2**31), 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf"))
TEXTS = (
    "",
    "0",
    "../../etc/passwd",
    "/etc/passwd",
    "..\\x",
    "\0",
    "\x1b[2J",
    "<script>alert(1)</script>",
    "é" * 300,
    "x" * 100_000,
    "NaN",
    "1e999",
)
BYTES = (b"\0", b"\xff", b"\xff\xfe", b"\r\n", b'"', b",", b"[" * 5000, b"9" * 400, b"1e999", b"\xed\xa0\x80", b"%s", b"{}")  # fmt: skip
COUNTS = (
    "0",
    "1",
    "2",
    "3",
    "5",
    "7",
    "8",
    "13",
    "16",
    "36",
    "37",
    "38",
    "57",
    "1000",
    "0.5",
    "0.999",
    "1e-9",
    "4294967297",
    "1e15",
)
SIGNS = (
    *"()[]{}=,.:*'\"\n#<>@-",
    ">>",
    "**",
    "lambda: ",
    "__import__('os')",
    "9" * 30,
    "1e999",
    "nan",
    "(" * 60,
    "²",
    "\u202e",
    "if",
    "None",
    "True",
    "x" * 300,
)


def bent(rng: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One to four changes: bits, runs, cuts, repeats, insertions, pieces of `others`."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, n = (rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 64, 1024)))
        match rng.randrange(8):
            case 0 if data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + data[at + n :]
            case 3:
                data = data[:at] + data[at : at + n] * 2 + data[at + n :]
            case 4:
                data = data[:at] + rng.choice(BYTES) + data[at:]
            case 5:
                data = data[:at] + rng.randbytes(n) + data[at + n :]
            case 6 if others:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                data = data[:at] + other[start : start + n] + data[at + n :]
            case 7:
                data = data[at:] + data[:at]
    return data


def reworded(rng: Random, text: str, corpus: Sequence[str]) -> str:
    """One to four changes of a text: signs put in, taken out or doubled, words of `corpus` in the place of others."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, n = rng.randrange(len(text) + 1), rng.choice((1, 1, 2, 8))
        match rng.randrange(5):
            case 0:
                text = text[:at] + rng.choice(SIGNS) + text[at:]
            case 1:
                text = text[:at] + text[at + n :]
            case 2:
                text = text[:at] + text[at : at + n] * 2 + text[at + n :]
            case 3:
                other = rng.choice(corpus)
                start = rng.randrange(len(other) + 1)
                text = text[:at] + other[start : start + rng.choice((4, 16, 400))] + text[at + n :]
            case 4:
                old, new = rng.sample(("0", "1", ",", "(", ")", "=", " ", "'", "tokens", "share"), 2)
                text = text.replace(old, new)
    return text


def renumbered(rng: Random, text: str) -> str:
    """One or two numbers of a text are others."""
    for _ in range(rng.choice((1, 1, 2))):
        places = list(re.finditer(r"\d+(\.\d+)?", text))
        if places:
            at = rng.choice(places)
            text = text[: at.start()] + rng.choice(COUNTS) + text[at.end() :]
    return text


def altered(rng: Random, value: Any) -> Any:
    """JSON with one value changed, renamed, taken out or repeated, somewhere inside."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        match rng.randrange(6):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {(rng.choice(TEXTS) if k == key else k): v for k, v in value.items()}
            case _:
                return value | {key: altered(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        match rng.randrange(5):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], altered(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and rng.random() < 0.5:
        return reworded(rng, value, TEXTS)
    return _other(rng)


def huge(arrays: Mapping[str, Any], name: str) -> bytes:
    """A .npz of these arrays, of which one says that it is longer than any machine could hold."""
    to, header = io.BytesIO(), io.BytesIO()
    np.savez(to, **{n: x for n, x in arrays.items() if n != name})
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**30, 2**10)})
    with zipfile.ZipFile(to, "a") as file:
        file.writestr(f"{name}.npy", header.getvalue())
    return to.getvalue()


def _other(rng: Random) -> Any:
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(NUMBERS), lambda: rng.choice(TEXTS), lambda: None, list, dict, lambda: True, lambda: [[[]]] * 9,
    )  # fmt: skip
    return rng.choice(kinds)()
