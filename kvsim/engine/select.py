"""Every budget is applied here: which slots survive a cut, which pages a query head opens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import WrongUse
from kvsim.kernels.evict import survivors
from kvsim.kernels.order import ABSENT, first_pages, ranked
from kvsim.policies.allocate import largest_remainder
from kvsim.policies.protocol import FULL, GONE, Forced, Ranking, Stage
from kvsim.units import shards, whole

Mask = NDArray[np.bool_]


# ------------------------------------------------------------------------------------------------ keep
def cut(
    ranking: Ranking,
    pos: NDArray[np.int64],
    valid: Mask,
    limit: NDArray[np.int64],
    cost: dict[int, float],
    beyond: dict[int, float] | None = None,
) -> NDArray[np.uint8]:
    """u8[Hkv, n]: the tier of every slot after a cut. limit i64[Hkv] in full rows; cost[tier]: bytes of a row of one kv head;
    beyond[tier]: bytes of a tier that has a budget of its own.

    Raises WrongUse for a ranking that is none, and when one decision for the layer meets kv heads that hold different tokens."""
    _check(ranking, valid, cost)
    heads, one = len(valid), len(ranking.score) == 1
    if one and heads > 1 and not (pos == pos[:1]).all():
        raise WrongUse("a ranking for the whole layer needs kv heads that hold the same tokens; give one ranking per kv head")
    score = np.ascontiguousarray(ranking.score, np.float64)
    protect = np.zeros(score.shape, bool) if ranking.protect is None else ranking.protect & valid[: len(score)]
    if not 0 <= ranking.own <= 1:
        raise WrongUse(f"a ranking says own={ranking.own}: expected a part of an equal share, 0 to 1")
    if ranking.own < 1:
        limit = _shared(score, protect, valid, limit, ranking.own)
    if ranking.unit is None and _plain(ranking.stages):
        keep = np.empty(score.shape, bool)
        survivors(score, protect, valid[: len(score)], limit, keep)
        out = keep.view(np.uint8) * np.uint8(FULL)
    else:
        out = np.stack(
            [_staged(ranking, h, score[h], protect[h], valid[h], limit[h], cost, beyond or {}) for h in range(len(score))]
        )
    return np.repeat(out, heads, 0) if one else out


def _plain(stages: tuple[Stage, ...]) -> bool:
    """One helping of everything by the ranking's own score."""
    one = stages[0] if len(stages) == 1 else Stage(0)
    return (one.take, one.tier) == (1, FULL) and one.score is None and one.among is None


def _check(ranking: Ranking, valid: Mask, cost: dict[int, float]) -> None:
    (heads, n), shape = valid.shape, np.shape(ranking.score)
    if shape not in ((heads, n), (1, n)):
        raise WrongUse(f"a ranking's score has shape {shape}, expected [Hkv, n] = {(heads, n)}, or [1, n] for the whole layer")
    for x in (ranking.protect, ranking.unit, *(x for stage in ranking.stages for x in (stage.score, stage.among))):
        if x is not None and np.shape(x) != shape:
            raise WrongUse(f"the arrays of a ranking differ in shape: {np.shape(x)} beside a score of {shape}")
    if (np.isnan(ranking.score) & valid[: shape[0]]).any():
        raise WrongUse("a ranking holds NaN: every live slot needs a score")
    if any(stage.tier not in cost for stage in ranking.stages):
        raise WrongUse("a stage of a ranking codes rows, but the policy declares no codecs")


def _staged(
    ranking: Ranking, h: int, score: Any, protect: Mask, valid: Mask, limit: int, cost: dict[int, float], beyond: dict[int, float]
) -> NDArray[np.uint8]:
    """One kv head's cut by units and stages: each stage takes the best units still open with its share of the bytes left."""
    out = np.full(len(valid), GONE, np.uint8)
    out[valid & protect] = FULL
    slots = np.flatnonzero(valid & ~protect)
    unit = slots if ranking.unit is None else ranking.unit[h, slots]
    ids, unit = np.unique(unit, return_inverse=True)
    rows = np.bincount(unit, minlength=len(ids))
    left = (limit - (valid & protect).sum()) * cost[FULL]
    share, taken, open_ = dict.fromkeys(cost, 0.0), dict.fromkeys(cost, 0), np.ones(len(ids), bool)
    for stage in ranking.stages:
        by = np.bincount(unit, (score if stage.score is None else stage.score[h])[slots], len(ids))
        share[stage.tier] += stage.take
        room = share[stage.tier] * beyond.get(stage.tier, left)
        k = max(0, whole(room / (cost[stage.tier] * rows.max(initial=1))) - taken[stage.tier])
        may = open_ if stage.among is None else open_ & (np.bincount(unit, stage.among[h, slots], len(ids)) == rows)
        best = np.lexsort((ids, -by, ~may))[: min(k, may.sum())]
        out[slots[np.isin(unit, best)]] = stage.tier
        open_[best] = False
        taken[stage.tier] += k
    return out


