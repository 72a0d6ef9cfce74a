"""Does the cost of every budget from one sort grow with T alone, and does a lane of 128K tokens stay small? One kv head, d = 128."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.budgets import all_budgets, curves
from benchmarks.h2o import source_of
from benchmarks.lanes import lane
from benchmarks.race import Entry, gate, peak_memory, race
from kvsim.trace.open import Lane

TOKENS = (4096, 16384, 65536, 131072)
STEPS, GROUP = 256, 4
LARGEST = 300  # MB


def whole_lane(data: Lane, times: int = 1) -> None:
    for _ in range(times):
        all_budgets(source_of(data))


def main(rounds: int = 7) -> bool:
    lanes = {t: lane(t, steps=STEPS, group=GROUP) for t in TOKENS}
    whole = lanes[TOKENS[-1]]
    whole_lane(lanes[TOKENS[0]])  # compiles, so that it is not counted
    curves(source_of(lanes[TOKENS[0]]), True)
    memory = peak_memory(lambda: whole_lane(whole))
    with_curves = peak_memory(lambda: curves(source_of(whole), True))
    many = {t: TOKENS[-1] // t for t in TOKENS}  # lanes in a row, as a replay has them, of as many tokens for every length
    entries = [Entry(f"T = {t}", partial(whole_lane, data, many[t]), 1 / many[t]) for t, data in lanes.items()]
    times = race(entries, 2 * rounds)  # a short lane's time moves by a third with a machine's neighbours, for seconds
    print(f"mass at all budgets, d = 128, {STEPS} steps x {GROUP} heads; CPU time per token of context and row")
    each = {t: statistics.median(x) / t / (STEPS * GROUP) * 1e9 for t, x in zip(TOKENS, times.values(), strict=True)}
    for (t, ns), all_ in zip(each.items(), times.values(), strict=True):
        per = [x / t / (STEPS * GROUP) * 1e9 for x in all_]
        print(f"  T = {t:6d} {statistics.median(all_) * 1e3:10.1f} ms   {ns:6.3f} ns [{min(per):.3f} .. {max(per):.3f}]")
    ok = gate("1.25 / (dearest length / cheapest length, per token)", 1.25 / (max(each.values()) / min(each.values())), 1)
    print(
        f"  peak memory of a lane of {TOKENS[-1]} tokens above the process: {memory:.0f} MB, with whole curves {with_curves:.0f} MB"
    )
    return ok & gate(f"{LARGEST} MB / peak memory", LARGEST / memory, 1)


if __name__ == "__main__":
    raise SystemExit(not main())
