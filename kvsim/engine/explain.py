"""`--explain`: how deep a ranking would have to be read, for the pages of most mass, the best tokens, or a proved part of the mass."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsim.engine.attend import HeldTruth
from kvsim.engine.reads import Picked
from kvsim.engine.stop import certificate, depths, ordered
from kvsim.kernels.dense import LOG2E
from kvsim.kernels.order import ABSENT, RANKED, ranked
from kvsim.policies.protocol import Index
from kvsim.policies.rules import exact

TOP_R = (1, 10, 64)  # tokens of the exact certificate
EPS = (0.01, 0.05, 0.1, 0.2)  # unread parts of the mass certificate


def explain(index: Index, picked: Picked, truth: HeldTruth) -> dict[str, Any]:
    """Columns [N * G] of the explain table. k_needed: the fewest pages of the order that hold the pages of most mass, as many as were
    read (card D6); score_gap: the fall of the score at the budget, in scaled logits; the depths of certificates, in pages (A2, A3)."""
    shape, rows = picked.score.shape, picked.rows
    exists = rows > 0
    told = ordered(truth.block.source, picked.pages, picked.score, rows, picked.forced & exists)
    at, plain = told.order.astype(np.int64), told.plain
    many = picked.chosen.sum(-1)
    mass = np.where(exists[:, None], truth.mass(picked.pages), -1.0)
    best = ranked(mass.reshape(-1, shape[-1]), np.repeat(np.where(exists, RANKED, ABSENT).astype(np.uint8), shape[1], 0))
    place = np.empty(shape, np.int64)
    np.put_along_axis(place, at, np.broadcast_to(np.arange(shape[-1]), shape), -1)
    wanted = np.arange(shape[-1]) < many[..., None]
    needed = np.where(wanted, np.take_along_axis(place, best.reshape(shape).astype(np.int64), -1) + 1, 0).max(-1)
    edge = np.take_along_axis(plain, np.minimum(many, shape[-1] - 1)[..., None], -1)[..., 0]
    last = np.take_along_axis(plain, many[..., None] - 1, -1)[..., 0]
    gap = np.where(many < exists.sum(1)[:, None], (last - edge) / LOG2E, np.nan)
    block = truth.block
    role = np.repeat(block.source.request.roles[block.t], block.group)
    out = {"role": role, "k_needed": needed.ravel(), "score_gap": gap.ravel()}
    if not index.bound:
        return out
    everything = np.full((shape[0], 1), shape[-1])
    for r in TOP_R:
        out[f"exact_pages_r{r}"] = depths(exact(r=r), told, everything, 0 * everything, truth).pages.ravel()
    proved = certificate(told, truth)
    deep = np.arange(proved.shape[-1]) >= told.forced[..., None]
    for eps in EPS:
        first = np.where((proved <= eps) & deep, np.arange(proved.shape[-1]), proved.shape[-1]).min(-1)
        out[f"mass_pages_{eps:g}".replace("0.", "0")] = np.minimum(first, told.many).ravel()
    return out