def _shared(score: Any, protect: Mask, valid: Mask, limit: NDArray[np.int64], own: float) -> NDArray[np.int64]:
    """Limits when the kv heads share: by where the best rows of the layer lie, blended with a part `own` of an equal share.

    What a head protects beyond its limit the others pay for; no head is given more rows than it has."""
    safe, free = (valid & protect).sum(1), (valid & ~protect).sum(1)
    total = min(max(0, int(limit.sum() - safe.sum())), int(free.sum()))
    head, slot = np.nonzero(valid & ~protect)
    best = np.lexsort((slot, head, -score[head, slot]))[:total]
    won = np.bincount(head[best], minlength=len(valid))
    equal = np.maximum(limit - safe, 0.0)
    equal *= total / max(equal.sum(), 1)
    return safe + largest_remainder((1 - own) * won + own * equal, total, free)


# ------------------------------------------------------------------------------------------------ read
def forced_pages(forced: Forced, ids: NDArray[np.int64], size: int, t: NDArray[np.int64]) -> Mask:
    """bool[N, P]: pages read whatever their score. ids i64[P] on the absolute grid, t i64[N]."""
    first, last = ids * size, (ids + 1) * size - 1
    now = t[:, None]
    out = np.repeat((first < forced.sinks)[None], len(t), 0)
    if forced.tail:
        out |= ids == now // size
    if forced.recent > 0:
        out |= (last >= now + 1 - forced.recent) & (first <= now)
    return out


def joint(heads: str, score: NDArray[np.float64], exists: Mask, unit: float) -> NDArray[np.float64]:
    """score [N, G, P] -> [N, 1, P] when the group's heads decide together, else unchanged."""
    if heads == "max":
        return score.max(1, keepdims=True)
    if heads == "mean":
        return score.mean(1, keepdims=True)
    if heads == "softmax_mean":
        x = np.where(exists[:, None], np.minimum(score * unit, 1e300), -np.inf)  # unbounded scores share the first place
        e = np.exp2(x - x.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)).mean(1, keepdims=True)
    return score


def page_order(score: NDArray[np.float64], exists: Mask, forced: Mask) -> NDArray[np.int32]:
    """order i32[N, H, P]: forced pages, then by score, then what does not exist. score [N, H, P], exists, forced bool[N, P]."""
    kind = ABSENT - exists - (exists & forced)  # RANKED is one before it, FORCED two: a sixth of the time of choosing among names
    n, h, p = score.shape
    return ranked(score.reshape(n * h, p), np.repeat(kind, h, 0)).reshape(n, h, p)


def pick(
    order: NDArray[np.int32], exists: Mask, forced: Mask, k: NDArray[np.int64], heads: str, group: int, over: shards | None = None
) -> Mask:
    """chosen bool[N, G, P]: the first k[n] pages of each order, never fewer than the forced ones; all pages where k reaches them.

    With shards that do not rank together, the first of every shard: its part of k, or all of it."""
    chosen: Mask = np.empty(order.shape, bool)
    if over is None or over.budget == "global":
        first_pages(order, np.maximum(k, (forced & exists).sum(1)), chosen)
    else:
        at, place, shard = order.astype(np.int64), np.zeros(order.shape, bool), dealt(exists, over.n)
        for s in range(over.n):
            many = np.maximum(k if over.budget == "each" else k // over.n + (s < k % over.n), (forced & (shard == s)).sum(1))
            mine = np.take_along_axis(np.broadcast_to((shard == s)[:, None], order.shape), at, -1)
            place |= mine & (mine.cumsum(-1) <= many[:, None, None])
        np.put_along_axis(chosen, at, place, -1)
    everything = k >= exists.sum(1)
    chosen[everything] = exists[everything, None]
    if heads == "share":
        chosen = np.asarray(chosen.any(1, keepdims=True))
    return np.repeat(chosen, group, 1) if chosen.shape[1] == 1 and group > 1 else chosen


def dealt(exists: Mask, n: int) -> NDArray[np.int64]:
    """i64[N, P]: the shard of every page that exists (-1: none), contiguous runs of sizes that differ by at most one, larger first."""
    many = exists.sum(1, keepdims=True)
    small, larger = many // n, many % n
    nth = exists.cumsum(1) - 1
    late = nth - larger * (small + 1)
    shard = np.where(late < 0, nth // (small + 1), larger + late // np.maximum(small, 1))
    return np.where(exists, shard, -1)


def split_order(score: NDArray[np.float64], exists: Mask, forced: Mask, private: int) -> NDArray[np.int32]:
    """order i32[N, 1, P]: forced pages, then `private` pages of every head (best ranks first, then head by head), then by the best of
    the heads (card A9). score f64[N, G, P], exists, forced bool[N, P]."""
    group, forced = score.shape[1], forced & exists
    place = np.empty(score.shape, np.int64)
    np.put_along_axis(place, page_order(score, exists, forced).astype(np.int64), np.arange(score.shape[2])[None, None], 2)
    rank = place - forced.sum(1)[:, None, None]
    last = private * group
    turn = np.where(rank < private, rank * group + np.arange(group)[:, None], last).min(1)
    turn = np.where(forced, -1, np.where(exists, turn, last + 1))
    return np.lexsort((-score.max(1), turn))[:, None].astype(np.int32)
