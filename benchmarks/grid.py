"""What products of our own cost beside those of BLAS, and how many elements BLAS rounds otherwise when the shape of a call changes."""

from __future__ import annotations

import statistics
import time
from functools import partial

import numpy as np

from benchmarks.race import pinned
from kvsim.kernels.dense import TILE
from kvsim.kernels.product import GRID, product, strips

TOKENS = 32768
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024)


def ours(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """A tile at a time, as the engine does it, query rows in multiples of GRID."""
    there, out = strips(queries.T), np.empty((TILE, -(-len(queries) // GRID) * GRID), keys.dtype)
    for t in range(0, len(keys), TILE):
        product(keys[t : t + TILE], there, out)
    return out[:, : len(queries)]


def blas(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    turned, out = np.ascontiguousarray(queries.T), np.empty((TILE, len(queries)), keys.dtype)
    for t in range(0, len(keys), TILE):
        np.matmul(keys[t : t + TILE], turned, out=out)
    return out


def outputs(weights: np.ndarray, values: np.ndarray, part: np.ndarray) -> None:
    product(weights.T, strips(values), part)


def main(rounds: int = 5) -> bool:
    pinned()
    rng = np.random.default_rng(0)
    for kind in (np.float32, np.float64):
        keys, square = rng.standard_normal((TOKENS, 128)).astype(kind), rng.standard_normal((2048, 2048)).astype(kind)
        queries = rng.standard_normal((max(ROWS), 128)).astype(kind)
        print(
            f"{np.dtype(kind)} products [{TILE}, 128] x [128, rows]: speed as part of a 2048^3 product's; elements unlike those at 256"
        )
        usual = {f: f(keys, queries[:256]) for f in (ours, blas)}
        for rows in ROWS:
            given = keys, queries[:rows]
            speed = {f: _share(partial(f, *given), square, 2 * keys.size * rows, rounds) for f in (ours, blas)}
            same = min(rows, 256)
            unlike = {f: np.mean(f(*given)[:, :same] != usual[f][:, :same]) for f in (ours, blas)}
            told = ", ".join(f"{f.__name__} {speed[f]:.2f} and {unlike[f]:.1%}" for f in (ours, blas))
            print(f"  {rows:5d} rows: {told}")
        weights, values = rng.random((TILE, 256)).astype(kind), keys[:TILE]
        part = np.empty((256, 128), kind)
        times = {
            "ours": partial(outputs, weights, values, part),
            "blas": partial(np.matmul, weights.T, values, out=part),
        }
        told = ", ".join(f"{name} {_share(work, square, 2 * weights.size * 128, rounds, 64):.2f}" for name, work in times.items())
        print(f"  [256, {TILE}] x [{TILE}, 128], as outputs are made: {told}")
        alike = [len(np.unique(f(keys[:1].repeat(TILE, 0), queries[:1].repeat(256, 0)))) for f in (ours, blas)]
        print(f"  the same row and column at every place of a product: ours {alike[0]}, blas {alike[1]} different results")
    return True


def _share(work, square: np.ndarray, flops: int, rounds: int, times: int = 1) -> float:
    """The speed of work as part of a square product's, the median of rounds."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        square @ square
        peak = 2 * len(square) ** 3 / (time.process_time() - start)
        start = time.process_time()
        for _ in range(times):
            work()
        found.append(flops * times / (time.process_time() - start) / peak)
    return float(statistics.median(found))


if __name__ == "__main__":
    main()
