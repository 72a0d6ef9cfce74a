"""`--explain`: how the scores of an index stand against the truth: those below the best logit of their page, and the sets that half precision
changes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, HeldTruth
from kvsim.engine.reads import Picked, Reader
from kvsim.engine.stop import DOUBT
from kvsim.kernels.dense import LOG2E, NONE
from kvsim.policies.rules import Rule

Columns = dict[str, Any]


def against_truth(block: Dense, picked: Picked, truth: HeldTruth, reader: Reader) -> Columns:
    """Columns [N * G] of explain. truth: of the keys that attention reads.

    pages: scores compared; below: how many lie under the largest logit of their page; below_max: by how much at most, in scaled logits
    before any soft cap; fp16_changed: whether scores rounded to float16 choose other pages; null under a stopping rule, which
    needs bounds, and where nothing was ranked."""
    dots = truth.stats(picked.pages)[0]
    there = dots > NONE
    short = np.where(there, block.source.layer.scale * (dots - np.where(there, picked.score, 0)), 0)
    below = short > DOUBT * truth.size()[..., None] / LOG2E
    return {
        "pages": there.sum(-1).ravel(),
        "below": below.sum(-1).ravel(),
        "below_max": np.where(below, short, 0).max(-1).ravel(),
        "fp16_changed": _changed(block, picked, reader),
    }


def _changed(block: Dense, picked: Picked, reader: Reader) -> NDArray[np.float64] | None:
    budget = reader.read.read
    if isinstance(budget, Rule):
        return None
    exists = picked.rows > 0
    k = reader.to_pages(budget, block.t + 1 - block.first)
    other, _ = reader.choose(halves(picked.score), exists, picked.forced & exists, k)
    changed = (other != picked.chosen).any(-1)
    return np.where((picked.scanned > 0)[:, None], changed, np.nan).ravel()


def halves(score: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores as a kernel keeps them that sums in float32 and writes float16."""
    with np.errstate(over="ignore"):
        return score.astype(np.float32).astype(np.float16).astype(np.float64)
