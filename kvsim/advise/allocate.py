"""One choice per unit, so that all losses together stay within a limit at least cost: a Lagrange price, then single changes.

A price turns a loss into bytes; at every price each unit's best choice is its own affair, and what the price cannot settle (units that
change at the same price, choices off the convex hull) is taken back where it can be, one change at a time. Nothing asks that losses fall as
costs rise: a choice that another beats in both is never taken. Everett, Generalized Lagrange multiplier method, 1963."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HALVINGS = 100  # of the ratio of two prices: enough to tell float64 prices apart
DEAR = 2.0**200  # a price at which only loss counts


@dataclass(frozen=True)
class Allocation:
    """choice i64[U]; cost and loss of all units together; bound: no allocation within the limit costs less."""

    choice: Ints
    cost: float
    loss: float
    bound: float


def allocate(cost: Floats, loss: Floats, limit: float) -> Allocation | None:
    """cost, loss f64[U, C] (an infinite cost is not on offer) -> the allocation; None when no choice keeps within the limit.

    Never dearer than the best choice that is the same for every unit; above `bound` by less than the largest single change."""
    if np.where(np.isfinite(cost), loss, np.inf).min(1).sum() > _room(limit):
        return None
    choice = _at(cost, loss, _prices(cost, loss, limit)[1])
    while (better := _changed(cost, loss, limit, choice)) is not None:
        choice = better
    same = uniform(cost, loss, limit)
    if same is not None and cost[:, same].sum() < _sum(cost, choice):
        choice = np.full(len(cost), same)
    return Allocation(choice, _sum(cost, choice), _sum(loss, choice), bound(cost, loss, limit))


def uniform(cost: Floats, loss: Floats, limit: float) -> int | None:
    """The cheapest choice that, made by every unit, keeps within the limit."""
    total = np.where(loss.sum(0) <= _room(limit), cost.sum(0), np.inf)
    return int(total.argmin()) if np.isfinite(total).any() else None


def bound(cost: Floats, loss: Floats, limit: float) -> float:
    """The dual at the best price: what any allocation within the limit costs at least, those that mix choices included."""
    return max(float((cost + price * loss).min(1).sum() - price * limit) for price in _prices(cost, loss, limit))


def _prices(cost: Floats, loss: Floats, limit: float) -> tuple[float, float]:
    """Two prices as close as float64 has them: below the second the limit is broken, at the second it is kept. Both 0 when it never is."""
    if _sum(loss, _at(cost, loss, 0.0)) <= _room(limit):
        return 0.0, 0.0
    low, high = 1 / DEAR, DEAR
    for _ in range(HALVINGS):
        middle = float(np.sqrt(low * high))
        if _sum(loss, _at(cost, loss, middle)) <= _room(limit):
            high = middle
        else:
            low = middle
    return low, high


def _at(cost: Floats, loss: Floats, price: float) -> Ints:
    """Each unit's best choice at a price; of equals the cheapest one."""
    total = cost + price * loss
    best = total.min(1, keepdims=True)
    return np.where(total <= best, cost, np.inf).argmin(1)


def _changed(cost: Floats, loss: Floats, limit: float, choice: Ints) -> Ints | None:
    """The single change that saves most and keeps within the limit; None when none saves."""
    every = np.arange(len(cost))
    more = cost - cost[every, choice][:, None]
    after = _sum(loss, choice) + loss - loss[every, choice][:, None]
    more = np.where(after <= _room(limit), more, np.inf)
    unit, to = np.unravel_index(int(more.argmin()), more.shape)
    if more[unit, to] >= -1e-9 * max(1.0, _sum(cost, choice)):
        return None
    out = choice.copy()
    out[unit] = to
    return out


def _sum(x: Floats, choice: Ints) -> float:
    return float(x[np.arange(len(x)), choice].sum())


def _room(limit: float) -> float:
    """Sums in another order may differ in their last bits."""
    return limit + 1e-9 * abs(limit) + 1e-12
