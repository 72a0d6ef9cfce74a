"""The decisions of keep policies alone, one (request, layer): h2o against numpy, the others against the truth kernel; one thread, CPU time."""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.h2o import CAPACITIES, source_of
from benchmarks.lanes import lane
from benchmarks.race import Entry, gate, race, ratio, show
from kvsim.engine.evolve import Course, evolve_all
from kvsim.policies.allocate import for_layer
from kvsim.policies.language import parse
from kvsim.trace.open import Lane
from kvsim.truth.dense import dense

ONE, EIGHT, TRUTH = "kvsim: h2o, one capacity", "kvsim: h2o, eight capacities", "kvsim: the truth kernel"
NUMPY, NUMPY8 = "numpy per step, one capacity (8th, scaled)", "numpy per step, eight (8th, scaled)"
OTHERS = ("tova(hold=tokens(2048))", "qevict(hold=share(0.2))", "zipcache()")


def decide(data: Lane, *policies: str) -> None:
    source = source_of(data)
    evolve_all(source, [Course(for_layer(parse(policy), source.layer)) for policy in policies])


def naive(data: Lane, capacities: tuple[int, ...], steps: int) -> None:
    """Who is evicted at every step, with float32 keys at hand: attention over all tokens, as a mask over the cache would have it."""
    k, q = data.k[0].astype(np.float32), data.q.astype(np.float32)
    prompt, scale = data.request.prompt, np.float32(data.layer.scale)
    assert data.mass is not None
    for c in capacities:
        acc = np.append(data.mass.sum(0), np.zeros(len(data.steps), np.float32)).astype(np.float64)
        held = np.zeros(len(acc), bool)
        held[np.argsort(-acc[: prompt - c // 2], kind="stable")[: c - c // 2]] = True
        held[prompt - c // 2 : prompt] = True
        for n in range(steps):
            t = prompt + n
            held[t] = True
            s = np.where(held[: t + 1], q[n] @ k[: t + 1].T * scale, -np.inf)
            e = np.exp(s - s.max(1, keepdims=True))
            acc[: t + 1] += (e / e.sum(1, keepdims=True)).sum(0)
            held[np.argmin(np.where(held[: t + 1 - c // 2], acc[: t + 1 - c // 2], np.inf))] = False


def main(rounds: int = 5) -> bool:
    data = lane()
    part = len(data.steps) // 8
    h2o = [f"h2o(hold=tokens({c}))" for c in CAPACITIES]
    decide(data, h2o[0], *OTHERS)
    entries = [
        Entry(ONE, lambda: decide(data, "h2o(hold=tokens(2048))")),
        Entry(NUMPY, lambda: naive(data, (2048,), part), 8),
        Entry(EIGHT, lambda: decide(data, *h2o)),
        Entry(NUMPY8, lambda: naive(data, CAPACITIES, part), 8),
        Entry(TRUTH, lambda: dense(data)),
        *(Entry(policy, partial(decide, data, policy)) for policy in OTHERS),
    ]
    times = race(entries, rounds)
    print(
        f"decisions of keeps, T = {data.request.total}, {len(data.steps)} steps x {data.layer.group} heads; ratios are to the first line"
    )
    show(times, ONE)
    ok = gate("h2o, one capacity: times numpy per step", ratio(times, NUMPY, ONE)[0], 6)
    ok &= gate("h2o, eight capacities: times numpy per step", ratio(times, NUMPY8, EIGHT)[0], 14)
    for policy in OTHERS:
        ok &= gate(f"4 / ({policy} / the truth kernel with output and top 64)", 4 / ratio(times, policy, TRUTH)[0], 1)
    return ok


if __name__ == "__main__":
    raise SystemExit(not main())
