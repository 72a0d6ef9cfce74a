"""How many workers: as many as there are cores and tasks, fewer when they would not fit, one when starting more costs more than the work."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from kvsim.engine.attend import steps_per_block
from kvsim.errors import WrongUse
from kvsim.geometry import ATTENTION, ITEMSIZE, Layer, Request
from kvsim.kernels.dense import ROWS
from kvsim.replay.asked import Asked
from kvsim.replay.work import Task
from kvsim.trace.open import Trace

PROCESS = 300 << 20  # an interpreter with numba and pyarrow, before its first task
WORTH = 50_000_000  # logits of all policies below which starting a process takes longer than the work
UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def workers_for(trace: Trace, asked: Asked, tasks: Sequence[Task], workers: int | None, memory: int | str | None) -> int:
    """Raises WrongUse for less than one worker, or a memory in which not even one fits."""
    if workers is not None and workers < 1:
        raise WrongUse(f"workers {workers}: expected 1 or more")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    units = [(r, x) for r in asked.requests for x in asked.layers if (r.id, x.id) in set(tasks)]
    many = max(1, min(workers or cores, len(tasks)))
    if workers is None and sum(_logits(r, x) for r, x in units) * len(asked.entries) < WORTH:
        many = 1
    if memory is not None and units:
        limit = in_bytes(memory)
        need, r, x = max(((task_bytes(r, x, trace.dtype, asked), r, x) for r, x in units), key=lambda u: u[0])
        if need > limit:
            raise WrongUse(f"memory {memory}: request {r.id}, layer {x.id} alone takes about {need / 2**30:.1f} GiB; allow that much")
        many = min(many, limit // need)
    return many


def in_bytes(memory: int | str) -> int:
    """8589934592, "8GiB" or "8 GB" -> bytes. Raises WrongUse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(memory).lower())
    if not match or match[2] not in UNITS:
        raise WrongUse(f"memory {memory!r}: expected bytes or a size such as 8GiB")
    return int(float(match[1]) * UNITS[match[2]])


def task_bytes(r: Request, layer: Layer, dtype: str, asked: Asked) -> int:
    """About what one process takes at most for one task; T tokens, N decode steps, Hq query heads, d = key_dim + value_dim:

    the process, K and V of the layer as stored, T·d·Hkv·itemsize; of one kv head in float32, 4·T·d; a block of logits and its
    flags, T·(4·ROWS + steps); the queries, 4·N·Hq·key_dim; per policy its rows, and, if it observes attention, keys and logits
    of all kv heads over the live slots in float64, 8·T·Hkv·(key_dim + 64)."""
    t, n = r.total, r.total - r.prompt
    d = layer.key_dim + layer.value_dim
    stored = t * d * layer.kv_heads * ITEMSIZE[dtype]
    block = t * (4 * ROWS + 4 * d + 3 * steps_per_block(layer.group))
    observed = 0
    for entry in asked.entries:
        observers = any(ATTENTION in part.needs for part in entry.policy.default.parts)
        observed += n * 400 * (layer.q_heads + layer.kv_heads) + (t * n * layer.kv_heads // 8 if observers else 0)
    watching = 8 * t * layer.kv_heads * (layer.key_dim + 64)
    return PROCESS + stored + block + 4 * n * layer.q_heads * layer.key_dim + observed + watching


def _logits(r: Request, layer: Layer) -> int:
    return (r.total - r.prompt) * r.total * layer.q_heads
