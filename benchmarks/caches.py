"""The cache of pages that stands before a host tier (offload, least recently used) against libCacheSim's LRU: the pages that Quest reads of
one lane, 128 of 2 048 at each of 256 steps, through caches of three sizes; one thread, CPU time."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.h2o import source_of
from benchmarks.lanes import lane
from benchmarks.race import Entry, note, race, ratio, show
from kvsim.engine.offload import PageCache
from kvsim.engine.run import Job, run_layer
from kvsim.policies.language import parse
from kvsim.policies.store.offload import offload
from kvsim.units import pages

PAGE, SIZES = 16, (256, 512, 1024)
OURS, THEIRS = "kvsim: the offload store's cache, step by step", "libCacheSim: LRU over the pages in a row"
RECORD = np.dtype([("clock", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])  # of its oracleGeneral format


def read_pages() -> list[np.ndarray]:
    """The pages of every step."""
    job = Job(parse(f'quest(read=tokens(2048), page={PAGE}, heads="max")'))
    found: dict[int, list[int]] = {}
    for part in run_layer(source_of(lane()), [job], plans=True)[0]["plans"]:
        found |= dict(zip(part["step"], part["pages"], strict=True))
    return [np.array(found[step]) for step in sorted(found)]


def ours(steps: list[np.ndarray], total: int, size: int) -> int:
    """Misses, of pages that are all full."""
    cache, rows, score = PageCache(offload(device=pages(size)), PAGE, total), np.full(total, PAGE), np.full(total, np.nan)
    missed = 0
    for t, ids in enumerate(steps):
        asked = np.zeros(total, bool)
        asked[ids] = True
        missed += int(cache.step(t, asked, rows, rows, score, size).missed.sum())
    return missed


def written(steps: list[np.ndarray], file: Path) -> Any:
    """Their trace: of a step the higher page first, which is the one that we let go first."""
    from libcachesim import TraceReader, TraceType

    ids = np.concatenate([np.sort(x)[::-1] for x in steps])
    rows = np.zeros(len(ids), RECORD)
    rows["clock"], rows["id"], rows["size"], rows["next"] = np.arange(len(ids)), ids + 1, 1, -2
    rows.tofile(file)
    return TraceReader(str(file), TraceType.ORACLE_GENERAL_TRACE)


def theirs(reader: Any, size: int) -> int:
    from libcachesim import LRU

    reader.reset()
    return round(LRU(cache_size=size, hashpower=12).process_trace(reader)[0] * reader.get_num_of_req())


def main(rounds: int = 5) -> bool:
    try:
        import libcachesim  # noqa: F401
    except ImportError:
        print("caches: libcachesim is not installed (the peers extra): left out")
        return True
    steps = read_pages()
    total, many = int(max(x.max() for x in steps)) + 1, sum(map(len, steps))
    with TemporaryDirectory() as place:
        one = [np.array([x]) for x in np.concatenate(steps[:40])]
        alone = written(one, Path(place) / "one.bin")
        assert all(ours(one, total, n) == theirs(alone, n) for n in SIZES), "page by page both miss the same"
        reader = written(steps, Path(place) / "steps.bin")
        entries = [
            Entry(OURS, lambda: [ours(steps, total, n) for n in SIZES]),
            Entry(THEIRS, lambda: [theirs(reader, n) for n in SIZES]),
        ]
        times = race(entries, rounds)
        misses = [(n, ours(steps, total, n), theirs(reader, n)) for n in SIZES]
    print(
        f"{many} reads of {total} pages in {len(steps)} steps, caches of {', '.join(map(str, SIZES))}; ratios are to the first line"
    )
    show(times, OURS)
    for n, mine, other in misses:
        print(f"       {n} pages: {mine} misses, {other} where a step's pages come one after the other")
    note("times libCacheSim", ratio(times, THEIRS, OURS)[0])
    return True


if __name__ == "__main__":
    raise SystemExit(not main())
