"""What a fixed shape of products costs, and why it is needed: speed by rows of a block, and the part of elements whose bits change."""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks.race import pinned
from kvsim.kernels.dense import ROWS, TILE


def main(rounds: int = 5) -> bool:
    pinned()
    rng = np.random.default_rng(0)
    keys, square = rng.standard_normal((32768, 128), dtype=np.float32), rng.standard_normal((2048, 2048), dtype=np.float32)
    queries = rng.standard_normal((1024, 128), dtype=np.float32)
    reference = keys[:TILE] @ np.ascontiguousarray(queries[:ROWS].T)
    print(f"products [{TILE}, 128] x [128, rows]: speed as part of a 2048^3 product's, and elements unlike those at {ROWS} rows")
    for rows in (1, 4, 16, 64, 128, 256, 512, 1024):
        turned, speed = np.ascontiguousarray(queries[:rows].T), []
        for _ in range(rounds):
            start = time.process_time()
            square @ square
            peak = 2 * 2048**3 / (time.process_time() - start)
            start = time.process_time()
            for t in range(0, len(keys), TILE):
                got = keys[t : t + TILE] @ turned
            speed.append(2 * keys.size * rows / (time.process_time() - start) / peak)
        got, same = keys[:TILE] @ turned, min(rows, ROWS)
        unlike = np.mean(got[:, :same] != reference[:, :same])
        print(f"  {rows:5d} rows: {statistics.median(speed):.2f} of the square product's speed, {unlike:.1%} of elements differ")
    alike = keys[:1].repeat(TILE, 0) @ queries[:1].T.repeat(ROWS, 1)
    print(f"  the same row and column at every place of [{TILE}, 128] x [128, {ROWS}]: {len(np.unique(alike))} different results")
    return True


if __name__ == "__main__":
    main()
