"""One layer of a trace from disk to arrays that can be used, against plain readers of the same numbers; one thread, CPU time."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.race import Entry, gate, race, ratio, show
from kvsim.synth.generate import OPTIONAL, synthesize
from kvsim.trace.open import open_trace

OURS, PARQUET, NPY = "kvsim: a lane, mapped and checked", "pyarrow: read_table, to numpy", "numpy: load of .npy files"
TOKENS = 32768


def lane(path: Path) -> float:
    """Every number of K, V and the queries is looked at, so that mapped pages are really read."""
    trace = open_trace(path)
    got = trace.lane(trace.requests[0], trace.captured_layers[0])
    return sum(float(np.add.reduce(np.ascontiguousarray(x).view(np.uint64), axis=None)) for x in (got.k, got.v, got.q))


def plain(path: Path) -> float:
    """Row groups in the order they are stored; what a script without kvsim would do."""
    total = 0.0
    for file in sorted(path.glob("[kq]*/request=0/layer=0/*.parquet")):
        table = pq.read_table(file, use_threads=False)
        for name in table.column_names:
            if table.schema.field(name).type.num_buffers == 2 and name in ("k", "v", "q"):
                for chunk in table[name].chunks:
                    raw = np.frombuffer(chunk.buffers()[1], np.uint8)
                    total += float(np.add.reduce(raw[: len(raw) // 8 * 8].view(np.uint64)))
    return total


def npy(files: list[Path]) -> float:
    return sum(float(np.add.reduce(np.load(f).view(np.uint64), axis=None)) for f in files)


def main(rounds: int = 5) -> bool:
    with TemporaryDirectory() as place:
        path = Path(place) / "trace"
        shape: dict[str, Any] = {"prompt": TOKENS - 64, "steps": 64, "layers": 1, "q_heads": 4, "kv_heads": 1, "head_dim": 128}
        synthesize(path, **shape, dtype="float16", without=OPTIONAL)
        trace = open_trace(path)
        got = trace.lane(trace.requests[0], trace.captured_layers[0])
        files = [Path(place) / f"{name}.npy" for name in "kvq"]
        for file, x in zip(files, (got.k, got.v, got.q), strict=True):
            np.save(file, np.ascontiguousarray(x))
        size = sum(f.stat().st_size for f in files)
        del got
        entries = [Entry(OURS, lambda: lane(path)), Entry(PARQUET, lambda: plain(path)), Entry(NPY, lambda: npy(files))]
        times = race(entries, rounds)
    print(
        f"K, V and queries of one layer, {TOKENS} tokens, {size / 1e6:.0f} MB, from the page cache; ratios are to the first line"
    )
    show(times, OURS)
    return gate("times pyarrow", ratio(times, PARQUET, OURS)[0], 0.8)


if __name__ == "__main__":
    raise SystemExit(not main())
