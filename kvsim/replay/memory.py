"""How many workers: as many as there are cores and tasks, fewer when they would not fit, one when starting more costs more than the work."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.engine.attend import steps_per_block
from kvsim.errors import WrongUse
from kvsim.geometry import ATTENTION, FUTURE, ITEMSIZE, Layer, Request
from kvsim.replay.asked import Asked, Task, modules_of
from kvsim.replay.baselines import chains_of
from kvsim.trace.open import Trace

PROCESS = 300 << 20  # an interpreter with numba and pyarrow, before its first task
BLOCK = 9  # arrays as large as a block's logits, at the worst moment (measured: a read policy on 32 768 tokens)
ROW = 500  # a query head's row in all tables, while it is put together
WORTH = 50_000_000  # logits of all policies below which starting a process takes longer than the work
UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def workers_for(trace: Trace, asked: Asked, tasks: Sequence[Task], workers: int | None, memory: int | str | None) -> int:
    """Raises WrongUse for less than one worker, or a memory in which not even one fits."""
    return workers_of([Lot(trace, asked, tasks)], workers, memory)


@dataclass(frozen=True, eq=False)
class Lot:
    """Tasks of one trace that are to be done."""

    trace: Trace
    asked: Asked
    tasks: Sequence[Task]

    def units(self) -> list[tuple[Request, Layer]]:
        mine = set(self.tasks)
        return [(r, x) for r in self.asked.requests for x in self.asked.layers if (r.id, x.id) in mine]

    def largest(self, policies: int | None = None) -> tuple[int, str]:
        """Bytes of the task that takes most, with so many policies at once (None: all), and which one that is."""
        dtype = self.trace.dtype
        need, r, x = max(((task_bytes(r, x, dtype, self.asked, policies), r, x) for r, x in self.units()), key=lambda u: u[0])
        return need, f"request {r.id}, layer {x.id}"


def workers_of(lots: Sequence[Lot], workers: int | None, memory: int | str | None) -> int:
    """How many processes for the tasks of several traces together. Raises WrongUse as `workers_for` does."""
    if workers is not None and workers < 1:
        raise WrongUse(f"workers {workers}: expected 1 or more")
    lots = [lot for lot in lots if lot.tasks]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    many = max(1, min(workers or cores, sum(len(lot.tasks) for lot in lots)))
    little = sum(_logits(r, x) * len(lot.asked.entries) for lot in lots for r, x in lot.units()) < WORTH
    at_home = any("__main__" in modules_of(e.policy) for lot in lots for e in lot.asked.entries)  # no other process has it
    if workers is None and (little or at_home):
        many = 1
    if memory is not None and lots:
        many = min(many, in_bytes(memory) // max(lot.largest(at_once(lot, memory))[0] for lot in lots))
    return many


def at_once(lot: Lot, memory: int | str | None) -> int | None:
    """How many policies a task may replay together so that one worker fits; None: all. Raises WrongUse when not even one does."""
    if memory is None or not lot.tasks:
        return None
    limit, policies = in_bytes(memory), len(lot.asked.entries)
    need, what = lot.largest(1)
    if need > limit:
        raise WrongUse(f"memory {memory}: {what} alone takes about {need / 2**30:.1f} GiB; allow that much")
    each = (lot.largest(policies)[0] - need) / max(1, policies - 1)
    fit = policies if not each else min(policies, 1 + int((limit - need) / each))
    return None if fit == policies else fit


def in_bytes(memory: int | str) -> int:
    """8589934592, "8GiB" or "8 GB" -> bytes. Raises WrongUse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(memory).lower())
    if not match or match[2] not in UNITS:
        raise WrongUse(f"memory {memory!r}: expected bytes or a size such as 8GiB")
    return int(float(match[1]) * UNITS[match[2]])


def task_bytes(r: Request, layer: Layer, dtype: str, asked: Asked, policies: int | None = None) -> int:
    """About what one process takes at most for one task of T tokens, N decode steps, Hq query and Hkv kv heads, d = key_dim + value_dim:

    the process; T tokens times K and V of the layer as stored (d·Hkv·itemsize), K and V of a kv head in float32 (4·d), float32
    logits of a block of R query rows and what is made of them (BLOCK·4·R), and if a policy observes attention, keys, logits of 64
    rows and attention of all heads in float64 (8·Hkv·(key_dim + 64) + 8·Hq), if one looks at the last w prompt queries, two arrays of
    their attention (2·8·w·Hq), and if one sees the future, its keys and about 3·√N float64 sums (8·key_dim + 8·Hkv·3·√N); N steps
    times the queries and, per policy, its rows: of as many as are replayed at once (policies; None: all)."""
    d, rows = layer.key_dim + layer.value_dim, steps_per_block(layer.group) * layer.group
    token = d * layer.kv_heads * ITEMSIZE[dtype] + 4 * d + BLOCK * 4 * rows
    needs = {need for e in asked.entries for chain in chains_of(e.policy) for part in chain.parts for need in part.needs}
    token += 2 * 8 * layer.q_heads * min(r.prompt, max((need.rows for need in needs), default=0))
    if ATTENTION in needs:
        token += 8 * layer.kv_heads * (layer.key_dim + 64) + 8 * layer.q_heads
    if FUTURE in needs:
        token += 8 * layer.key_dim + 8 * layer.kv_heads * 3 * math.isqrt(r.total - r.prompt)
    step = layer.q_heads * (4 * layer.key_dim + (policies or len(asked.entries)) * ROW)
    return PROCESS + r.total * token + (r.total - r.prompt) * step


def _logits(r: Request, layer: Layer) -> int:
    return (r.total - r.prompt) * r.total * layer.q_heads
