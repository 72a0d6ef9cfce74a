"""Small made-up (request, layer)s, and what a run of them says as flat columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvsim.engine.run import Job, run_layer
from kvsim.engine.source import Source
from kvsim.geometry import ITEMSIZE, Indexer, Layer, QueryStats, Request, Span
from kvsim.policies.language import complete, parse
from kvsim.policies.protocol import Chain, Part
from kvsim.tables import table


def lane(
    prompt: int = 21,
    steps: int = 8,
    kv_heads: int = 2,
    group: int = 2,
    key_dim: int = 4,
    value_dim: int | None = None,
    dtype: str = "float32",
    size: float = 1.0,
    whole: bool = False,
    softcap: float | None = None,
    sinks: bool = False,
    window: int | None = None,
    evidence: tuple[tuple[int, int], ...] = (),
    stride: int = 1,
    among: tuple[int, ...] = (3,),
    seed: int = 0,
) -> Source:
    """Random keys, values and queries in `dtype`; size: what queries are multiplied by; whole: small whole numbers, so that scores tie;
    stride: only every stride-th step was captured."""
    rng, q_heads, value_dim = np.random.default_rng(seed), kv_heads * group, value_dim or key_dim
    at = np.arange(0, steps, stride)
    total, rows = prompt + steps, min(prompt, 8)

    def draw(*shape: int) -> Any:
        return (rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)).astype(np.float32)

    k, v, k_pre = (stored(draw(kv_heads, total, d), dtype) for d in (key_dim, value_dim, key_dim))
    q, window_q = (draw(n, q_heads, key_dim) * np.float32(size) for n in (len(at), rows))
    layer = Layer(
        3, "sliding" if window else "full", q_heads, kv_heads, key_dim, value_dim, 0.5, (key_dim + value_dim) * ITEMSIZE[dtype], dtype,
        softcap=softcap, window=window, sinks=tuple(rng.standard_normal(q_heads) * size) if sinks else None, among=among,
    )  # fmt: skip
    spans = tuple(Span(f"s{i}", a, b, "evidence") for i, (a, b) in enumerate(evidence) if b <= total)
    request = Request(7, prompt, total, "synthetic", rng.integers(0, 4, total).astype(np.int8), spans)
    mass = rng.random((q_heads, prompt)).astype(np.float32)
    norm, mean = np.abs(draw(q_heads, total)), draw(q_heads, key_dim)
    stats = QueryStats(mean, np.tile(np.eye(key_dim, dtype=np.float32), (q_heads, 1, 1)), 0, prompt)
    index_q, index_w, index_k = draw(len(at), 3, 5), draw(len(at), 3), draw(total, 5)
    indexer = Indexer(index_q, index_w, index_k, "relu_weighted")
    return Source(layer, request, k, v, at, prompt + at, q, window_q, k_pre, mass, norm, stats, indexer, draw(*q.shape))


def stored(x: Any, dtype: str) -> Any:
    """float32 numbers as a trace holds them."""
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)


def first_steps(source: Source, steps: int) -> Source:
    """The same request, ended after its first captured steps."""
    total = int(source.t[steps - 1]) + 1
    request = dataclasses.replace(source.request, total=total, roles=source.request.roles[:total])
    cut = {name: getattr(source, name)[:, :total] for name in ("k", "v", "k_pre", "wo_norm")}
    x = source.indexer
    indexer = x and dataclasses.replace(x, q=x.q[:steps], w=x.w[:steps], k=x.k[:total])
    return dataclasses.replace(
        source,
        request=request,
        steps=source.steps[:steps],
        t=source.t[:steps],
        q=source.q[:steps],
        indexer=indexer,
        before=None if source.before is None else source.before[:steps],
        _one={},
        **cut,
    )


def chain(policy: str | Part | Chain) -> Chain:
    return parse(policy) if isinstance(policy, str) else complete(policy)


def run(source: Source, *policies: str | Part | Chain, heads: tuple[int, ...] | None = None, **options: Any) -> Any:
    """{table: {column: array}} of every policy, or of the only one."""
    found = [columns(tables) for tables in run_layer(source, [Job(chain(p), heads) for p in policies], **options)]
    return found if len(policies) > 1 else found[0]


def columns(tables: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Parts joined to one array per column; None: null in every row."""
    whole = {}
    for name, parts in tables.items():
        joined: dict[str, list[Any]] = {}
        for part in parts:
            rows = next(len(x) for x in part.values() if isinstance(x, (np.ndarray, list)))
            for column, x in part.items():
                joined.setdefault(column, []).append(spread(x, rows))
        whole[name] = {c: np.concatenate(x) for c, x in joined.items()}
    return whole


def spread(x: Any, rows: int) -> Any:
    """A part's column as an array of its own."""
    if isinstance(x, list):
        out = np.empty(rows, object)
        out[:] = x
        return out
    return np.asarray(x) if isinstance(x, np.ndarray) else np.full(rows, np.nan if x is None else x)


def by_step(table: dict[str, Any], column: str, head: str = "kv_head") -> Any:
    """A column as [heads, steps], or [heads, steps, ...]."""
    order = np.lexsort((table["step"], table[head]))
    heads = len(np.unique(table[head]))
    return np.asarray(table[column])[order].reshape(heads, -1)


def placement(source: Source, tiers: dict[str, Any]) -> Any:
    """The tier of every position after every captured step, i8[Hkv, N, T]: rows of the tiers table applied one over the other."""
    total, prompt = source.request.total, source.request.prompt
    out = np.zeros((source.layer.kv_heads, len(source.steps), total), np.int8)
    for h in range(source.layer.kv_heads):
        mine = {int(s): r for s, r, of in zip(tiers["step"], tiers["runs"], tiers["kv_head"], strict=True) if of == h}
        now, last = np.zeros(total, np.int8), prompt
        _apply(now, mine[-1])
        for i, (step, t) in enumerate(zip(source.steps.tolist(), source.t.tolist(), strict=True)):
            now[last : t + 1], last = 2, t + 1
            _apply(now, mine.get(step, []))
            out[h, i] = now
            out[h, i, : source.layer.first_visible(t)] = 0
    return out


def _apply(now: Any, runs: list[dict[str, int]]) -> None:
    for run in runs:
        now[run["start"] : run["stop"]] = run["tier"]


def rows_of(tables: dict[str, Any], name: str, steps: Any = None) -> Any:
    """The rows of a table as a run stores them, in order, of some steps only; None where it has no rows."""
    found = {c: x for c, x in tables[name].items() if not c.startswith("_")}
    if not found:
        return None
    keys = ("pages", "role", "q_head") if name == "curves" else ("step", "q_head", "kv_head")
    order = np.lexsort([np.asarray(found[c], np.int64) for c in keys if c in found])
    if steps is not None:
        order = order[np.isin(np.asarray(found["step"], np.int64)[order], [-1, *steps])]
    picked = {c: list(x[order]) if x.dtype == object else x[order] for c, x in found.items()}
    return table(name, picked | {"policy": "p", "request": 0, "layer": 0})


ROWS = ("ledger", "heads", "plans", "tiers", "events", "evidence")


def differing(a: dict[str, Any], b: dict[str, Any], steps: Any = None, names: Any = ROWS) -> list[str]:
    """Columns whose stored bytes differ between two runs, as "table.column"; of `a` only the rows of some steps."""
    found = []
    for name in names:
        x, y = rows_of(a, name, steps), rows_of(b, name)
        if (x is None) != (y is None):
            found.append(name)
        elif x is not None:
            found += [f"{name}.{c}" for c in x.column_names if not x[c].equals(y[c])]
    return found
