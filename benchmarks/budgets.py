"""Every read budget from one sort, against code that asks for budgets one by one: one kv head, T = 32 768, d = 128, 1 024 queries."""

from __future__ import annotations

import numpy as np

from benchmarks.h2o import source_of
from benchmarks.lanes import lane
from benchmarks.race import Entry, gate, race, ratio, show
from kvsim.engine.attend import Dense, HeldTruth, Past, steps_per_block
from kvsim.engine.attend import blocks as cut
from kvsim.engine.curves import Curves
from kvsim.engine.reads import Reader, ranking_of
from kvsim.engine.source import Source
from kvsim.kernels.order import accumulate
from kvsim.policies.allocate import for_layer
from kvsim.policies.language import parse

PAGE = 16
READ = parse("quest(read=pages(64))")
OURS = "kvsim: truth, bounds, mass at all 2 048 budgets"
CURVES, ERRORS = "kvsim: the whole curves without output error", "kvsim: the whole curves"
SGEMM = "sgemm 2048^3"
NUMPY, FULL = "numpy, 24 budgets, mass (32nd, scaled)", "numpy, 24 budgets, all of the curves (32nd, scaled)"


def blocks(source: Source, keep: bool = True):
    """The blocks of a lane with what quest picks in them; keep: whether more than masses will be asked for."""
    read = for_layer(READ, source.layer).part("read")
    reader = Reader(read, source, 0, steps_per_block(source.layer.group))
    past = Past(source, None, 0)
    for index in cut(source, np.arange(len(source.steps))):
        dense = Dense(source, 0, index, keep)
        held, steps = past.held(dense), source.steps[index]
        yield read, dense, held, reader.pick(steps, dense.t, held.pos, held.flags, dense.queries, HeldTruth(dense, held))
        dense.leave()
        del dense, held


