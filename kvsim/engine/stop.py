"""How deep a stopping rule reads, for every step and query head at once: all depths are read off one order of the pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvsim.engine import select
from kvsim.engine.pages import Pages
from kvsim.engine.source import Source
from kvsim.kernels.dense import LOG2E
from kvsim.policies.rules import Rule, exact, gap, mass, top_p

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DOUBT = 1e-12  # of |q| |k|: a bound and a logit rounded in float64 may change places when closer, so then the page is read

FAR = 900.0  # powers of 2 above which a bound leaves nothing to the other pages in float64, and whose sums still are numbers


class Truth(Protocol):
    """True logits of what was live, in powers of 2, float64; N steps, G query heads."""

    def peak(self, pages: Pages) -> Floats: ...  # [N, G, P]: the largest of each page
    def mass(self, pages: Pages) -> Floats: ...  # [N, G, P]: softmax mass of each page, times 2**top
    def top(self, pages: Pages) -> Floats: ...  # [N, G]: the largest of all
    def kth(self, r: int) -> Floats: ...  # [N, G]: the r-th largest token before any soft cap, -inf where fewer are live
    def size(self) -> Floats: ...  # [N, G]: a bound on |q| |k|, as a logit


@dataclass(frozen=True)
class Ordered:
    """Pages in the order they would be opened, [N, G, P]: plain and bound are their scores in powers of 2 without and with the soft
    cap, rows their live tokens; many [N, 1] existing pages; forced [N, 1] of them opened first. The rest of a row is padding."""

    pages: Pages
    order: NDArray[np.int32]
    plain: Floats
    bound: Floats
    rows: Ints
    many: Ints
    forced: Ints

    @property
    def beyond(self) -> NDArray[np.bool_]:
        return np.arange(self.order.shape[-1]) >= self.many[..., None]


def ordered(source: Source, pages: Pages, score: Floats, rows: Ints, forced: NDArray[np.bool_]) -> Ordered:
    """score f64[N, G, P], unscaled; rows i64[N, P]: live tokens; forced bool[N, P]: of the pages that have some."""
    exists = rows > 0
    order = select.page_order(score, exists, forced)
    at, there = order.astype(np.int64), np.broadcast_to(exists[:, None], score.shape)
    known = np.where(there, score, 0)
    plain, bound = (np.take_along_axis(np.where(there, x, -np.inf), at, -1) for x in (known * source.unit, source.bend(known)))
    of = np.take_along_axis(np.broadcast_to(rows[:, None], score.shape), at, -1)
    return Ordered(pages, order, plain, bound, of, exists.sum(1)[:, None], forced.sum(1)[:, None])


@dataclass(frozen=True)
class Depths:
    """Pages opened, rounds after the forced pages, and whether the rule's proof was reached (None: it has none); all [N, G]."""

    pages: Ints
    rounds: Ints
    certified: NDArray[np.bool_] | None


