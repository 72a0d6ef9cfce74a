"""Seeded synthetic traces whose answers are known: a sink, a pull to recent tokens, and needles that the last queries look for.

A key has two halves. The rotated half is the same for every token, so that RoPE alone makes queries prefer their neighbours. The
other half holds one direction for the sink, one for needles, and noise. Strengths are logits: against T other tokens a boost of
log T is worth about as much as all of them together, whatever the length."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import WrongUse
from kvsim.geometry import ITEMSIZE, Layer, Request
from kvsim.trace.bits import narrow, widen
from kvsim.trace.moments import Moments
from kvsim.trace.open import Trace, open_trace
from kvsim.trace.reference import attend
from kvsim.trace.write import TraceWriter

OPTIONAL = ("k_pre", "prefill_mass", "wo_norm", "out", "lse")
CONTEXT, QUESTION, FORCED, FREE = 0, 1, 2, 3
LENGTH = 3.0  # of a planted key along its direction
BLOCK = 256  # prompt queries attended at a time
HIDDEN = 32  # width of the model that W_O writes to

WORKLOADS = {
    "needle": "the question and the answer look at all needles",
    "anchors": "every query looks at all needles, those of the context too: what matters never changes",
    "drift": "the answer looks at one needle after the other, in their order, and the question at the first",
    "reversal": "the answer looks at every other needle, as the question did, and from its middle on at the rest alone",
    "sudden": "nobody looks at the needles before the middle of the answer, and then everybody",
    "several": "each query head looks at one needle, the next head at the next one",
    "oscillation": "the answer looks at every other needle, after `swing` steps at the rest, and back",
}

Doubles = NDArray[np.float64]
Row = dict[str, Any]


def synthesize(
    path: str | Path,
    *,
    seed: int = 0,
    requests: int = 1,
    layers: int = 1,
    captured: Collection[int] | None = None,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    prompt: int = 40,
    steps: int = 8,
    stride: int = 1,
    window_rows: int = 16,
    needles: int = 1,
    swing: int = 0,
    workload: str = "needle",
    dtype: str = "float16",
    rope: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    learned_sinks: bool = False,
    without: Collection[str] = (),
    q_stats: bool = False,
    index_heads: int = 0,
    segment: int | None = None,
    compression: str = "none",
) -> Trace:
    """Write a trace and open it; the same arguments write the same bytes. Raises WrongUse.

    Needles are the requests' evidence spans: their tokens hold most of the attention of the question (the last prompt tokens,
    role 1) and of the answer (roles 2 and 3). workload: who looks at which of them, and when (WORKLOADS); swing: steps between two turns of an
    oscillation, which it asks for (0: none). captured: ids of the layers with rows (None: all);
    window: every layer slides; stride: queries of every stride-th step; segment: decode steps per segment (None: all rows in one);
    without: of OPTIONAL; q_stats: with that table, too; index_heads: with the tables of a learned indexer of so many heads, too,
    which looks for what the query heads of the first kv head look for, place apart."""
    if head_dim < 4:
        raise WrongUse(f"head_dim={head_dim}: expected 4 or more, two numbers for position and two for content")
    bounds = {
        "requests": (requests, 1, 10_000),
        "layers": (layers, 1, 1_000),
        "q_heads": (q_heads, 1, 1_024),
        "prompt": (prompt, 1, 2**21),
    }
    bounds |= {
        "kv_heads": (kv_heads, 1, 1_024),
        "steps": (steps, 0, 2**21),
        "stride": (stride, 1, 2**21),
        "needles": (needles, 0, 1_000),
        "swing": (swing, 0, 2**21),
        "index_heads": (index_heads, 0, 1_024),
    }
    workload = _workload(workload, swing, needles, head_dim)
    for name, (value, least, most) in (bounds | {"seed": (seed, 0, 2**63)}).items():
        if not least <= value <= most:
            raise WrongUse(f"{name}={value}: expected a whole number from {least} to {most}")
    if q_heads % kv_heads:
        raise WrongUse(f"q_heads={q_heads}, kv_heads={kv_heads}: expected query heads in equal groups, a multiple of kv_heads")
    if unknown := sorted(set(without) - set(OPTIONAL)):
        raise WrongUse(f"without={unknown}: expected some of {', '.join(OPTIONAL)}")
    rng = np.random.default_rng(seed)
    layer = {
        "kind": "full" if window is None else "sliding",
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "key_dim": head_dim,
        "value_dim": value_dim or head_dim,
        "scale": head_dim**-0.5,
        "softcap": softcap,
        "window": window,
        "sinks": (np.log(prompt) + rng.normal(-1, 1, q_heads)).tolist() if learned_sinks else None,
        "rope": _rope(head_dim) if rope else None,
        "row_bytes": (head_dim + (value_dim or head_dim)) * ITEMSIZE[dtype],
    }
    rows = [layer | {"layer": i, "captured": captured is None or i in captured} for i in range(layers)]
    texts = [_text(rng, i, prompt, prompt + steps, needles) for i in range(requests)]
    source = {"model": "synthetic", "config": {"seed": seed}, "config_sha256": None, "tokenizer": None, "weight_format": None}
    capture = {"tool": "kvsim.synth", "versions": {"numpy": np.__version__}, "device": "none", "gpu_name": None, "seed": seed}
    sampled = {
        "attention_backend": "none",
        "options": {"needles": needles, "window_rows": window_rows}
        | ({"swing": swing} if swing else {})
        | ({"workload": workload} if workload != "needle" and not swing else {}),
        "heads": "all",
    }
    sampled |= {"layers": [r["layer"] for r in rows if r["captured"]], "steps": "all" if stride == 1 else f"every {stride}"}
    with TraceWriter(
        path, dtype, source, capture | sampled, texts, rows, compression, "1970-01-01T00:00:00Z", durable=False
    ) as writer:
        for r in writer.requests:
            for spec in writer.layers:
                if spec.captured:
                    lane = _plant(np.random.default_rng([seed, r.id, spec.id]), r, spec, dtype, workload, swing)
                    chosen = np.concatenate([np.arange(-min(window_rows, prompt), 0), np.arange(0, steps, stride)])
                    _write(writer, r, spec, lane, chosen, segment, set(OPTIONAL) - set(without))
                    _write_beside(writer, r, spec, lane, chosen[chosen >= 0], q_stats, index_heads)
    return open_trace(path)


def _rope(head_dim: int) -> str:
    spec = {
        "kind": "default",
        "theta": 10000.0,
        "rotary_dim": head_dim // 4 * 2,
        "layout": "half",
        "scaling": None,
        "magnitude": 1.0,
    }
    return json.dumps(spec)


def _text(rng: np.random.Generator, request: int, prompt: int, total: int, needles: int) -> Row:
    """A request: context, needles and a decoy at random places in it, a question, an answer half forced and half free."""
    question = min(8, prompt // 4)
    forced = prompt + (total - prompt) // 2
    roles = np.full(total, FREE)
    roles[:forced], roles[:prompt], roles[: prompt - question] = FORCED, QUESTION, CONTEXT
    room, length = (prompt - question - 1) // (needles + 1), max(1, min(8, prompt // 16))
    starts = 1 + room * np.arange(needles + 1) + rng.integers(0, max(1, room - length + 1), needles + 1)
    names = [(f"needle {i}", "evidence") for i in range(needles)] + [("decoy", "other")]
    spans = [
        {"label": label, "start": int(start), "stop": int(start) + length, "kind": kind}
        for (label, kind), start in zip(rng.permutation(names).tolist(), starts, strict=True)
        if room >= length
    ]
    return {
        "request": request,
        "prompt_tokens": prompt,
        "total_tokens": total,
        "mode": "synthetic",
        "token_ids": rng.integers(0, 1000, total).tolist(),
        "roles": roles.tolist(),
        "spans": spans,
        "meta": "{}",
    }


@dataclass(frozen=True)
class _Planted:
    """Raw numbers of one (request, layer)."""

    k_pre: NDArray[Any]  # [Hkv, T, dk]
    k: NDArray[Any]
    v: NDArray[Any]  # [Hkv, T, dv]
    q: NDArray[Any]  # [T, Hq, dk]
    wo_norm: NDArray[np.float32]  # [Hq, T]


def _workload(name: str, swing: int, needles: int, head_dim: int) -> str:
    """The workload that is meant. Raises WrongUse for one that these needles, or so few numbers in a key, cannot make."""
    name = "oscillation" if swing and name == "needle" else name
    if name not in WORKLOADS:
        raise WrongUse(f"workload={name!r}: expected one of {', '.join(WORKLOADS)}")
    if (name == "oscillation") != (swing > 0):
        raise WrongUse(f"workload={name!r}, swing={swing}: expected swing=1 or more with oscillation, and 0 with any other")
    sides, least = (needles, 2) if name in ("drift", "several") else (2, 2) if name in ("reversal", "oscillation") else (1, 1)
    what = f"swing={swing}" if swing else f"workload={name!r}"
    if name != "needle" and (needles < least or (sides > 1 and head_dim - head_dim // 4 * 2 - 2 < sides)):
        dim = -(-(sides + 2) // 2) * 4  # half of it turns with position; a number for the sink, one for each side, one for noise
        raise WrongUse(f"{what}: expected needles={least} or more to look at, and head_dim={dim} or more to hold them apart")
    return name


def _sides(r: Request, workload: str, swing: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool[T, S] twice: which tokens are needles of a side, and which positions look for that side."""
    pos, asked, steps = np.arange(r.total), r.roles > CONTEXT, r.total - r.prompt
    sides = {"reversal": 2, "oscillation": 2, "drift": len(r.evidence), "several": len(r.evidence)}.get(workload, 1)
    sides = max(1, sides)
    needle = np.zeros((r.total, sides), bool)
    for i, span in enumerate(r.evidence):
        needle[span.start : span.stop, i % sides] = True
    step = np.maximum(pos - r.prompt, 0)
    now = {
        "drift": step * sides // max(1, steps),
        "reversal": step * 2 // max(1, steps),
        "oscillation": step // max(1, swing) % 2,
    }.get(workload)
    if workload == "anchors":
        asked = np.ones(r.total, bool)
    if workload == "sudden":
        asked = pos >= r.prompt + steps // 2
    looks = asked[:, None] if now is None else asked[:, None] & (now[:, None] == np.arange(sides))
    return needle, np.broadcast_to(looks, needle.shape)


