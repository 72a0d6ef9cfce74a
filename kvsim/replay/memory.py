"""How many workers: as many as there are cores and tasks, fewer when they would not fit, one when starting more costs more than the work."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

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
    if workers is not None and workers < 1:
        raise WrongUse(f"workers {workers}: expected 1 or more")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    units = [(r, x) for r in asked.requests for x in asked.layers if (r.id, x.id) in set(tasks)]
    many = max(1, min(workers or cores, len(tasks)))
    little = sum(_logits(r, x) for r, x in units) * len(asked.entries) < WORTH
    at_home = any("__main__" in modules_of(e.policy) for e in asked.entries)  # in a script or a notebook: no other process has it
    if workers is None and (little or at_home):
        many = 1
    if memory is not None and units:
        limit = in_bytes(memory)
        need, r, x = max(((task_bytes(r, x, trace.dtype, asked), r, x) for r, x in units), key=lambda u: u[0])
        if need > limit:
            raise WrongUse(
                f"memory {memory}: request {r.id}, layer {x.id} alone takes about {need / 2**30:.1f} GiB; allow that much"
            )
        many = min(many, limit // need)
    return many


def in_bytes(memory: int | str) -> int:
    """8589934592, "8GiB" or "8 GB" -> bytes. Raises WrongUse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(memory).lower())
    if not match or match[2] not in UNITS:
        raise WrongUse(f"memory {memory!r}: expected bytes or a size such as 8GiB")
    return int(float(match[1]) * UNITS[match[2]])


def task_bytes(r: Request, layer: Layer, dtype: str, asked: Asked) -> int:
    """About what one process takes at most for one task of T tokens, N decode steps, Hq query and Hkv kv heads, d = key_dim + value_dim:

    the process; T tokens times K and V of the layer as stored (d·Hkv·itemsize), K and V of a kv head in float32 (4·d), float32
    logits of a block of R query rows and what is made of them (BLOCK·4·R), and if a policy observes attention, keys, logits of 64
    rows and attention of all heads in float64 (8·Hkv·(key_dim + 64) + 8·Hq), if one looks at the last w prompt queries, two arrays of
    their attention (2·8·w·Hq), and if one sees the future, its keys and about 3·√N float64 sums (8·key_dim + 8·Hkv·3·√N); N steps
    times the queries and, per policy, its rows."""
    d, rows = layer.key_dim + layer.value_dim, steps_per_block(layer.group) * layer.group
    token = d * layer.kv_heads * ITEMSIZE[dtype] + 4 * d + BLOCK * 4 * rows
    needs = {need for e in asked.entries for chain in chains_of(e.policy) for part in chain.parts for need in part.needs}
    token += 2 * 8 * layer.q_heads * min(r.prompt, max((need.rows for need in needs), default=0))
    if ATTENTION in needs:
        token += 8 * layer.kv_heads * (layer.key_dim + 64) + 8 * layer.q_heads
    if FUTURE in needs:
        token += 8 * layer.key_dim + 8 * layer.kv_heads * 3 * math.isqrt(r.total - r.prompt)
    step = layer.q_heads * (4 * layer.key_dim + len(asked.entries) * ROW)
    return PROCESS + r.total * token + (r.total - r.prompt) * step


def _logits(r: Request, layer: Layer) -> int:
    return (r.total - r.prompt) * r.total * layer.q_heads
