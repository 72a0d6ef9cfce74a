"""The scores of eviction policies after prefill against kvpress's, from the same queries, keys and values: one kv head, T = 32 768, d = 128,
4 query heads; one thread, CPU time. kvpress runs in its own environment (make oracles), in a process of its own, round by round between ours."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.lanes import lane
from benchmarks.race import Entry, note, race, ratio, show
from kvsim.engine.source import Prefix, Source
from kvsim.geometry import Layer, QueryStats, Request
from kvsim.policies.language import parse
from kvsim.policies.protocol import FULL, Seen
from tests.oracles.agree import ROPE

PYTHON = Path(__file__).resolve().parent.parent / ".venv-oracles/bin/python"
TOKENS, GROUP, WINDOW, SINKS = 32768, 4, 64, 4
NEAR = 1e-4  # of the largest score
POLICIES = {  # press: ours, what their score is of ours, where both have one
    "snapkv": (f"snapkv(hold=tokens(2048), window={WINDOW})", 1 / WINDOW, slice(TOKENS - WINDOW)),
    "tova": ("tova(hold=tokens(2048))", 1.0, slice(TOKENS - 1)),
    "knorm": ("knorm(hold=tokens(2048))", 1.0, slice(TOKENS)),
    "expected_attention": ("expected_attention(hold=tokens(2048))", 1.0, slice(SINKS, TOKENS)),
}


def made() -> dict[str, Any]:
    """k and v as stored, queries of all prompt tokens, and their statistics."""
    data = lane(tokens=TOKENS + 1, steps=1)
    k, v, dim = data.k[:, :TOKENS], data.v[:, :TOKENS], data.k.shape[2]
    rng = np.random.default_rng(0)
    q = rng.standard_normal((GROUP, TOKENS, dim), np.float32) + 0.3 * k.astype(np.float32)
    late = q[:, SINKS:].astype(float)
    mean = late.mean(1, keepdims=True)
    covariance = (late - mean).swapaxes(1, 2) @ (late - mean) / late.shape[1]
    return {"q": q, "k": k, "v": v, "mean": mean[:, 0].astype(np.float32), "covariance": covariance.astype(np.float32)}


def prefix_of(given: dict[str, Any]) -> tuple[Source, Seen]:
    dim = given["k"].shape[2]
    rope = json.dumps(json.loads(ROPE) | {"rotary_dim": dim})
    layer = Layer(0, "full", GROUP, 1, dim, dim, dim**-0.5, 4 * dim, "float16", rope=rope, among=(0,))
    request = Request(0, TOKENS, TOKENS + 1, "synthetic", np.zeros(TOKENS + 1, np.int8))
    k, v = (np.concatenate([x, x[:, :1]], 1) for x in (given["k"], given["v"]))
    rows = np.ascontiguousarray(given["q"].swapaxes(0, 1))
    stats = QueryStats(given["mean"], given["covariance"], SINKS, TOKENS - SINKS)
    at = np.zeros(1, np.int64), np.array([TOKENS])
    source = Source(layer, request, k, v, *at, rows[-1:], rows[-WINDOW:], q_stats=stats)
    pos = np.arange(TOKENS)[None]
    full = np.full(pos.shape, FULL, np.uint8)
    return source, Seen(-1, TOKENS - 1, pos, np.ones(pos.shape, bool), full, full, np.full(1, 2048))


def scored(given: tuple[Source, Seen], policy: str) -> np.ndarray:
    """[T], everything from the stored numbers: nothing that another policy computed before is at hand."""
    source, seen = dataclasses.replace(given[0], _one={}), given[1]
    keep = parse(policy).part("keep")
    prefix = Prefix(source, keep.needs, policy)
    if "key_norm" in {need.name for need in keep.needs}:
        seen = dataclasses.replace(seen, key_norm=prefix.key_norm())
    _, ranking = keep.start(prefix, seen)
    return np.broadcast_to(ranking.score, seen.pos.shape)[0]


class Theirs:
    """kvpress in its process: `score(name)` -> CPU seconds there; `scores`: what it gave."""

    def __init__(self, given: dict[str, Any], folder: Path):
        np.savez(folder / "in.npz", **{name: x.astype(np.float32) for name, x in given.items()})
        program = Path(__file__).with_name("presses_worker.py")
        command = [str(PYTHON), str(program), str(folder / "in.npz"), str(folder / "out.npz")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._line()
        self.scores = dict(np.load(folder / "out.npz"))

    def score(self, name: str) -> float:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"kvpress ended with {self.process.wait()}")
        return line

    def end(self) -> None:
        self.process.communicate()


def main(rounds: int = 5) -> bool:
    if not PYTHON.exists():
        print("presses: no .venv-oracles (make oracles builds it): kvpress is left out")
        return True
    given = made()
    prefix = prefix_of(given)
    with TemporaryDirectory() as place:
        theirs = Theirs(given, Path(place))
        for name, (policy, part, where) in POLICIES.items():
            mine, other = scored(prefix, policy)[where] * part, theirs.scores[name][where]
            gap = np.abs(mine - other).max() / np.abs(other).max()
            assert gap < NEAR, f"{name}: scores differ by {gap:.1e} of the largest"
        times = race([e for name in POLICIES for e in _pair(prefix, theirs, name)], rounds)
        theirs.end()
    print(f"scores after {TOKENS} tokens, {GROUP} query heads, kvpress {theirs.version}")
    for name in POLICIES:
        show({who: times[who] for who in (f"kvsim: {name}", f"kvpress: {name}")}, f"kvsim: {name}")
        note(f"{name}: times kvpress", ratio(times, f"kvpress: {name}", f"kvsim: {name}")[0])
    return True


def _pair(given: tuple[Source, Seen], theirs: Theirs, name: str) -> list[Entry]:
    mine: Callable[[], Any] = partial(scored, given, POLICIES[name][0])
    return [Entry(f"kvsim: {name}", mine), Entry(f"kvpress: {name}", partial(theirs.score, name), elsewhere=True)]


if __name__ == "__main__":
    raise SystemExit(not main())
