"""One hold budget for all layers (ALL_LAYERS): their prompts are ranked together, before any layer is replayed, and every kv head is
handed as many rows as it won (card B8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.bank import Bank
from kvsim.engine.evolve import begin
from kvsim.engine.source import Source
from kvsim.errors import WrongUse
from kvsim.geometry import ALL_LAYERS

Limits = NDArray[np.int64]


@dataclass(frozen=True)
class Preview:
    """What a layer brings to the common ranking: its budget in rows, the rows each kv head is sure of, i64[Hkv], and the scores of the
    others, one array a kv head."""

    budget: int
    safe: Limits
    scores: list[NDArray[np.float64]]


def preview(source: Source, keep: Any) -> Preview:
    """The first cut of a keep in one layer, ranked and not carried out."""
    seen, _, ranking = begin(source, keep, Bank(source, keep.codecs))
    shape = seen.pos.shape
    if ranking is None or ranking.score.shape != shape or ranking.unit is not None or ranking.own < 1:
        raise WrongUse(f"{type(keep).__name__} needs {ALL_LAYERS}: expected a ranking by one score per row and kv head")
    protect = np.zeros(shape, bool) if ranking.protect is None else ranking.protect
    return Preview(int(seen.limit.sum()), protect.sum(1), [s[~p] for s, p in zip(ranking.score, protect, strict=True)])


def share(layers: Sequence[Preview]) -> list[Limits]:
    """Rows for every kv head of every layer, i64[Hkv] each: what is protected, then the best rows of all layers until the sum of the
    layers' budgets is spent; ties to the lower layer, kv head and position."""
    scores = [s for x in layers for s in x.scores]
    owner = np.repeat(np.arange(len(scores)), [len(s) for s in scores])
    left = max(0, sum(x.budget - int(x.safe.sum()) for x in layers))
    best = np.argsort(-np.concatenate(scores), kind="stable")[:left]
    won = np.bincount(owner[best], minlength=len(scores))
    edges = np.cumsum([len(x.safe) for x in layers])[:-1]
    return [x.safe + n for x, n in zip(layers, np.split(won, edges), strict=True)]


def limits_of(source: Source, keep: Any, handed: Sequence[int] | None) -> Limits | None:
    """The limits of one layer: those handed to it, its own when it is the only one; None for a keep that does not share.

    Raises WrongUse when the other layers were not previewed."""
    if ALL_LAYERS not in keep.needs:
        return None
    if handed is not None:
        return np.array(handed, np.int64)
    if len(source.layer.among) > 1:
        raise WrongUse(
            f"{type(keep).__name__} shares one budget over all layers, and layer {source.layer.id} was given alone: use replay"
        )
    return share([preview(source, keep)])[0]
