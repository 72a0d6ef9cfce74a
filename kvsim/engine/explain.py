"""`--explain`: how deep a ranking would have to be read, for the pages of most mass, the best tokens, or a proved part of the mass; and what
the ranking that was used cost."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, Held, HeldTruth
from kvsim.engine.reads import Picked
from kvsim.engine.select import page_order
from kvsim.engine.slack import half_diagonals, slack
from kvsim.engine.stop import certificate, depths, ordered
from kvsim.kernels.dense import LOG2E
from kvsim.kernels.order import ABSENT, RANKED, ranked
from kvsim.policies.protocol import Index, Read
from kvsim.policies.rules import exact

TOP_R = (1, 10, 64)  # tokens of the exact certificate
EPS = (0.01, 0.05, 0.1, 0.2)  # unread parts of the mass certificate


def depths_of(index: Index, picked: Picked, truth: HeldTruth) -> dict[str, Any]:
    """Columns [N * G] of the explain table. k_needed: the fewest pages of the order that hold the pages of most mass, as many as were
    read (card D6); score_gap: the fall of the score at the budget, in scaled logits; the depths of certificates, in pages (A2, A3)."""
    shape, rows = picked.score.shape, picked.rows
    exists = rows > 0
    told = ordered(truth.block.source, picked.pages, picked.score, rows, picked.forced & exists)
    at, plain = told.order.astype(np.int64), told.plain
    many = picked.chosen.sum(-1)
    mass = np.where(exists[:, None], truth.mass(picked.pages), -1.0)
    best = ranked(mass.reshape(-1, shape[-1]), np.repeat(np.where(exists, RANKED, ABSENT), shape[1], 0))
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


def regret(read: Read, block: Dense, held: Held, picked: Picked, truth: HeldTruth) -> dict[str, Any]:
    """Columns [N * G] of explain: what the ranking gave away, in scaled logits before any soft cap (cards D5, D6).

    The oracle reads the same forced pages and fills up to as many by their best true logit. regret: the sum of the best logits of its
    pages minus that of the pages read; missed_pages: those of its pages that were not read; displaced_slack: the lowest score read, forced
    pages apart, minus the best logit of a missed page, the mean over these: so much slack of others it takes to displace one; null
    where heads share a set. slack_norm: the mean of slack / (|q| · half the diagonal of the page's box), pages of one key apart."""
    exists = picked.rows > 0
    forced, many = picked.forced & exists, picked.chosen.sum(-1)
    true = np.where(exists[:, None], block.source.layer.scale * truth.stats(picked.pages)[0], -np.inf)
    order = page_order(true, exists, forced).astype(np.int64)
    best = np.zeros(true.shape, bool)
    np.put_along_axis(best, order, np.arange(true.shape[-1]) < many[..., None], -1)
    missed, instead = best & ~picked.chosen, picked.chosen & ~best
    lost = np.where(missed, true, 0).sum(-1)
    out = {"regret": lost - np.where(instead, true, 0).sum(-1), "missed_pages": missed.sum(-1)}
    if read.heads == "each":
        lowest = np.where(picked.chosen & ~forced[:, None], block.source.layer.scale * picked.score, np.inf).min(-1)
        misses = missed.sum(-1)
        mean = np.divide(lost, misses, out=np.zeros(lost.shape), where=misses > 0)
        out["displaced_slack"] = np.where(misses > 0, lowest - mean, np.nan)
    out["slack_norm"] = _normalised(block, held, picked, truth)
    return {name: x.ravel() for name, x in out.items()}


def _normalised(block: Dense, held: Held, picked: Picked, truth: HeldTruth) -> NDArray[np.float64]:
    gap = slack(block, picked, truth) / block.source.layer.scale
    size = np.linalg.norm(block.q[: block.rows].astype(np.float64), axis=1).reshape(gap.shape[:2])
    unit = size[..., None] * half_diagonals(block, held, picked.pages)[:, None]
    counts = ~np.isnan(gap) & (unit > 0)
    total = np.divide(gap, unit, out=np.zeros(gap.shape), where=counts).sum(-1)
    many = counts.sum(-1)
    return np.divide(total, many, out=np.full(many.shape, np.nan), where=many > 0)
