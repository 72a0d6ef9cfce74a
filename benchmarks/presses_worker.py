"""Runs in kvpress's environment, without kvsim: scores what it is told to on its standard input, and says how many CPU seconds that took.

    python presses_worker.py IN.npz OUT.npz

IN: q [Hq, T, d], k, v [Hkv, T, d] in float32. OUT: the scores [T] of every press. Statistics of queries, which kvsim has in its traces, are
computed once beforehand. Prints kvpress's version when it is ready."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/oracles"))

import kvpress
from press import Stub


def main(source: str, target: str) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    q, k, v = (torch.from_numpy(x) for x in (np.load(source)[name] for name in "qkv"))
    heads, total, dim = q.shape
    stub = Stub(heads, len(k), dim, torch.zeros(heads, dim, dim))
    still = torch.ones(1, total, dim), torch.zeros(1, total, dim)
    rows = q.transpose(0, 1).reshape(1, total, heads * dim)
    presses = {
        "snapkv": kvpress.SnapKVPress(0.5, window_size=64, kernel_size=5),
        "tova": kvpress.TOVAPress(0.5),
        "knorm": kvpress.KnormPress(0.5),
        "expected_attention": kvpress.ExpectedAttentionPress(0.5),
    }
    known = presses["expected_attention"].get_query_statistics(stub, rows)
    presses["expected_attention"].get_query_statistics = lambda *_: known

    def score(name: str) -> torch.Tensor:
        return presses[name].score(stub, rows, k[None], v[None], None, {"position_embeddings": still})[0, 0]

    np.savez(target, **{name: score(name).numpy() for name in presses})
    print(version("kvpress"), flush=True)
    for line in sys.stdin:
        start = time.process_time()
        score(line.strip())
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
