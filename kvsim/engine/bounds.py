"""How the scores of an index stand against the truth: those below the best logit of their page, and the sets that half precision changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, HeldTruth, Past, blocks, steps_per_block
from kvsim.engine.evolve import evolve
from kvsim.engine.reads import Reader
from kvsim.engine.source import Source
from kvsim.engine.stop import DOUBT
from kvsim.errors import WrongUse
from kvsim.geometry import ATTENTION
from kvsim.kernels.dense import LOG2E, NONE
from kvsim.policies import allocate
from kvsim.policies.protocol import Chain
from kvsim.policies.rules import Rule

Columns = dict[str, NDArray[Any]]


def against_truth(source: Source, chain: Chain, steps: Sequence[int] | None = None) -> Columns:
    """One entry per query head, over its decode steps (None: all captured).

    pages: scores compared; below: how many lie under the largest logit of their page, of the keys that attention reads; below_mean,
    below_max: by how much, in scaled logits before any soft cap; sets: sets of pages chosen by score; sets_changed: those that scores
    rounded to float16 would have made another; pages_changed: the part of all their pages. Raises WrongUse for a chain whose
    read part has no index or no budget, or whose keep watches attention."""
    chain = allocate.for_layer(chain, source.layer)
    read = chain.part("read")
    if read.index is None or isinstance(read.read, Rule) or ATTENTION in chain.part("keep").needs:
        raise WrongUse("scores are held against the truth for an index with a budget, after a keep that does not watch attention")
    chain = chain.with_part(replace(read, refresh=1))
    record, block = evolve(source, chain), steps_per_block(source.layer.group)
    decoded = record.decoded.get("k") if record else None
    places = np.arange(len(source.steps)) if steps is None else np.flatnonzero(np.isin(source.steps, list(steps)))
    heads = []
    for head in range(source.layer.kv_heads):
        past, reader, parts = Past(source, record, head), Reader(chain.part("read"), source, head, block, record), []
        for index in blocks(places, source.layer.group):
            dense = Dense(source, head, index)
            held = past.held(dense)
            truth = HeldTruth(dense, held, None if decoded is None else decoded[head])
            q = source.queries(head, dense.index).astype(np.float64)
            picked = reader.pick(source.steps[dense.index], dense.t, held.pos, held.flags, q, truth)
            exists = np.asarray(picked.pages.rows(held.flags) > 0)
            k, ranked = reader.to_pages(read.read, dense.t + 1 - dense.first), picked.scanned > 0
            coarse, _ = reader.choose(halves(picked.score), exists, picked.forced & exists, k)
            parts.append(
                _short(picked.score, truth.stats(picked.pages)[0], truth.size() / LOG2E, source.layer.scale)
                | _changed(picked.chosen[ranked], coarse[ranked])
            )
        heads.append({name: np.stack([p[name] for p in parts]) for name in parts[0]})
    return _summed({name: np.concatenate([h[name] for h in heads], axis=1) for name in heads[0]})


def halves(score: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores as a kernel keeps them that sums in float32 and writes float16."""
    with np.errstate(over="ignore"):
        return score.astype(np.float32).astype(np.float16).astype(np.float64)


def _short(score: NDArray[np.float64], dots: NDArray[np.float64], size: NDArray[np.float64], scale: float) -> Columns:
    """[G]: counts and sums over a block of how far scores [N, G, P] fall short of the true dot products; size [N, G] in scaled logits."""
    there = dots > NONE
    short = np.where(there, scale * (dots - np.where(there, score, 0)), 0)
    below = short > DOUBT * size[..., None]
    by = np.where(below, short, 0)
    return {"pages": there.sum((0, 2)), "below": below.sum((0, 2)), "_by": by.sum((0, 2)), "below_max": by.max((0, 2))}


def _changed(fine: NDArray[np.bool_], coarse: NDArray[np.bool_]) -> Columns:
    """[G]: of sets [N, G, P], how many differ and by how many pages."""
    other = fine & ~coarse
    sets = np.full(fine.shape[1], len(fine))
    return {"sets": sets, "sets_changed": other.any(-1).sum(0), "_all": fine.sum((0, 2)), "_other": other.sum((0, 2))}


def _summed(parts: Columns) -> Columns:
    """Blocks [B, Hq] -> [Hq]."""
    top, total = parts.pop("below_max").max(0), {name: x.sum(0) for name, x in parts.items()}
    by, pages, other = total.pop("_by"), total.pop("_all"), total.pop("_other")
    mean = np.divide(by, total["below"], out=np.zeros(len(by)), where=total["below"] > 0)
    part = np.divide(other, pages, out=np.zeros(len(by)), where=pages > 0)
    return {"q_head": np.arange(len(by))} | total | {"below_mean": mean, "below_max": top, "pages_changed": part}
