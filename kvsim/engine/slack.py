"""The slack table (`--explain`): how far page scores lie above the truth, by the age of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, Held, HeldTruth
from kvsim.engine.pages import Pages, versions
from kvsim.engine.reads import Picked

Floats = NDArray[np.float64]
AT_ONCE = 1024  # pages whose keys are looked at together


def slack(block: Dense, picked: Picked, truth: HeldTruth) -> Floats:
    """f64[N, G, P] in scaled logits before any soft cap: score minus the page's best true logit (card D5); NaN where nothing lives."""
    live = np.broadcast_to((picked.rows > 0)[:, None], picked.score.shape)
    peak = truth.stats(picked.pages)[0]
    gap = block.source.layer.scale * (np.where(live, picked.score, 0) - np.where(live, peak, 0))
    return np.where(live, gap, np.nan)


def half_diagonals(block: Dense, held: Held, pages: Pages) -> Floats:
    """f64[N, P]: half the diagonal of the box around each page's live keys, as captured."""
    seen = versions(pages, held.flags, block.t)
    keys, out = block.source.whole("k", block.head), np.empty(len(seen.page))
    for at in range(0, len(out), AT_ONCE):
        some = slice(at, at + AT_ONCE)
        rows, valid = keys[held.pos[seen.slot[some]]].astype(np.float64), seen.valid[some, :, None]
        side = np.where(valid, rows, -np.inf).max(1) - np.where(valid, rows, np.inf).min(1)
        out[some] = np.where(seen.valid[some].any(1), np.linalg.norm(side, axis=1) / 2, 0)
    return seen.by_step(out)


def age_bucket(age: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2 to 3, 4 to 7, … -> 0, 1, 2, 3, …"""
    return np.frexp(age.astype(np.float64))[1].astype(np.int64)


class SlackByAge:
    """Collects the steps of one kv head; `rows` gives the table. Steps must come in order."""

    def __init__(self, page: int, key_dim: int, tokens: int):
        self.page, self.key_dim = page, key_dim
        self.buckets = np.arange(int(tokens).bit_length() + 1)
        self.parts: list[dict[str, NDArray[Any]]] = []

    def add(self, block: Dense, picked: Picked, truth: HeldTruth, wanted: NDArray[np.bool_]) -> None:
        """wanted bool[N]: the steps that are written."""
        gap, last = slack(block, picked, truth)[wanted], (picked.pages.id + 1) * self.page - 1
        bucket = age_bucket(np.maximum(block.t[wanted, None] - last, 0))
        live = ~np.isnan(gap)
        here = [live & (bucket == b)[:, None] for b in self.buckets]
        self.parts.append(
            {
                "role": block.source.request.roles[block.t[wanted]],
                "pages": np.stack([x.sum(-1) for x in here], -1),
                "sum": np.stack([np.where(x, gap, 0).sum(-1) for x in here], -1),
                "most": np.stack([np.where(x, gap, -np.inf).max(-1) for x in here], -1),
            }
        )

    def rows(self, q_head: int) -> list[dict[str, Any]]:
        """Columns per role (-1: all steps) of the query heads of this kv head; the first of them is q_head."""
        whole = {name: np.concatenate([p[name] for p in self.parts]) for name in self.parts[0]}
        roles = whole["role"]
        return [self._summed(whole, roles == r if r >= 0 else roles >= 0, r, q_head) for r in (-1, *sorted(set(roles.tolist())))]

    def _summed(self, whole: dict[str, NDArray[Any]], steps: NDArray[np.bool_], role: int, q_head: int) -> dict[str, Any]:
        pages, total, most = whole["pages"][steps].sum(0), whole["sum"][steps].sum(0), whole["most"][steps].max(0)
        g, b = np.nonzero(pages)
        return {
            "q_head": q_head + g,
            "role": role,
            "page_size": self.page,
            "key_dim": self.key_dim,
            "key_age": np.where(b > 0, 1 << np.maximum(b - 1, 0), 0),
            "pages": pages[g, b],
            "slack_mean": total[g, b] / pages[g, b],
            "slack_max": most[g, b],
        }
