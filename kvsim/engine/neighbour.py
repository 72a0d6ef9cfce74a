"""What a layer would have read with the pages that a layer below it chose (card D12): the reuse table.

A second pass: it needs the plans of both layers, and the dense mass of the pages of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, blocks
from kvsim.engine.curves import marked_parts
from kvsim.engine.source import Source

DISTANCES = (1, 2, 4, 8)
OWN = 0  # the distance of a layer from itself

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """The plans of one policy in one (request, layer), row m: query head q_head[m] (-1: all of kv_head[m]) at step[m] read the pages
    pages[start[m] : start[m + 1]] of `size` tokens."""

    kv_head: Ints
    q_head: Ints
    step: Ints
    size: int
    pages: Ints
    start: Ints


def reuse(source: Source, plans: Mapping[int, Plan]) -> list[dict[str, Any]]:
    """plans: those of the layer itself (OWN) and of the layers that many below it -> parts of the reuse table.

    A row is written for every (query head, step) that has a plan of its own and one of the layer below, in pages of one size. Meant for
    policies that keep everything: mass is that of all visible tokens of a page."""
    own, total = plans[OWN], source.request.total
    shape = (source.layer.q_heads, len(source.steps), -(-total // own.size))
    sets = {distance: _sets(plan, source, shape) for distance, plan in plans.items() if plan.size == own.size}
    parts = []
    for head in range(source.layer.kv_heads):
        mine = slice(head * source.layer.group, (head + 1) * source.layer.group)
        told = np.flatnonzero(sets[OWN][mine].any(axis=(0, 2)))
        for index in blocks(source, told):
            dense = Dense(source, head, index)
            mass = _by_step(dense.page_mass(own.size), dense, shape[2])
            marked = None
            if source.request.evidence:
                marked = _by_step(marked_parts(dense, source.request.evidence_mask(), own.size, shape[2]), dense, shape[2])
            there = np.asarray(sets[OWN][mine, index].any(2))
            parts += [_rows(source, mass, marked, chosen, mine, index, there, distance) for distance, chosen in sets.items()]
            dense.leave()
    return parts


def _sets(plan: Plan, source: Source, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    """bool[Hq, N, P]: the pages that each query head of the layer read; none where there is no plan."""
    out, group = np.zeros(shape, bool), source.layer.group
    for m, step in enumerate(plan.step.tolist()):
        i, q = int(np.searchsorted(source.steps, step)), int(plan.q_head[m])
        first = plan.kv_head[m] * group if q < 0 else q
        if i < len(source.steps) and source.steps[i] == step:
            out[first : first + (group if q < 0 else 1), i, plan.pages[plan.start[m] : plan.start[m + 1]]] = True
    return out


def _by_step(rows: NDArray[np.float64], dense: Dense, pages: int) -> NDArray[np.float64]:
    """[R, P] -> [G, N, P]."""
    return rows[:, :pages].reshape(len(dense.index), dense.group, pages).swapaxes(0, 1)


def _rows(
    source: Source,
    mass: NDArray[np.float64],
    marked: NDArray[np.float64] | None,
    chosen: NDArray[np.bool_],
    mine: slice,
    index: Ints,
    there: NDArray[np.bool_],
    distance: int,
) -> dict[str, Any]:
    """Columns of the query heads `mine` at the steps `index`; there bool[G, N]: where the layer has a plan of its own."""
    same, every = chosen[mine, index], chosen[:, index].any(0)
    g, i = np.nonzero(there & same.any(2))
    columns = {
        "q_head": mine.start + g,
        "step": source.steps[index[i]],
        "distance": distance,
        "pages": same.sum(2)[g, i],
        "mass_recall": (mass * same).sum(2)[g, i],
        "layer_pages": every.sum(1)[i],
        "layer_mass_recall": (mass * every).sum(2)[g, i],
    }
    if marked is not None:
        columns |= {"evidence_read": (marked * same).sum(2)[g, i], "layer_evidence_read": (marked * every).sum(2)[g, i]}
    return columns
