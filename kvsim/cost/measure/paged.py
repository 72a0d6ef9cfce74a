"""Attention over the pages that a table names, read where they are: torch has no such kernel, so this one is Triton's.

Split-KV: each program takes a run of a kv head's tokens; what they found is put together by their masses."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
TOKENS = 64  # of a program's step
ROWS = 16  # query heads of a group, padded to what a tensor core multiplies
WAVES = 4  # programs for each processor


@triton.jit
def _part(q, k, v, table, out, mass, count, there, run, unit, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, S: tl.constexpr,
          TOKENS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    head, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    g, d, dv, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, DV), tl.arange(0, TOKENS)
    rows = tl.load(q + (head * G + g[:, None]) * D + d[None, :], mask=g[:, None] < G, other=0.0)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV], tl.float32)
    for first in range(split * run, tl.minimum(split * run + run, count), TOKENS):
        at = first + t
        seen = at < count
        page = tl.load(table + head * (count // S) + at // S, mask=seen, other=0)
        slot = (head * there + page) * S + at % S
        keys = tl.load(k + slot[:, None] * D + d[None, :], mask=seen[:, None], other=0.0)
        w = tl.where(seen[None, :], tl.dot(rows, tl.trans(keys)) * unit, -1e30)
        top = tl.maximum(peak, tl.max(w, 1))
        w = tl.exp2(w - top[:, None])
        shrink = tl.exp2(peak - top)
        values = tl.load(v + slot[:, None] * DV + dv[None, :], mask=seen[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(w.to(values.dtype), values)
        total = total * shrink + tl.sum(w, 1)
        peak = top
    place = (head * splits + split) * G + g
    tl.store(out + place[:, None] * DV + dv[None, :], acc / total[:, None], mask=g[:, None] < G)
    tl.store(mass + place, peak + tl.log2(total), mask=g < G)


def attend(q: Any, k: Any, v: Any, table: Any, processors: int | None = None) -> Any:
    """q [B, H, G, d], k and v [B, H, P, S, d], table i32[B, H, K] -> [B, H, G, dv]; d and dv powers of two, G at most 16."""
    batch, heads, group, d = q.shape
    there, size, wide = k.shape[2], k.shape[3], v.shape[4]
    count = table.shape[2] * size
    processors = processors or torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = min(-(-WAVES * processors // (batch * heads)), -(-count // TOKENS))
    run = -(-count // (splits * TOKENS)) * TOKENS
    splits = -(-count // run)
    out = torch.empty((batch, heads, splits, group, wide), dtype=torch.float32, device=q.device)
    mass = torch.empty((batch, heads, splits, group), dtype=torch.float32, device=q.device)
    unit = LOG2E / math.sqrt(d)
    _part[(batch * heads, splits)](
        q, k, v, table, out, mass, count, there, run, unit, group, d, wide, size, TOKENS=TOKENS, ROWS=ROWS
    )
    share = (mass * math.log(2)).softmax(2)
    return (out * share[..., None]).sum(2).to(q.dtype)
