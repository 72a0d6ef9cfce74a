"""H2O through the whole engine against numpy, one step at a time, making the same columns; one lane, one thread, CPU time."""

from __future__ import annotations

import numpy as np

from benchmarks.lanes import lane
from benchmarks.race import Entry, gate, race, ratio, show
from kvsim.engine.run import Job, run_layer
from kvsim.engine.source import Source
from kvsim.kernels.numbers import to_float32
from kvsim.policies.language import parse
from kvsim.trace.open import Lane

CAPACITIES = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ONE, EIGHT = "kvsim, one capacity", "kvsim, eight capacities in one run"


def source_of(data: Lane) -> Source:
    q, window = (to_float32(x.reshape(-1, data.layer.key_dim)).reshape(x.shape) for x in (data.q, data.window_q))
    return Source(data.layer, data.request, data.k, data.v, data.steps, data.t, q, window, mass=data.mass)


def engine(data: Lane, capacities: tuple[int, ...]) -> list[dict[str, list[dict[str, object]]]]:
    return run_layer(source_of(data), [Job(parse(f"h2o(hold=tokens({c}))")) for c in capacities])


def naive(data: Lane, capacities: tuple[int, ...], steps: int) -> dict[int, list[np.ndarray]]:
    """The columns of ledger and heads with float32 keys and values at hand; the dense truth is computed once for all capacities."""
    k, v, q = (x.astype(np.float32) for x in (data.k[0], data.v[0], data.q))
    prompt, scale = data.request.prompt, np.float32(data.layer.scale)
    norms = np.sqrt((v.astype(np.float64) ** 2).sum(1))
    assert data.mass is not None
    held, acc = {}, {}
    rows: dict[int, list[np.ndarray]] = {c: [] for c in capacities}
    for c in capacities:
        column, recent = data.mass.astype(np.float64).sum(0), c // 2
        order = np.argsort(-column[: prompt - recent], kind="stable")[: c - recent]
        held[c] = np.sort(np.concatenate([order, np.arange(prompt - recent, prompt)]))
        acc[c] = column[held[c]]
    for n in range(steps):
        t = prompt + n
        s = q[n] @ k[: t + 1].T * scale
        p = np.exp(s - s.max(1, keepdims=True)).astype(np.float64)
        p /= p.sum(1, keepdims=True)
        out = p.astype(np.float32) @ v[: t + 1]
        best = np.argpartition(-s, 64, axis=1)[:, :64]
        best = np.take_along_axis(best, np.argsort(-np.take_along_axis(s, best, 1), axis=1, kind="stable"), 1)
        far, bound = p[:, 4 : t - 63].sum(1), norms[: t + 1].max()
        for c in capacities:
            pos = np.append(held[c], t)
            own = s[:, pos].astype(np.float64)
            e = np.exp(own - own.max(1, keepdims=True))
            a = e / e.sum(1, keepdims=True)
            mine = a.astype(np.float32) @ v[pos]
            recall, far_read = p[:, pos].sum(1), p[:, pos[(pos >= 4) & (pos < t - 63)]].sum(1)
            gap, size = np.linalg.norm(mine - out, axis=1), np.linalg.norm(out, axis=1)
            cosine = (mine * out).sum(1) / (np.linalg.norm(mine, axis=1) * size)
            tops = [np.isin(best[:, :r], pos).mean(1) for r in (1, 10, 64)]
            rows[c].append(
                np.stack([recall, 1 - recall, far, far_read / far, gap / size, cosine, 2 * (1 - recall) * bound, *tops])
            )
            score = np.append(acc[c], 0.0) + a.sum(0)
            drop = np.argmin(np.where(pos > t - c // 2, np.inf, score))
            held[c], acc[c] = np.delete(pos, drop), np.delete(score, drop)
    return rows


def main(rounds: int = 5) -> bool:
    data = lane()
    part = len(data.steps) // 16
    got = engine(data, CAPACITIES)
    want = naive(data, CAPACITIES, part)
    for c, tables in zip(CAPACITIES, got, strict=True):
        recall = np.concatenate([x["mass_recall"] for x in tables["heads"]])[: part * data.layer.group]
        gap = np.abs(recall - np.concatenate([r[0] for r in want[c]])).max()
        assert gap < 2e-5, f"capacity {c}: mass recall differs by {gap}"
    entries = [
        Entry(ONE, lambda: engine(data, (2048,))),
        Entry("numpy, one capacity (every 16th step, scaled)", lambda: naive(data, (2048,), part), 16),
        Entry(EIGHT, lambda: engine(data, CAPACITIES)),
        Entry("numpy, eight, one truth (16th, scaled)", lambda: naive(data, CAPACITIES, part), 16),
        Entry("numpy, eight runs (16th, scaled)", lambda: [naive(data, (c,), part) for c in CAPACITIES], 16),
    ]
    times = race(entries, rounds)
    print(f"h2o, T = {data.request.total}, {len(data.steps)} steps x {data.layer.group} heads, ledger and heads in memory")
    show(times, ONE)
    ok = gate("times numpy per step, one capacity", ratio(times, entries[1].name, ONE)[0], 3)
    ok &= gate("times numpy per step, eight capacities in one run, against eight", ratio(times, entries[4].name, EIGHT)[0], 8)
    print(f"       against a numpy that shares its truth among the eight: {ratio(times, entries[3].name, EIGHT)[0]:.2f}")
    return ok


if __name__ == "__main__":
    raise SystemExit(not main())