def _plant(rng: np.random.Generator, r: Request, layer: Layer, dtype: str, workload: str, swing: int) -> _Planted:
    """Keys, queries and values of every position."""
    group, dim, total = layer.group, layer.key_dim, r.total
    rotated, pos, turn = dim // 4 * 2, np.arange(total), replace(layer, rope=_rope(dim)).rotate
    needle, asked = _sides(r, workload, swing)
    noisy = dim - rotated - 1 - needle.shape[1]
    k_pre, k = np.empty((layer.kv_heads, total, dim)), np.empty((layer.kv_heads, total, dim))
    q, v = np.empty((total, layer.q_heads, dim)), rng.normal(size=(layer.kv_heads, total, layer.value_dim))
    v[:, needle.any(1)] += 3
    for h in range(layer.kv_heads):
        axes = np.linalg.qr(rng.normal(size=(dim - rotated,) * 2))[0]  # rows: sink, needles of each side, noise ...
        strength = np.column_stack([LENGTH * (pos == 0), LENGTH * needle, rng.normal(size=(total, noisy))])
        k_pre[h] = np.hstack([np.ones((total, rotated)), strength @ axes])
        k[h] = turn(k_pre[h], pos)
        for head in range(h * group, (h + 1) * group):
            to_recent, to_sink = np.log(total) + rng.uniform((-1, 0), (0, 2))
            mine = asked & (np.arange(needle.shape[1]) == head % needle.shape[1]) if workload == "several" else asked
            to_needle = mine * (np.log(total / np.maximum(1, needle.sum(0))) + rng.uniform(3, 4))
            noise = rng.normal(size=(total, noisy)) / np.sqrt(max(1, noisy))
            strength = np.column_stack([np.full(total, to_sink / LENGTH), to_needle / LENGTH, noise])
            q[:, head] = turn(np.hstack([np.full((total, rotated), to_recent / rotated), strength @ axes]), pos) / layer.scale
    w_o = rng.normal(size=(layer.q_heads, HIDDEN, layer.value_dim)) / np.sqrt(layer.value_dim)
    v_raw = narrow(v, dtype)
    wo_norm = np.stack([np.abs(widen(v_raw[i // group]) @ w_o[i].T).sum(axis=1) for i in range(layer.q_heads)])
    return _Planted(narrow(k_pre, dtype), narrow(k, dtype), v_raw, narrow(q, dtype), wo_norm.astype(np.float32))


def _write(
    w: TraceWriter, r: Request, layer: Layer, x: _Planted, steps: NDArray[np.int64], segment: int | None, optional: set[str]
) -> None:
    """All rows, in segments; attention outputs and masses from the numbers as stored."""
    at = (r.id, layer.id)
    cuts = [r.total] if segment is None else [*range(r.prompt, r.total, segment), r.total]
    k_pre = "k_pre" in optional and layer.rope is not None
    for a, b in zip([0, *cuts], cuts, strict=False):
        w.kv(*at, a, x.k[:, a:b], x.v[:, a:b], x.k_pre[:, a:b] if k_pre else None)
        if "wo_norm" in optional:
            w.values(*at, a, x.wo_norm[:, a:b])
        mine = steps[(steps + r.prompt >= a) & (steps + r.prompt < b)]
        if len(mine):
            t = mine + r.prompt
            out, lse = _attended(x, t, layer)
            w.q(*at, mine, x.q[t], narrow(out, w.dtype) if "out" in optional else None, lse if "lse" in optional else None)
    if "prefill_mass" in optional:
        pos = np.arange(r.prompt)
        w.prefill(*at, _mass(x, r, layer), np.minimum(r.prompt - pos, layer.window or r.prompt))


def _write_beside(
    w: TraceWriter, r: Request, layer: Layer, x: _Planted, steps: NDArray[np.int64], q_stats: bool, index_heads: int
) -> None:
    """Tables that few policies need."""
    if q_stats:
        moments = Moments(layer)
        moments.add(widen(x.q[: r.prompt]).astype(np.float32).swapaxes(0, 1), 0)
        if stats := moments.stats():
            w.q_stats(r.id, layer.id, stats)
    if index_heads:
        _write_index(w, r, layer, x, steps, index_heads)


def _write_index(w: TraceWriter, r: Request, layer: Layer, x: _Planted, steps: NDArray[np.int64], heads: int) -> None:
    """An indexer whose keys and queries are the halves that do not turn of the first kv head's; the n-th head weighs n times as much."""
    content = slice(layer.key_dim // 4 * 2, None)
    w.index_k(r.id, layer.id, 0, np.ascontiguousarray(x.k[0, :, content]))
    if len(steps):
        q = x.q[steps + r.prompt][:, np.arange(heads) % layer.group, content]
        weight = np.arange(1, heads + 1, dtype=np.float32) / np.float32(heads * (heads + 1) / 2)
        w.index_q(r.id, layer.id, steps, np.ascontiguousarray(q), np.tile(weight, (len(steps), 1)), "relu_weighted")


def _attended(x: _Planted, t: NDArray[np.int64], layer: Layer) -> tuple[Doubles, Doubles]:
    """Queries at t [n] -> attention output [n, Hq, dv], log of the softmax denominator [n, Hq]."""
    out, lse = np.empty((len(t), layer.q_heads, layer.value_dim)), np.empty((len(t), layer.q_heads))
    for h in range(layer.kv_heads):
        mine = slice(h * layer.group, (h + 1) * layer.group)
        p, lse[:, mine] = attend(widen(x.q[t, mine]), t, widen(x.k[h]), layer, h)
        out[:, mine] = p @ widen(x.v[h])
    return out, lse


def _mass(x: _Planted, r: Request, layer: Layer) -> NDArray[np.float32]:
    """Attention of all prompt queries on each prompt key, [Hq, prompt]."""
    mass = np.zeros((layer.q_heads, r.prompt))
    for h in range(layer.kv_heads):
        mine, k = slice(h * layer.group, (h + 1) * layer.group), widen(x.k[h, : r.prompt])
        for a in range(0, r.prompt, BLOCK):
            t = np.arange(a, min(r.prompt, a + BLOCK))
            mass[mine] += attend(widen(x.q[t, mine]), t, k, layer, h)[0].sum(axis=0)
    return mass.astype(np.float32)
