"""Scores of tokens that more than one keep ranks by, each from the attention that some queries paid.

Columns are slots in ascending position; where `valid` is False nothing is held and nothing is counted, so that what a score says does
not depend on which slots lie empty."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvsim.policies.protocol import Floats, Ints, Mask, expect
from kvsim.units import whole

KERNEL = 5  # neighbours that SnapKV and DefensiveKV smooth over
WIDEST = 9999  # of them that anybody can ask for: zeros as many are put on both ends
LEAST_SCORE = 1e-4  # what CriticalKV adds, so that a token nobody looked at still counts by its values


def expect_kernel(part: object, kernel: int) -> None:
    """Raises WrongUse: a parameter `kernel` over which nothing can be smoothed."""
    centred = 1 <= kernel <= WIDEST and kernel % 2 == 1
    expect(part, "kernel", centred, f"an odd number of tokens up to {WIDEST}, so that pooling is centred")


def smoothed(rows: Floats, valid: Mask, kernel: int = KERNEL) -> Floats:
    """Attention [Hkv, ..., n] averaged over `kernel` neighbouring live slots; beyond the ends are zeros (SnapKV's average pooling)."""
    out = np.zeros(rows.shape)
    for h in range(len(rows)):
        live = np.flatnonzero(valid[h])
        if len(live):
            edges = [(0, 0)] * (rows.ndim - 2) + [(kernel // 2, kernel // 2)]
            out[h][..., live] = sliding_window_view(np.pad(rows[h][..., live], edges), kernel, axis=-1).mean(axis=-1)
    return out


def defensive(rows: Floats, valid: Mask, kernel: int = KERNEL) -> Floats:
    """Attention rows [Hkv, Q, n] of Q queries -> [Hkv, n], the largest smoothed weight that any of them gave a token (DefensiveKV's
    worst case, card B7). Smoothing keeps the total of every row."""
    soft = smoothed(rows, valid, kernel)
    total = np.stack([_total(x, v) for x, v in zip(rows, valid, strict=True)])
    spread = np.stack([_total(x, v) for x, v in zip(soft, valid, strict=True)])
    scale = np.divide(total, spread, out=np.ones_like(total), where=spread > 0)
    worst: Floats = (soft * scale[..., None]).max(axis=1)
    return worst


def floored(worst: Floats, among: Mask) -> Floats:
    """[Hkv, n] raised to its mean over the slots `among` which it chooses: who looked unimportant to all may still matter."""
    return np.stack([np.maximum(x, x[m].mean()) if m.any() else x for x, m in zip(worst, among, strict=True)])


def critical(score: Floats, norm: Floats) -> Floats:
    """Attention [H, n] weighed by what a token's value can move: (score + 1e-4) · |W_O v| (CriticalKV, card B6)."""
    return (score + LEAST_SCORE) * norm


def best(score: Floats, part: float, limit: Ints) -> Mask:
    """[H, n]: of each kv head the rows of highest score, a part of its limit in whole rows; ties to the lower position."""
    out: Mask = np.zeros(score.shape, bool)
    for h, rows in enumerate(limit.tolist()):
        out[h, np.argsort(-score[h], kind="stable")[: whole(part * rows)]] = True
    return out


def _total(rows: Floats, valid: Mask) -> Floats:
    """[Q, n] -> [Q], summed over the live slots."""
    return np.ascontiguousarray(rows[:, valid]).sum(axis=-1)