def all_budgets(source: Source) -> np.ndarray:
    """Mass f32[R, P] of every row at every budget."""
    group = source.layer.group
    out = np.empty((len(source.steps) * group, -(-source.request.total // PAGE)), np.float32)
    for _, dense, _, picked in blocks(source, keep=False):
        rows = slice(dense.index[0] * group, (dense.index[-1] + 1) * group)
        accumulate(picked.order, picked.joined(out.shape[1]), dense.page_mass32(PAGE), out[rows])
    return out


def curves(source: Source, errors: bool) -> None:
    kind = Curves if errors else WithoutErrors
    found = kind(PAGE, source.request.prompt // PAGE, source.layer.row_bytes)
    for read, dense, held, picked in blocks(source):
        found.add(dense, held, picked, np.ones(len(dense.t), bool), ranking_of(read))
    found.rows(0)


class WithoutErrors(Curves):
    def _errors(self, block, held, picked, place):
        return np.zeros((len(place), len(self.grid)), np.float32)


def naive(q, k16, v16, prompt, budgets, every, whole):
    """numpy, one step at a time: bounds by boxes, a partition per budget; whole=True: far mass, top 10, union and output error too."""
    dim, out = k16.shape[1], []
    for n in range(0, len(q), every):
        seen = prompt + n + 1
        k = k16[:seen].astype(np.float32)
        s = q[n] @ k.T / np.float32(np.sqrt(dim))
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        pages = -(-seen // PAGE)
        pad = pages * PAGE - seen
        mass = np.pad(p, ((0, 0), (0, pad))).reshape(len(p), pages, PAGE).sum(2)
        boxes = np.pad(k, ((0, pad), (0, 0)), mode="edge").reshape(pages, PAGE, dim)
        u = np.maximum(q[n][:, None] * boxes.min(1), q[n][:, None] * boxes.max(1)).sum(-1)
        u[:, -1] = np.inf
        if whole:
            v = v16[:seen].astype(np.float32)
            dense = p @ v
            far = np.pad(p[:, 4 : seen - 64], ((0, 0), (4, 64 + pad))).reshape(len(p), pages, PAGE).sum(2)
            best = np.zeros_like(p)
            np.put_along_axis(best, np.argpartition(-s, 10, axis=1)[:, :10], 0.1, 1)
            ten = np.pad(best, ((0, 0), (0, pad))).reshape(len(p), pages, PAGE).sum(2)
        for b in budgets:
            ix = np.argpartition(-u, b - 1, axis=1)[:, :b] if b < pages else np.broadcast_to(np.arange(pages), u.shape)
            got = np.take_along_axis(mass, ix, 1).sum(1)
            out.append(got)
            if whole:
                np.take_along_axis(far, ix, 1).sum(1), np.take_along_axis(ten, ix, 1).sum(1), len(np.unique(ix))
                for g in range(len(p)):
                    at = (ix[g][:, None] * PAGE + np.arange(PAGE)).ravel()
                    at = at[at < seen]
                    np.linalg.norm(p[g, at] @ v[at] / got[g] - dense[g]) / np.linalg.norm(dense[g])
    return out


def torch_peers(q, k16, prompt, budgets) -> list[Entry]:
    """All steps in one batch, with a top-k per budget or with one sort; and the reference logic of Quest at one budget."""
    import torch

    torch.set_grad_enabled(False)
    steps, group, dim = q.shape
    tq, tk = torch.from_numpy(q), torch.from_numpy(k16.astype(np.float32))
    total = len(tk)

    def scored():
        w = (tq.reshape(-1, dim) @ tk.T) * dim**-0.5
        late = torch.arange(prompt, total)[None] > (prompt + torch.arange(len(w)) // group)[:, None]
        w[:, prompt:].masked_fill_(late, float("-inf"))
        mass = torch.softmax(w, -1).view(len(w), -1, PAGE).sum(-1)
        box = tk.view(-1, PAGE, dim)
        flat = tq.reshape(-1, dim)
        return flat.clamp(min=0) @ box.amax(1).T + flat.clamp(max=0) @ box.amin(1).T, mass

    def topk():
        u, mass = scored()
        torch.stack([mass.gather(1, u.topk(int(b), 1)[1]).sum(1) for b in budgets], 1)

    def one_sort():
        u, mass = scored()
        torch.cumsum(mass.gather(1, u.sort(1, descending=True)[1]), 1)

    def quest(budget: int = 2048, every: int = 64):
        for n in range(0, steps, every):
            seen = prompt + n + 1
            pad, low = -seen % PAGE, torch.finfo(torch.float32).min
            keys = tk[None, None, :seen].expand(1, group, seen, dim).reshape(1, group, seen, dim)
            query = tq[n][None, :, None]
            w = torch.matmul(query, keys.transpose(2, 3)) * dim**-0.5
            truth = torch.softmax(w, -1)
            sign = (query > 0) + (~(query > 0)) * -1
            most = torch.cat([keys * sign, torch.full((1, group, pad, dim), low)], -2)
            most = (
                most.reshape(1, group, -1, PAGE, dim)
                .amax(-2)
                .unsqueeze(-2)
                .repeat(1, 1, 1, PAGE, 1)
                .reshape(1, group, -1, dim)[:, :, :seen]
            )
            guess = torch.cat([torch.matmul(query * sign, most.transpose(2, 3)), torch.full((1, group, 1, pad), low)], -1)
            page = guess.reshape(1, group, 1, -1, PAGE).amax(-1)
            top = page.topk(k=min(max(3, budget // PAGE), page.size(-1)), dim=-1)[1]
            at = (top.unsqueeze(-1).repeat(1, 1, 1, 1, PAGE) * PAGE + torch.arange(PAGE)).reshape(1, group, 1, -1)
            mask = torch.zeros_like(guess, dtype=torch.bool).scatter_(-1, at, True)[..., :seen]
            (truth * mask).sum(-1)

    return [
        Entry("torch, top-k at 24 budgets", topk),
        Entry("torch, one sort", one_sort),
        Entry("Quest's reference logic, one budget (64th, scaled)", quest, 64),
    ]


def main(rounds: int = 5) -> bool:
    data = lane()
    q, k16, v16, prompt = data.q.astype(np.float32), data.k[0], data.v[0], data.request.prompt
    budgets = np.unique(np.geomspace(4, len(k16) // PAGE, 24).astype(int))
    got = all_budgets(source_of(data))
    want = naive(q, k16, v16, prompt, budgets, 64, False)
    rows = np.concatenate([np.arange(n * 4, n * 4 + 4) for n in range(0, len(q), 64)])
    gap = np.abs(
        got[rows][:, budgets - 1] - np.stack(want).reshape(-1, len(budgets), 4).transpose(0, 2, 1).reshape(-1, len(budgets))
    ).max()
    assert gap < 5e-3, f"mass differs by {gap}"
    curves(source_of(data), True)
    square = np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32)
    entries = [
        Entry(OURS, lambda: all_budgets(source_of(data))),
        Entry(CURVES, lambda: curves(source_of(data), False)),
        Entry(ERRORS, lambda: curves(source_of(data), True)),
        Entry(NUMPY, lambda: naive(q, k16, v16, prompt, budgets, 32, False), 32),
        Entry(SGEMM, lambda: square @ square),
        Entry(FULL, lambda: naive(q, k16, v16, prompt, budgets, 32, True), 32),
    ]
    try:
        entries += torch_peers(q, k16, prompt, budgets)
    except ImportError:
        print("  torch is not installed (the peers extra): its three peers are left out")
    times = race(entries, rounds)
    print(f"all budgets, T = {len(k16)}, d = {k16.shape[1]}, {len(q)} steps x 4 heads; ratios are to the first line")
    show(times, OURS)
    products = 2 * len(k16) * k16.shape[1] * len(q) * 4 / (2 * 2048**3)
    bare = [n / (s * products) for n, s in zip(times[NUMPY], times[SGEMM], strict=True)]
    print(f"  the lane's logits alone, at this run's sgemm speed, would be {np.median(bare):.1f} times numpy at 24 budgets")
    ok = gate("times numpy at 24 budgets", ratio(times, NUMPY, OURS)[0], 40)
    ok &= gate("2 / (curves without output error / mass alone)", 2 / ratio(times, CURVES, OURS)[0], 1)
    ok &= gate("5 / (curves with it / mass alone)", 5 / ratio(times, ERRORS, OURS)[0], 1)
    ok &= gate("times numpy doing the whole curves at 24 budgets", ratio(times, FULL, ERRORS)[0], 20)
    for name, least in (
        ("torch, top-k at 24 budgets", 6),
        ("torch, one sort", 2.5),
        ("Quest's reference logic, one budget (64th, scaled)", 200),
    ):
        if name in times:
            ok &= gate(f"times {name}", ratio(times, name, OURS)[0], least)
    return ok


if __name__ == "__main__":
    raise SystemExit(not main())
