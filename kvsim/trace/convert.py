"""`kvsim trace convert`: arrays that another tool saved -> a trace, refused by name where they do not make one.

A dump is one request. `layers.3.q` and the like are arrays of layer 3, a leading axis of 1 allowed; everything else is a fact, of
all layers (`scale`) or of one (`layers.3.scale`)."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvsim
from kvsim.errors import BadTrace, KvsimError, WrongUse, in_a_line
from kvsim.geometry import ITEMSIZE
from kvsim.npz import DAMAGED
from kvsim.trace.bits import RAW
from kvsim.trace.check import check_trace
from kvsim.trace.dump import BFLOAT16, Saved, open_dump
from kvsim.trace.write import TraceWriter

ARRAYS = {"q": 3, "k": 3, "v": 3, "out": 3, "k_pre": 3, "lse": 2, "mass": 2, "wo_norm": 2}  # of a layer, with their axes
FACTS = ("scale", "softcap", "window", "sinks", "rope", "row_bytes")  # of a layer, or of all
REQUEST = ("prompt_tokens", "token_ids", "roles", "mode", "model")
FLOATS = {RAW["float16"]: "float16", RAW["float32"]: "float32", BFLOAT16: "bfloat16"}
_NAME = re.compile(r"layers\.(\d+)\.(\w+)")

UNKNOWN = json.dumps({"kind": "unknown"})

Row = dict[str, Any]


class Sizes(NamedTuple):
    """Of one layer: Hq, Hkv, tokens T, queries n, dk, dv."""

    q_heads: int
    kv_heads: int
    tokens: int
    queries: int
    key_dim: int
    value_dim: int


def convert(dumps: Sequence[str | Path], out: str | Path, compression: str = "none") -> Path:
    """Write the trace `out`, a request of each dump in their order. It appears under its name when `kvsim trace check` has nothing to say of it.

    Raises BadTrace: an array or fact that is missing, unknown or of another shape or dtype, outputs that are not attention over q, k
    and v; WrongUse: no such file, or a place that is taken."""
    out = Path(out)
    if out.exists():
        raise WrongUse(f"{out}: there is something already; write to a new folder, or remove it first")
    given = [_Dump(str(path), open_dump(path)) for path in dumps]
    first = given[0]
    for other in given[1:]:
        if (other.dtype, other.layers) != (first.dtype, first.layers):
            raise BadTrace(
                f"{other.name}: its layers, their facts or its dtype are not those of {first.name}; expected one model"
            )
    tool = {"tool": "kvsim trace convert", "versions": {"kvsim": kvsim.__version__, "python": platform.python_version()}}
    tool |= {"layers": [row["layer"] for row in first.layers], "heads": "all", "steps": "all"}
    try:
        with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
            made = Path(folder) / out.name
            requests = [d.request(i) for i, d in enumerate(given)]
            with TraceWriter(
                made, first.dtype, {"model": first.text("model")}, tool, requests, first.layers, compression
            ) as trace:
                for i, d in enumerate(given):
                    d.write(trace, i)
            for problem in check_trace(made):
                raise BadTrace(problem.replace(f"{made}", out.name))
            made.rename(out)
    except OSError as e:
        raise KvsimError(f"{out}: writing failed ({e})") from e
    return out


class _Dump:
    """One dump, looked through: its layers and dtype, and what to write of it."""

    def __init__(self, name: str, saved: Saved) -> None:
        self.name, self.saved = name, saved
        for key in saved:
            m = _NAME.fullmatch(key)
            if (m[2] not in (*ARRAYS, *FACTS)) if m else key not in (*FACTS, *REQUEST):
                known = f"layers.N.({'|'.join(ARRAYS)}), {', '.join((*FACTS, *REQUEST))}"
                raise BadTrace(f"{name}: {key!r} means nothing here; expected {known}")
        names = [m for m in map(_NAME.fullmatch, saved) if m and m[2] in ARRAYS]
        if not names:
            raise BadTrace(f"{name}: no arrays of any layer; expected layers.0.q, layers.0.k, layers.0.v and so on")
        self.kinds = {m[0]: (x.shape, x.dtype) for m in names for x in [self._array(int(m[1]), m[2])]}
        self.prompt = int(self._number("prompt_tokens", needed=True))
        self.sizes = {i: self._sizes(i) for i in sorted({int(m[1]) for m in names})}
        self.tokens = next(iter(self.sizes.values())).tokens
        dtypes = {self._dtype(m[0]) for m in names if ARRAYS[m[2]] == 3}
        if len(dtypes) != 1:
            raise BadTrace(f"{name}: arrays in {', '.join(sorted(dtypes))}; expected one dtype in all layers")
        self.dtype = dtypes.pop()
        self.layers = [self._layer(i, s) for i, s in self.sizes.items()]

    # -------------------------------------------------------------------------------------------- arrays
    def _read(self, key: str) -> NDArray[Any]:
        try:
            return self.saved[key]
        except DAMAGED as e:
            raise BadTrace(f"{self.name}: {key} cannot be read ({in_a_line(e)})") from None

    def _array(self, layer: int, name: str) -> NDArray[Any]:
        """Without a leading axis of 1. Raises BadTrace: of another number of axes."""
        key, axes = f"layers.{layer}.{name}", ARRAYS[name]
        x = self._read(key)
        one = x[0] if x.ndim == axes + 1 and len(x) == 1 else x
        if one.ndim != axes or 0 in one.shape:
            expected = "[heads, tokens, dim]" if axes == 3 else "[heads, tokens]"
            raise BadTrace(f"{self.name}: {key} is {list(x.shape)}; expected {expected} of one sequence, nothing empty")
        return one

    def _shape(self, layer: int, name: str) -> tuple[int, ...]:
        key = f"layers.{layer}.{name}"
        if key not in self.kinds:
            raise BadTrace(f"{self.name}: {key} is missing; every layer needs q, k and v")
        return self.kinds[key][0]

    def _sizes(self, layer: int) -> Sizes:
        q, k, v = (self._shape(layer, name) for name in ("q", "k", "v"))
        queries, keys, prompt = q[:2], k[:2], self.prompt
        if not 1 <= prompt < k[1] or not k[1] - prompt <= q[1] <= k[1]:
            raise BadTrace(
                f"{self.name}: layers.{layer} has queries of the last {q[1]} of {k[1]} tokens, a prompt of {prompt}; expected a prompt, "
                "decode steps after it, and the queries of all of them"
            )
        expected = {"q": (*queries, k[2]), "v": (*keys, v[2]), "out": (*queries, v[2]), "k_pre": k, "lse": queries}
        expected |= {"mass": (q[0], prompt), "wo_norm": (q[0], k[1])}
        for name, shape in expected.items():
            found = self.kinds.get(f"layers.{layer}.{name}", (shape,))[0]
            if found != shape:
                raise BadTrace(
                    f"{self.name}: layers.{layer}.{name} is {list(found)} beside q {list(q)} and k {list(k)}; expected {list(shape)}"
                )
        return Sizes(q[0], k[0], k[1], q[1], k[2], v[2])

    def _dtype(self, key: str) -> str:
        kind = self.kinds[key][1]
        if kind not in FLOATS:
            raise BadTrace(
                f"{self.name}: {key} is {kind}; expected float32, float16, or bfloat16 (BF16 of safetensors, V2 of numpy)"
            )
        return FLOATS[kind]

    # -------------------------------------------------------------------------------------------- facts
    def _fact(self, name: str, layer: int | None = None) -> NDArray[Any] | None:
        """Of the layer, else of all."""
        names = (name,) if layer is None else (f"layers.{layer}.{name}", name)
        return next((self._read(n) for n in names if n in self.saved), None)

    def _number(self, name: str, layer: int | None = None, needed: bool = False) -> Any:
        x = self._fact(name, layer)
        if x is None and needed:
            of = "" if layer is None else f" or layers.{layer}.{name}"
            raise BadTrace(f"{self.name}: {name}{of} is missing; expected a number, which nothing else tells")
        try:
            return None if x is None else float(x.item())
        except (ValueError, TypeError):
            raise BadTrace(f"{self.name}: {name} is {x}; expected one number") from None

    def _numbers(self, name: str, kind: type, layer: int | None = None) -> list[Any] | None:
        x = self._fact(name, layer)
        if x is not None and x.dtype.kind not in "iuf":
            raise BadTrace(f"{self.name}: {name} is {x.dtype}; expected numbers")
        return None if x is None else np.ravel(x).astype(kind).tolist()

    def text(self, name: str, layer: int | None = None) -> str | None:
        x = self._fact(name, layer)
        return None if x is None else str(x)

    def _layer(self, layer: int, s: Sizes) -> Row:
        window, row_bytes, rope = self._number("window", layer), self._number("row_bytes", layer), self.text("rope", layer)
        return {
            "layer": layer,
            "kind": "full" if window is None else "sliding",
            "q_heads": s.q_heads,
            "kv_heads": s.kv_heads,
            "key_dim": s.key_dim,
            "value_dim": s.value_dim,
            "scale": self._number("scale", layer, needed=True),
            "softcap": self._number("softcap", layer),
            "window": None if window is None else int(window),
            "sinks": self._numbers("sinks", float, layer),
            # Keys that no rope was told for are turned in a way not known; only "none" makes them keys before RoPE.
            "rope": UNKNOWN if rope is None else None if rope == "none" else rope,
            "row_bytes": int(row_bytes or (s.key_dim + s.value_dim) * ITEMSIZE[self.dtype]),
            "kv_source_layer": None,
            "captured": True,
        }

    def request(self, i: int) -> Row:
        return {
            "request": i,
            "prompt_tokens": self.prompt,
            "total_tokens": self.tokens,
            "mode": self.text("mode") or "greedy",
            "token_ids": self._numbers("token_ids", int),
            "roles": self._numbers("roles", int),
            "spans": [],
        }

    # -------------------------------------------------------------------------------------------- rows
    def write(self, trace: TraceWriter, i: int) -> None:
        """Request i, layer after layer, so that one layer at a time is in memory."""
        for layer, s in self.sizes.items():
            of = {name: self._array(layer, name) for name in ARRAYS if f"layers.{layer}.{name}" in self.kinds}
            raw = {name: x.view(RAW[self.dtype]) for name, x in of.items() if ARRAYS[name] == 3}
            steps = np.arange(s.tokens - s.queries, s.tokens) - self.prompt
            out, lse, window = raw.get("out"), of.get("lse"), self._number("window", layer)
            trace.kv(i, layer, 0, raw["k"], raw["v"], raw.get("k_pre"))
            trace.q(
                i,
                layer,
                steps,
                raw["q"].swapaxes(0, 1),
                None if out is None else out.swapaxes(0, 1),
                None if lse is None else lse.T,
            )
            if "mass" in of:
                trace.prefill(i, layer, of["mass"], np.minimum(np.arange(self.prompt, 0, -1), window or self.prompt).astype(int))
            if "wo_norm" in of:
                trace.values(i, layer, 0, of["wo_norm"])
