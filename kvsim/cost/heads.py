"""The heads of a model, which no profiler's export holds: bytes of a layer's cache follow from them."""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kvsim.errors import WrongUse

BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "float8": 8,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8": 8,
    "int4": 4,
}


@dataclass(frozen=True)
class Geometry:
    """Of every layer alike: `--geometry` of the commands. dtype is that of the cache."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str

    @property
    def kv_bits(self) -> int:
        return BITS[self.dtype]

    def decode_bytes(self, batch: int, tokens: int) -> int:
        """Bytes one layer reads and writes in a decode step of `batch` requests that hold `tokens` tokens in all."""
        return attention_bytes(batch, tokens, self.q_heads, self.kv_heads, self.head_dim, self.value_dim, self.kv_bits)


def attention_bytes(batch: int, tokens: int, q_heads: int, kv_heads: int, key_dim: int, value_dim: int, kv_bits: int) -> int:
    """K and V of all visible tokens, and the 16-bit queries and outputs.

    Source: cost study, section 3; without its four bytes a page, which tables of timings do not tell."""
    return tokens * kv_heads * (key_dim + value_dim) * kv_bits // 8 + batch * q_heads * (key_dim + value_dim) * 2


def geometry(text: str) -> Geometry:
    """A JSON file, or the id of a model in models.toml (its last part is enough). Raises WrongUse with the nearest one."""
    if Path(text).is_file():
        return read_geometry(text)
    known = tomllib.loads(files("kvsim.cost").joinpath("models.toml").read_text(encoding="utf-8"))
    names = {key.lower(): name for name in known for key in (name, name.split("/")[-1])}
    if text.lower() in names:
        return Geometry(**known[names[text.lower()]])
    near = difflib.get_close_matches(text.lower(), names, 1)
    hint = f"did you mean {names[near[0]]!r}?" if near else f"known are {', '.join(known)}"
    raise WrongUse(
        f"--geometry {text}: no such file, and no model that kvsim knows; {hint} Else write its heads into a JSON file"
    )


def read_geometry(path: str | Path) -> Geometry:
    """A JSON file with layers, q_heads, kv_heads, head_dim, value_dim, dtype. Raises WrongUse for anything else."""
    name = Path(path).name
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise WrongUse(f"{name}: not JSON ({e})") from None
    numbers = ("layers", "q_heads", "kv_heads", "head_dim", "value_dim")
    if not isinstance(given, dict) or not all(type(given.get(n)) is int and given[n] > 0 for n in numbers):
        raise WrongUse(f"{name}: expected whole numbers above 0 for {', '.join(numbers)}, and dtype")
    if given.get("dtype") not in list(BITS):
        raise WrongUse(f"{name}: dtype {given.get('dtype')!r}; expected one of {', '.join(BITS)}")
    if given["q_heads"] % given["kv_heads"]:
        raise WrongUse(f"{name}: {given['q_heads']} query heads do not divide among {given['kv_heads']} kv heads")
    return Geometry(**{n: given[n] for n in numbers}, dtype=given["dtype"])