def depths(rule: Rule, pages: Ordered, cap: Ints, floor: Ints, truth: Truth) -> Depths:
    """cap, floor i64[N, 1] in pages; not for a gap() with a file, which `foretold` applies."""
    if isinstance(rule, top_p):
        return _plain(np.maximum(np.minimum(_top_p(rule, pages), cap), pages.forced), pages)
    if isinstance(rule, gap):
        return _plain(np.maximum(_gap(rule, pages, cap, floor), pages.forced), pages)
    assert isinstance(rule, (exact, mass))
    needed = _exact(rule, pages, truth) if isinstance(rule, exact) else _mass(rule, pages, truth)
    rounds = -(-np.maximum(needed - pages.forced, 0) // rule.batch)
    allowed = -(-np.maximum(np.minimum(cap, pages.many) - pages.forced, 0) // rule.batch)
    rounds = np.minimum(rounds, allowed)
    opened = np.minimum(pages.forced + rounds * rule.batch, np.maximum(np.minimum(cap, pages.many), pages.forced))
    return Depths(opened, rounds, opened >= np.minimum(needed, pages.many))


def _plain(opened: Ints, pages: Ordered) -> Depths:
    opened = np.minimum(opened, pages.many)
    return Depths(opened, np.ones_like(opened), None)


def _exact(rule: exact, pages: Ordered, truth: Truth) -> Ints:
    """Every page whose bound reaches the r-th largest logit of all live tokens must be opened, and no other: once those are open the
    r-th largest read is the r-th largest there is, and before that the next bound is not below it. A soft cap keeps the order, and makes
    ties of what lies far above it; so both sides are compared without."""
    level = truth.kth(rule.r)[..., None] - DOUBT * truth.size()[..., None]
    reach = (pages.plain >= level) & ~pages.beyond
    return np.where(reach, np.arange(1, reach.shape[-1] + 1), 0).max(-1)


def certificate(pages: Ordered, truth: Truth) -> Floats:
    """eps f64[N, G, P + 1]: the proved bound on the unread part of the held softmax mass when the first k pages are read."""
    most = mass_bound(np.where(pages.beyond, -np.inf, pages.bound), pages.rows, truth.top(pages.pages)[..., None])
    true = np.take_along_axis(truth.mass(pages.pages), pages.order.astype(np.int64), -1)
    zero = np.zeros((*most.shape[:2], 1))
    unread = np.concatenate([np.cumsum(most[..., ::-1], -1)[..., ::-1], zero], -1)
    return unread_part(unread, np.concatenate([zero, np.cumsum(np.where(pages.beyond, 0, true), -1)], -1))


def mass_bound(bound: Floats, rows: Ints, top: Floats) -> Floats:
    """The most softmax mass a page can have, in parts of 2**top, the largest true logit. Taken against the largest bound instead, all the
    other pages would vanish beside one that is very loose."""
    most: Floats = np.exp2(np.where(rows > 0, np.minimum(bound - top, FAR), -np.inf))
    return most * rows


def unread_part(unread: Floats, read: Floats) -> Floats:
    """unread / (read + unread), 0 when nothing is unread."""
    return np.divide(unread, read + unread, out=np.zeros_like(read), where=unread > 0)


def _mass(rule: mass, pages: Ordered, truth: Truth) -> Ints:
    """The first prefix that proves it; the whole always does."""
    return (certificate(pages, truth) <= rule.eps).argmax(-1)


def _top_p(rule: top_p, pages: Ordered) -> Ints:
    bound = np.where(pages.beyond, -np.inf, pages.bound)
    w = np.where(pages.beyond, 0, pages.rows * np.exp2(bound - bound.max(-1, keepdims=True)))
    reached = np.cumsum(w, -1) / w.sum(-1, keepdims=True) >= rule.p - 1e-12
    return np.where(reached.any(-1), reached.argmax(-1) + 1, pages.many)


def _gap(rule: gap, pages: Ordered, cap: Ints, floor: Ints) -> Ints:
    """K = forced + j, j >= 1: the fall is between the j-th and the next page that is not forced; the last page falls without end."""
    k = np.arange(1, pages.order.shape[-1] + 1)
    plain, fall = np.where(pages.beyond, 0, pages.plain), np.full(pages.plain.shape, np.inf)
    fall[..., :-1] = (plain[..., :-1] - plain[..., 1:]) / LOG2E
    fall = np.where(k >= pages.many[..., None], np.inf, fall)
    lowest = np.maximum(floor, pages.forced + 1)[..., None]
    good = (fall >= (rule.min or 0.0)) & (k >= lowest) & (k <= cap[..., None])
    return np.where(good.any(-1), good.argmax(-1) + 1, np.broadcast_to(cap, good.shape[:2]))


# ------------------------------------------------------------------------------------------------ a calibrated gap
STEEP = 50.0  # scaled logits: a fall beyond this says no more


def features(pages: Ordered, levels: Ints, age: Ints) -> tuple[Floats, Ints]:
    """f64[N, G, L, F] in the order of FEATURES, and the pages i64[N, G, L] that each level opens: at least one that is not forced.

    gap: the fall of the score after them, in scaled logits (0 where nothing is left); top1 and entropy: ln of the largest share and the
    entropy of the estimated mass, the softmax over pages of score + ln(rows); age: ln(1 + steps since the prompt), age i64[N]."""
    n, group, most = pages.order.shape
    k = np.broadcast_to(np.minimum(np.maximum(levels, pages.forced + 1), pages.many)[:, None], (n, group, len(levels)))
    here, after = (np.take_along_axis(pages.plain, np.minimum(k + i, most - 1), -1) for i in (-1, 0))
    left = k < pages.many[..., None]
    fall = np.where(left, np.where(left, here - np.where(left, after, 0), 0) / LOG2E, 0).clip(0, STEEP)
    bound = np.where(pages.beyond, -np.inf, pages.bound)
    w = np.where(pages.beyond, 0, pages.rows * np.exp2(bound - bound.max(-1, keepdims=True)))
    w /= w.sum(-1, keepdims=True)
    top1, entropy = np.log(w.max(-1)), -(w * np.log(np.where(w > 0, w, 1))).sum(-1)
    rest = np.stack([top1, entropy, np.broadcast_to(np.log1p(age)[:, None], (n, group))], -1)
    return np.concatenate([fall[..., None], np.broadcast_to(rest[:, :, None], (n, group, len(levels), 3))], -1), k


def foretold(pages: Ordered, levels: Ints, age: Ints, weights: Floats, risk: float) -> Depths:
    """The first level whose risk, a logistic of its features, is at most `risk`, else the last; weights f64[L, F + 1]."""
    x, k = features(pages, levels, age)
    z = (x * weights[:, :-1]).sum(-1) + weights[:, -1]
    sure = (z <= np.log(risk / (1 - risk))) | (k >= pages.many[..., None])
    at = np.where(sure.any(-1), sure.argmax(-1), len(levels) - 1)
    return _plain(np.take_along_axis(k, at[..., None], -1)[..., 0], pages)
