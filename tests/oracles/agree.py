"""kvsim's eviction policies beside kvpress's presses on the same tensors: the scores, and the tokens kept after prefill.

make oracles        builds .venv-oracles (kvpress pinned in requirements.txt), prints the table, fails where they disagree"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.engine.evolve import evolve
from kvsim.engine.source import Prefix, Source
from kvsim.geometry import Layer, QueryStats, Request
from kvsim.kernels.sparse import ALIVE
from kvsim.policies.language import parse
from kvsim.policies.protocol import FULL, Seen

HEADS, KV_HEADS, TOTAL, DIM, HIDDEN, KEPT = 8, 2, 320, 32, 64, 80
SCORES = 1e-5  # of the largest score
ROPE = json.dumps({"kind": "default", "theta": 10000.0, "rotary_dim": DIM, "layout": "half", "scaling": None, "magnitude": 1.0})
SPARED = {
    "snapkv": slice(TOTAL - 32),
    "expected_attention": slice(4, TOTAL),
}  # where a press has scores; else before the newest token


@dataclass(frozen=True)
class Pair:
    """press: its name in press.py; ours: a policy. scores: whether both have the same; spare: kept tokens a head that may differ, by
    definition; note: why, or how ours is scaled to theirs."""

    press: str
    ours: str
    note: str
    scores: bool = True
    spare: int = 0


PAIRS = (
    Pair("snapkv", "snapkv(hold=tokens(80), window=32)", "ours is a sum over the window, theirs a mean"),
    Pair("tova", "tova(hold=tokens(80))", "theirs never drops the newest token", spare=1),
    Pair("streaming_llm", "streaming_llm(hold=tokens(80))", "sets only: there is no score", scores=False),
    Pair("knorm", "knorm(hold=tokens(80))", "ours never drops the newest token", spare=1),
    Pair("observed", "h2o(hold=tokens(80), recent=0.0, norm=\"queries\")",
         "ours sums over the group and never drops the newest token", spare=1),
    Pair("expected_attention", "expected_attention(hold=tokens(80))", "ours from the mean and covariance of queries, theirs of hidden states"),
    Pair("criticalkv", "criticalkv(hold=tokens(80), window=32, compat=True)", "the score of the second part", scores=False),
    Pair("adakv", 'adakv(hold=tokens(80), window=32, alpha=0.2, ada_mode="safeguard")', "", scores=False),
    Pair("criticaladakv", 'criticalkv(base="adakv", hold=tokens(80), window=32, compat=True)', "", scores=False),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """gap: largest difference of scores, as a part of the largest score; apart: kept tokens of a kv head that differ, at most."""

    pair: Pair
    gap: float | None
    apart: int

    @property
    def ok(self) -> bool:
        return (self.gap is None or self.gap <= SCORES) and self.apart <= self.pair.spare


def tensors(seed: int = 0) -> dict[str, Any]:
    """Random queries that look like the keys a little, so that attention is neither flat nor a single peak."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, KV_HEADS, TOTAL, DIM)).astype(np.float32)
    near = k[np.arange(HEADS) * KV_HEADS // HEADS][:, rng.integers(0, TOTAL, TOTAL)]
    q = (rng.standard_normal((HEADS, TOTAL, DIM)) + 0.7 * near).astype(np.float32)
    wo = (rng.standard_normal((HEADS, DIM, HIDDEN)) / DIM).astype(np.float32)
    return {"q": q, "k": k, "v": v, "wo": wo, "kept": np.array(KEPT)}


def source(given: dict[str, Any]) -> Source:
    """The prompt as a trace holds it, and one decode step that nobody looks at."""
    q, k, v, wo = (given[name] for name in ("q", "k", "v", "wo"))
    group = HEADS // KV_HEADS
    layer = Layer(0, "full", HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, 8 * DIM, "float32", rope=ROPE, among=(0,))
    x = np.einsum("hqd,hkd->hqk", q.astype(float), np.repeat(k, group, 0)) * DIM**-0.5
    e = np.exp(np.where(np.tri(TOTAL, dtype=bool), x - x.max(-1, keepdims=True), -np.inf))
    mass = (e / e.sum(-1, keepdims=True)).sum(1).astype(np.float32)
    norm = np.abs(np.einsum("htd,hdo->hto", np.repeat(v, group, 0).astype(float), wo)).sum(-1).astype(np.float32)
    more = [np.concatenate([a, np.zeros_like(a[:, :1])], 1) for a in (k, v, norm)]
    request = Request(0, TOTAL, TOTAL + 1, "synthetic", np.zeros(TOTAL + 1, np.int8))
    rows = np.ascontiguousarray(q.swapaxes(0, 1))
    late = q[:, 4:].astype(float)  # as they are before RoPE
    mean = late.mean(1, keepdims=True)
    covariance = (late - mean).swapaxes(1, 2) @ (late - mean) / late.shape[1]
    stats = QueryStats(mean[:, 0].astype(np.float32), covariance.astype(np.float32), 4, late.shape[1])
    at = np.zeros(1, np.int64), np.array([TOTAL])
    return Source(layer, request, more[0], more[1], *at, rows[-1:], rows[-64:], None, mass, more[2], stats)


def ours(policy: str, src: Source) -> tuple[Any, Any]:
    """(score f64[Hkv, T], kept bool[Hkv, T]) of the cut after prefill."""
    chain = parse(policy)
    keep, record = chain.part("keep"), evolve(src, chain)
    assert record is not None
    pos = np.tile(np.arange(TOTAL), (KV_HEADS, 1))
    full = np.full(pos.shape, FULL, np.uint8)
    seen = Seen(-1, TOTAL - 1, pos, np.ones(pos.shape, bool), full, full, np.full(KV_HEADS, KEPT))
    if any(f.name == "key_norm" for f in dataclasses.fields(seen)):
        seen = dataclasses.replace(seen, key_norm=src.key_norms[:, :TOTAL])
    _, ranking = keep.start(Prefix(src, keep.needs, policy), seen)
    return np.broadcast_to(ranking.score, pos.shape), (record.start[:, :TOTAL] & ALIVE) > 0


def compare(python: str) -> tuple[str, list[Row]]:
    """(version of kvpress, a row for every pair); `python`: the interpreter of its environment."""
    given = tensors()
    with tempfile.TemporaryDirectory() as folder:
        source_file, found_file = Path(folder, "in.npz"), Path(folder, "out.npz")
        np.savez(source_file, **given)
        subprocess.run([python, str(Path(__file__).with_name("press.py")), str(source_file), str(found_file)], check=True)
        found = dict(np.load(found_file))
    rows, src = [], source(given)
    for pair in PAIRS:
        score, kept = ours(pair.ours, src)
        gap = None
        if pair.scores:
            theirs, past = found[f"score.{pair.press}"], np.s_[:, SPARED.get(pair.press, slice(TOTAL - 1))]
            mine = score * {"snapkv": 1 / 32, "observed": KV_HEADS / HEADS}.get(pair.press, 1.0)
            gap = float(np.abs(mine - theirs)[past].max() / np.abs(theirs[past]).max())
        other = found[f"kept.{pair.press}"]
        rows.append(Row(pair, gap, int((kept & ~other).sum(1).max())))
    return str(found["version"]), rows


def main(python: str) -> int:
    version, rows = compare(python)
    print(f"kvpress {version}: {HEADS} query heads, {KV_HEADS} kv heads, {TOTAL} tokens of {DIM} numbers, {KEPT} kept a head")
    print("| press | policy | largest difference of scores | kept tokens that differ, of 80 | |\n|---|---|---|---|---|")
    for r in rows:
        gap = "" if r.gap is None else f"{r.gap:.1e}"
        print(f"| {r.pair.press} | `{r.pair.ours}` | {gap} | {r.apart} | {r.pair.note}{'' if r.ok else ' **DISAGREE**'} |")
    return 0 if all(r.ok for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
