"""The truth kernel against what people write: one kv head, T = 32 768, d = 128, 256 steps x 4 query heads, one thread, CPU time."""

from __future__ import annotations

import numpy as np

from benchmarks.lanes import lane
from benchmarks.race import Entry, gate, peak_memory, race, ratio, show
from kvsim.kernels.dense import PAGE
from kvsim.truth.dense import dense

OURS, WHOLE = "kvsim: page max, mass, lse", "kvsim: the same, output and top 64"


def naive(q: np.ndarray, k: np.ndarray, prompt: int, every: int) -> None:
    """numpy, float32 keys ready, one step at a time."""
    for n in range(0, len(q), every):
        s = q[n] @ k[: prompt + n + 1].T / np.float32(np.sqrt(k.shape[1]))
        top = s.max(1, keepdims=True)
        p = np.exp(s - top)
        z = p.sum(1, keepdims=True)
        pad = -s.shape[1] % PAGE
        np.pad(s, ((0, 0), (0, pad)), constant_values=-np.inf).reshape(len(s), -1, PAGE).max(2)
        np.pad(p / z, ((0, 0), (0, pad))).reshape(len(s), -1, PAGE).sum(2)
        np.log(z) + top


def torch_peers(q: np.ndarray, k: np.ndarray, prompt: int, every: int) -> list[Entry]:
    """Eager attention as transformers writes it (keys repeated for the group), and all steps in one batch."""
    import torch

    torch.set_grad_enabled(False)
    steps, group, dim = q.shape
    tq, tk = torch.from_numpy(q), torch.from_numpy(k)

    def eager() -> None:
        for n in range(0, steps, every):
            seen = prompt + n + 1
            keys = tk[None, None, :seen].expand(1, group, seen, dim).reshape(1, group, seen, dim)
            w = torch.matmul(tq[n][None, :, None], keys.transpose(2, 3)) * dim**-0.5
            p = torch.softmax(w, -1, dtype=torch.float32)
            torch.logsumexp(w, -1)
            pad = -seen % PAGE
            torch.nn.functional.pad(w, (0, pad), value=float("-inf")).reshape(1, group, -1, PAGE).amax(-1)
            torch.nn.functional.pad(p, (0, pad)).reshape(1, group, -1, PAGE).sum(-1)

    def batched() -> None:
        w = (tq.reshape(-1, dim) @ tk.T) * dim**-0.5
        late = torch.arange(prompt, len(k))[None] > (prompt + torch.arange(len(w)) // group)[:, None]
        w[:, prompt:].masked_fill_(late, float("-inf"))
        torch.logsumexp(w, -1)
        p = torch.softmax(w, -1)
        w.view(len(w), -1, PAGE).amax(-1)
        p.view(len(w), -1, PAGE).sum(-1)

    return [Entry("torch eager, per step, keys repeated", eager, every), Entry("torch, all steps in one batch", batched)]


def main(rounds: int = 5) -> bool:
    data = lane()
    prompt, group = data.request.prompt, data.layer.group
    q, k = data.q.astype(np.float32), data.k[0].astype(np.float32)
    square = np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32)
    dense(lane(tokens=1024, steps=64))  # compiled, and nothing of this size left behind
    memory = peak_memory(lambda: dense(data))
    entries = [
        Entry(OURS, lambda: dense(data, output=False, top=0)),
        Entry(WHOLE, lambda: dense(data)),
        Entry("numpy, per step (every 16th, scaled)", lambda: naive(q, k, prompt, 16), 16),
        Entry("sgemm 2048^3", lambda: square @ square),
    ]
    try:
        entries += torch_peers(q, k, prompt, 32)
    except ImportError:
        print("  torch is not installed (the peers extra): its two peers are left out")
    times = race(entries, rounds)
    print(f"truth, T = {len(k)}, d = {k.shape[1]}, {len(q)} steps x {group} heads; ratios are to the first line")
    show(times, OURS)
    flops = 2 * len(k) * k.shape[1] * len(q) * group
    part = [(flops / a) / (2 * 2048**3 / b) for a, b in zip(times[OURS], times["sgemm 2048^3"], strict=True)]
    bare = [
        n / (s * flops / (2 * 2048**3))
        for n, s in zip(times["numpy, per step (every 16th, scaled)"], times["sgemm 2048^3"], strict=True)
    ]
    print(f"  the lane's products alone, at this run's sgemm speed, would be {np.median(bare):.1f} times numpy per step")
    ok = gate("times numpy per step", ratio(times, "numpy, per step (every 16th, scaled)", OURS)[0], 15)
    ok &= gate("part of this run's sgemm speed", float(np.median(part)), 0.55)
    ok &= gate("2.5 / (time with output and top 64 / time without)", 2.5 / ratio(times, WHOLE, OURS)[0], 1)
    if "torch, all steps in one batch" in times:
        ok &= gate("times torch eager per step", ratio(times, "torch eager, per step, keys repeated", OURS)[0], 10)
        ok &= gate("times torch batched", ratio(times, "torch, all steps in one batch", OURS)[0], 3)
    return ok & gate("100 MB / peak memory of the lane with output and top 64, above the process", 100 / memory, 1)


if __name__ == "__main__":
    raise SystemExit(not main())
