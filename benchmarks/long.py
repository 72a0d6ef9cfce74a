"""Does a request that is larger than memory replay in little of it, and what is read from object storage for one layer?

    python benchmarks/long.py --tokens 131072 --layers 32

A random trace (4 kv heads, 16 query heads, 128 numbers, float16: 8.6 GB at that size) is written to a temporary folder, layer after
layer, and replayed under quest and h2o with --memory 4GiB: the most that all its processes ever held is the answer. With --s3, two
layers go to a local S3 server (moto) that counts the bytes it gives for one of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvsim.replay.memory import in_bytes
from kvsim.trace.open import open_trace
from kvsim.trace.write import TraceWriter

ROOT = Path(__file__).resolve().parent.parent
KV_HEADS, Q_HEADS, DIM, STEPS = 4, 16, 128, 64
POLICIES = ("quest(read=tokens(1024), page=16)", "h2o(hold=tokens(4096))")
MOST_READ = 1.1  # of a layer's bytes


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=16384, help="of the context (default: 16384; at full size 131072)")
    p.add_argument("--layers", type=int, default=2, help="(default: 2; at full size 32)")
    p.add_argument("--memory", default="4GiB", help="given to the replay (default: 4GiB)")
    p.add_argument("--workers", default="1", help="of the replay (default: 1)")
    p.add_argument("--s3", action="store_true", help="also count what is read of one layer from an S3 server")
    p.add_argument("--folder", help="where the trace is written, for a moment (default: the system's temporary folder)")
    args = p.parse_args(argv)
    with TemporaryDirectory(prefix="kvsim-long-", dir=args.folder) as folder:
        trace = Path(folder) / "trace"
        size = written(trace, args.tokens, args.layers)
        print(f"{args.tokens} tokens x {args.layers} layers, {size / 1e9:.2f} GB")
        words = ["replay", trace, "-p", *POLICIES, "-o", Path(folder) / "run", "--memory", args.memory, "--workers", args.workers]
        begun = time.perf_counter()
        most = peak([sys.executable, "-m", "kvsim", *map(str, words)])
        good = told(f"{time.perf_counter() - begun:.0f} s, at most {most / 2**30:.2f} GiB", most <= in_bytes(args.memory))
        if args.s3:
            share = read_of_a_layer(trace)
            good &= told(f"{share:.3f} of a layer's bytes read from S3 for it", share <= MOST_READ)
    return 0 if good else 1


def written(path: Path, tokens: int, layers: int) -> int:
    """-> bytes. Every prompt token has the same attention mass, so that h2o has something to start from."""
    rng = np.random.default_rng(0)
    request = {"request": 0, "prompt_tokens": tokens - STEPS, "total_tokens": tokens, "mode": "synthetic"}
    request |= {"token_ids": [0] * tokens, "roles": [0] * (tokens - STEPS) + [3] * STEPS, "spans": []}
    spec = {"kind": "full", "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "key_dim": DIM, "value_dim": DIM, "scale": DIM**-0.5}
    spec |= {"row_bytes": 4 * DIM, "captured": True}
    rows = [spec | {"layer": i} for i in range(layers)]
    mass = np.full((Q_HEADS, tokens - STEPS), 1.0, np.float32)
    with TraceWriter(path, "float16", {"model": "random"}, {"tool": "benchmarks/long.py"}, [request], rows, durable=False) as to:
        for layer in range(layers):
            for start in range(0, tokens, 32768):
                n = min(32768, tokens - start)
                k, v = (rng.standard_normal((KV_HEADS, n, DIM), np.float32).astype(np.float16) for _ in range(2))
                to.kv(0, layer, start, k, v)
            to.q(0, layer, np.arange(STEPS), rng.standard_normal((STEPS, Q_HEADS, DIM), np.float32).astype(np.float16))
            to.prefill(0, layer, mass, np.arange(tokens - STEPS, 0, -1))
    return sum(f.stat().st_size for f in path.rglob("*.parquet"))


def peak(command: Sequence[str]) -> int:
    """Runs a command -> the most bytes that it and all below it held at once (Linux)."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        most = max(most, sum(held(pid) for pid in family(process.pid)))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return most


def family(pid: int) -> list[int]:
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(p for child in below for p in family(int(child)))]


def held(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), 0)


def read_of_a_layer(trace: Path) -> float:
    from tests.bucket import serving

    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    manifest = json.loads((trace / "manifest.json").read_text())
    mine = sum(entry["bytes"] for name, entry in manifest["files"].items() if "/layer=0/" in name)
    with serving() as server:
        there = open_trace(server.upload(trace, "trace"))
        server.read()
        there.lane(there.requests[0], there.layers[0])
        return server.read() / mine


def told(what: str, good: bool) -> bool:
    print(f"  {'ok  ' if good else 'MISS'} {what}")
    return good


if __name__ == "__main__":
    raise SystemExit(main())
