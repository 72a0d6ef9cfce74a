"""The three levels of loss (card D11) as counterfactual reads: an oracle over all that is visible, one over what is held, the policy.

All read as many pages, or as many tokens where the policy reads all that it holds. heads has the recalls of the oracles; here are their output
errors, and the recalls of a policy without pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.account import relative
from kvsim.engine.attend import Attended, Dense, Held, attend
from kvsim.engine.bank import Record
from kvsim.engine.counterfactual import held_page_mass
from kvsim.engine.pages import pages_of
from kvsim.engine.reads import Picked
from kvsim.kernels.product import times
from kvsim.kernels.sparse import MASS, TOKENS

Floats = NDArray[np.float64]


def levels(block: Dense, held: Held, picked: Picked | None, got: Attended, record: Record | None) -> dict[str, Any]:
    """Columns [N * G] of heads. oracle_rel_l2: of an oracle over all visible tokens, rows exact; oracle_held_rel_l2: over those held, rows
    exact; oracle_coded_rel_l2: the same set, rows as stored (null where none can be coded)."""
    if picked is None:
        return _of_tokens(block, got)
    size, many = picked.pages.size, picked.chosen.sum(-1)
    every = _everything(block)
    pages = pages_of(every.pos, size)
    best = leading_pages(block.page_mass(size)[:, : len(pages.id)], many)
    first = attend(block, every, replace(picked, pages=pages, chosen=best), None)
    mass = block.page_mass(size)[:, : len(picked.pages.id)] if held.whole else held_page_mass(block, held, picked.pages)
    best_held = leading_pages(mass, many) & (picked.pages.rows(held.flags) > 0)[:, None]
    second = attend(block, held, replace(picked, chosen=best_held), record)
    return {
        "oracle_rel_l2": relative(first.out, block.out),
        "oracle_held_rel_l2": relative(second.out if second.exact is None else second.exact, block.out),
        "oracle_coded_rel_l2": None if second.exact is None else relative(second.out, block.out),
    }


def _of_tokens(block: Dense, got: Attended) -> dict[str, Any]:
    """A policy that reads all it holds: the oracle picks as many of all visible tokens; over those held it can do no better."""
    many = got.sums[:, TOKENS].astype(np.int64)
    if (many == np.repeat(block.t + 1 - block.first, block.group)).all():
        p, out = (1 - block.sink_mass)[None], block.out
    else:
        p, out = _best_tokens(block, many)
    return {
        "oracle_recall": np.maximum(p.sum(0), got.sums[:, MASS]),
        "oracle_held_recall": got.sums[:, MASS],
        "oracle_rel_l2": relative(out, block.out),
        "oracle_held_rel_l2": relative(got.out if got.exact is None else got.exact, block.out),
        "oracle_coded_rel_l2": None if got.exact is None else relative(got.out, block.out),
    }


def _best_tokens(block: Dense, many: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """(f64[T, R], f64[R, dv]): the dense probabilities of the many[r] most attended tokens, 0 elsewhere, and the output over these."""
    total = block.source.request.total
    logit = block.source.bend(block.dots[:total].astype(np.float64))[:, : block.rows]
    visible = np.repeat(block.flags[:, :total] > 0, block.group, 0).T
    p = np.where(visible, np.exp2(np.minimum(logit - block.lse[: block.rows], 0)), 0.0)
    place = np.empty(p.shape, np.int64)
    np.put_along_axis(place, np.argsort(-p, axis=0, kind="stable"), np.arange(total)[:, None], 0)
    p *= place < many
    z = p.sum(0) + block.sink_mass
    out = times(p.T, block.source.whole("v", block.head)[:total].astype(np.float64)) / np.where(z > 0, z, 1.0)[:, None]
    return p, out


def _everything(block: Dense) -> Held:
    total = block.source.request.total
    flags = block.flags[:, :total]
    return Held(np.arange(total), flags, flags, lambda: block.dots[:total], True)


def leading_pages(mass: Floats, many: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool[N, G, P]: the many[N, G] pages of most mass f64[R, P]; ties to the lower page."""
    order = np.argsort(-mass, axis=1, kind="stable")
    place = np.empty(order.shape, np.int64)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(mass.shape[1]), order.shape), 1)
    return (place < many.reshape(-1, 1)).reshape(*many.shape, -1)
