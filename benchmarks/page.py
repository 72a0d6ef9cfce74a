"""The report of the bundled trace's demo run: CPU seconds to build it, and its size."""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import kvsim
from benchmarks.race import Entry, gate, race
from kvsim.replay.demo import suppliable
from kvsim.trace.bundled import bundled

LARGEST = 6.0  # MB


def main(rounds: int = 3) -> bool:
    with TemporaryDirectory() as place:
        page, trace = Path(place) / "page.html", kvsim.open_trace(bundled())
        run = kvsim.replay(trace, suppliable(trace)[0], Path(place) / "run", plans=True, explain=True, baselines=True)
        times = race([Entry("kvsim: report", lambda: kvsim.report(run.path, page))], min(rounds, 3))["kvsim: report"]
        size = page.stat().st_size / 1e6
    print(f"the demo's report: {statistics.median(times):.1f} s [{min(times):.1f} .. {max(times):.1f}], {size:.1f} MB")
    return gate(f"{LARGEST:g} MB / size", LARGEST / size, 1)


if __name__ == "__main__":
    raise SystemExit(not main())
