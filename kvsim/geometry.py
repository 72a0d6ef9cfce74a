"""The shapes every part agrees on: one layer, one request, and the things a policy may need from a trace."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import WrongUse

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Need:
    """Something a policy must be given beside the live rows it sees; `option` is the capture option that records it."""

    name: str
    option: str = ""
    rows: int = 0

    def __str__(self) -> str:
        return f"{self.name}({self.rows})" if self.rows else self.name


ATTENTION = Need("attention", "--steps N (every decode step)")
TRUTH = Need("truth")
FUTURE = Need("future")
ALL_LAYERS = Need("all_layers", "--layers all")
PREFILL_MASS = Need("prefill_mass", "--prefill-mass")
K_PRE = Need("k_pre", "--k-pre")
WO_NORM = Need("wo_norm", "--wo-norm")
KEY_NORM = Need("key_norm")
KEYS = Need("keys")
VALUES = Need("values")
Q_STATS = Need("q_stats", "--q-stats")
INDEX = Need("index")  # a capture of a model that has an indexer records it
BEFORE = Need("queries_before", "--layers all")  # of the attention layer before
QUERIES = Need("queries", ATTENTION.option)


def Window(rows: int) -> Need:
    """The attention of the last `rows` prompt queries."""
    return Need("window", f"--window-rows {rows}", rows)


@dataclass(frozen=True)
class Layer:
    """One attention layer. `row_bytes` is one token of one kv head, K and V, in the dtype that is billed (`dtype`)."""

    id: int
    kind: str
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    row_bytes: int
    dtype: str
    softcap: float | None = None
    window: int | None = None
    sinks: tuple[float, ...] | None = None
    rope: str | None = None
    kv_source_layer: int | None = None
    captured: bool = True
    shared_row_bytes: int | None = None  # of the one row that all kv heads share (latents); None: each has its own
    index_topk: int | None = None  # to how many tokens the model's own indexer lets a query attend
    among: tuple[int, ...] = ()  # ids of all attention layers of the model, ascending, captured or not

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.q_heads // self.kv_heads

    @property
    def key_bytes(self) -> int:
        """The key's part of `row_bytes`."""
        return self.row_bytes * self.key_dim // (self.key_dim + self.value_dim)

    @property
    def value_bytes(self) -> int:
        return self.row_bytes - self.key_bytes

    def first_visible(self, t: int) -> int:
        """The lowest position that the query at position t sees (keys with pos > t - window)."""
        return 0 if self.window is None else max(0, t - self.window + 1)

    def first_of_each(self, t: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of every position of an array."""
        return np.zeros_like(t) if self.window is None else np.maximum(0, t - self.window + 1)

    def billed(self, dtype: str, captured: str) -> Layer:
        """The same layer with row bytes in another dtype; rows that are not plain K and V (MLA, quantised) keep theirs."""
        plain = (self.key_dim + self.value_dim) * ITEMSIZE[captured]
        rows = self.row_bytes * ITEMSIZE[dtype] // ITEMSIZE[captured] if self.row_bytes == plain else self.row_bytes
        return replace(self, dtype=dtype, row_bytes=rows)

    def rotate(self, keys: NDArray[np.float64], pos: NDArray[np.int64]) -> NDArray[np.float64]:
        """Pre-RoPE keys [n, d] at positions [n] -> keys as attention sees them; angles in float64. Raises WrongUse (rope_problem)."""
        return self._turned(keys, pos, back=False)

    def rotated_back(self, keys: NDArray[np.float64], pos: NDArray[np.int64]) -> NDArray[np.float64]:
        """Keys [n, d] as attention sees them at positions [n] -> before RoPE; the inverse of `rotate`."""
        return self._turned(keys, pos, back=True)

    def mean_turn(self, pos: NDArray[np.int64]) -> NDArray[np.float64]:
        """f64[d, d]: x @ it, for rows x [n, d] before RoPE, is the mean of `rotate(x)` over the positions. Raises WrongUse (rope_problem)."""
        every = np.eye(self.key_dim)
        total: NDArray[np.float64] = sum(self.rotate(every, np.full(len(every), p)) for p in pos)  # type: ignore[assignment]
        return total / len(pos)

    def _turned(self, keys: NDArray[np.float64], pos: NDArray[np.int64], back: bool) -> NDArray[np.float64]:
        if self.rope is None:
            return keys
        if problem := rope_problem(self.rope):
            raise WrongUse(f"layer {self.id}: {problem}")
        spec = json.loads(self.rope)
        d = spec["rotary_dim"]
        if d > keys.shape[1]:
            raise WrongUse(f"layer {self.id}: rope rotates {d} numbers of keys that have {keys.shape[1]}")
        angle = np.asarray(pos)[:, None] * float(spec["theta"]) ** (-np.arange(0, d, 2) / d)
        magnitude = spec.get("magnitude") or 1.0
        c, s = np.cos(angle) * magnitude, np.sin(angle) * magnitude
        if back:
            c, s = c / magnitude**2, -s / magnitude**2
        a, b, out = keys[:, : d // 2], keys[:, d // 2 : d], keys.copy()
        out[:, : d // 2], out[:, d // 2 : d] = a * c - b * s, b * c + a * s
        return out


def rope_problem(rope: str | None) -> str | None:
    """Why keys cannot be rotated again from what a trace says of its RoPE; None when they can."""
    spec = json.loads(rope) if rope else {}
    if not spec:
        return None
    lost = [k for k, kind in (("theta", (int, float)), ("rotary_dim", int)) if not isinstance(spec.get(k), kind)]
    if lost or spec["theta"] <= 0 or spec["rotary_dim"] < 2 or spec["rotary_dim"] % 2:
        return f"rope {rope} does not say theta (above 0) and rotary_dim (even, 2 or more)"
    if spec.get("layout", "half") != "half" or spec.get("scaling") is not None:
        layout, scaling = spec.get("layout", "half"), spec.get("scaling")
        return f"rope layout {layout!r}, scaling {scaling!r}: only layout 'half' without scaling can be applied again"
    return None


@dataclass(frozen=True, eq=False)
class QueryStats:
    """Of a layer's prompt queries before RoPE, per query head: mean f32[Hq, d] and covariance f32[Hq, d, d] over the positions from `first`
    to the prompt's last, `queries` of them (divided by that many)."""

    mean: NDArray[np.float32]
    covariance: NDArray[np.float32]
    first: int
    queries: int


@dataclass(frozen=True, eq=False)
class Indexer:
    """What a layer's learned indexer says, one for all its heads: queries q [N, H, d] and weights w f32[N, H] of the captured decode steps,
    keys k [T, d]. score_fn: the score of a token, "relu_weighted" (sum over heads of w · max(0, q·k)) or "dot" (of w · q·k)."""

    q: NDArray[Any]
    w: NDArray[np.float32]
    k: NDArray[Any]
    score_fn: str


SCORE_FNS = ("relu_weighted", "dot")


@dataclass(frozen=True)
class Span:
    """A labelled half-open range of positions; kind "evidence" marks what the answer needs."""

    label: str
    start: int
    stop: int
    kind: str


@dataclass(frozen=True)
class Request:
    """One prompt and its continuation. roles i8[total]: 0 context, 1 question, 2 forced answer, 3 free answer; digest: the first 12 digits of
    the sha256 of the prompt's token ids, by which a context is known again in another capture."""

    id: int
    prompt: int
    total: int
    mode: str
    roles: NDArray[np.int8]
    spans: tuple[Span, ...] = field(default=())
    digest: str = ""

    @property
    def evidence(self) -> tuple[Span, ...]:
        return tuple(s for s in self.spans if s.kind == "evidence")

    def evidence_mask(self) -> NDArray[np.bool_]:
        """bool[total]: positions inside an evidence span."""
        mask = np.zeros(self.total, bool)
        for s in self.evidence:
            mask[s.start : s.stop] = True
        return mask
