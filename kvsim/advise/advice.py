"""Budgets per layer and kv head that reach a target at least bytes, and how they fare on contexts that they were not made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.advise.allocate import allocate, bound, uniform
from kvsim.advise.menus import Menu, Target, Unit
from kvsim.errors import WrongUse
from kvsim.metrics.interval import DRAWS, FEWEST
from kvsim.policies.language import Policy, per_layer
from kvsim.policies.protocol import Chain
from kvsim.policies.read.everything import everything
from kvsim.units import pages

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Advice:
    """pages: of every unit, None where it should read everything; same: the best budget that is one for all; bound: bytes a step that no
    budgets per unit go below on these contexts."""

    goal: Target
    pages: dict[Unit, int | None]
    same: int | None
    made_from: tuple[str, ...]
    bytes: float
    value: float
    bound: float

    def policy(self, chain: Chain, name: str) -> Policy:
        """As a policy file says it: the budget that is one for all as the default, and who differs from it."""
        read = chain.part("read")

        def of(budget: int | None) -> Chain:
            return chain.with_part(everything(page=read.page) if budget is None else replace(read, read=pages(budget)))

        layers = sorted({layer for layer, _ in self.pages})
        told: dict[Any, Any] = {}
        for layer in layers:
            mine = {head: budget for (n, head), budget in self.pages.items() if n == layer}
            told |= {layer: of(mine[0])} if len(set(mine.values())) == 1 else {(layer, h): of(b) for h, b in mine.items()}
        return per_layer(told, default=of(self.same), name=name)


def advise(menus: Sequence[Menu], goal: Target) -> Advice:
    """The budgets that reach the goal at least bytes on these contexts together. Raises WrongUse when reading everything does not."""
    cost, loss, weight = _together(menus)
    limit = goal.loss * weight
    found, same = allocate(cost, loss, limit), uniform(cost, loss, limit)
    if found is None or same is None:
        best = goal.value(loss[:, -1].sum() / weight) if weight else "nothing"
        raise WrongUse(f"target {goal}: reading everything gives {goal.measure} {best} on these contexts; ask for less")
    last = cost.shape[1] - 1
    budgets = [None if c == last else int(c) + 1 for c in found.choice]
    return Advice(
        goal,
        dict(zip(menus[0].units, budgets, strict=True)),
        None if same == last else same + 1,
        tuple(m.name for m in menus),
        found.cost / len(menus),
        float(goal.value(found.loss / weight)),
        found.bound / len(menus),
    )


@dataclass(frozen=True)
class Trial:
    """On contexts that the advice has not seen; bytes are of K, V and page summaries, a step, all layers and heads that were advised on.

    same_bytes: of one budget for all, where it reaches the value that the advice reached, linear between budgets; saving: the part of
    them that the advice does without, with a 95 % bootstrap interval over contexts (None: fewer than 8); same_value, same_fixed: value
    and bytes of the uniform budget chosen on the contexts the advice was made from; oracle: bytes of an oracle that chooses anew at each
    step and reaches the same value (None: not replayed)."""

    contexts: int
    value: float
    bytes: float
    same_bytes: float
    saving: float
    interval: tuple[float, float] | None
    same_value: float
    same_fixed: float
    dense: float
    oracle: float | None


def trial(advice: Advice, menus: Sequence[Menu]) -> Trial:
    """How the advice fares on these contexts. Raises WrongUse when it was made from one of them."""
    if seen := set(advice.made_from) & {m.name for m in menus}:
        raise WrongUse(f"{min(seen)}: the advice was made from this context; try it on others")
    wide = max(menus[0].pages, *(b or 0 for b in advice.pages.values()), advice.same or 0)
    menus = [m.widened(wide) for m in menus]
    choice = np.array([wide if advice.pages[u] is None else advice.pages[u] - 1 for u in menus[0].units])  # type: ignore[operator]  # not None there
    at = np.arange(len(choice))
    mine = np.array([[m.cost[at, choice].sum(), m.loss[at, choice].sum(), m.weight] for m in menus])
    cost, loss = np.stack([m.cost.sum(0) for m in menus]), np.stack([m.loss.sum(0) for m in menus])
    every = np.full((1, len(menus)), 1.0)
    used, other = _equal(every, mine, cost, loss)
    value = mine[:, 1].sum() / mine[:, 2].sum()
    fixed = wide if advice.same is None else advice.same - 1
    interval = None
    if len(menus) >= FEWEST:
        picks = np.random.default_rng(0).multinomial(len(menus), np.full(len(menus), 1 / len(menus)), DRAWS).astype(float)
        drawn, against = _equal(picks, mine, cost, loss)
        low, high = np.percentile(1 - drawn / against, [2.5, 97.5])
        interval = float(low), float(high)
    return Trial(
        len(menus),
        float(advice.goal.value(value)),
        float(used[0]),
        float(other[0]),
        float(1 - used[0] / other[0]),
        interval,
        float(advice.goal.value(loss[:, fixed].sum() / mine[:, 2].sum())),
        float(cost[:, fixed].mean()),
        float(cost[:, -1].mean()),
        _oracle(menus, mine[:, 1].sum()),
    )


def _equal(picks: Floats, mine: Floats, cost: Floats, loss: Floats) -> tuple[Floats, Floats]:
    """Bytes of the advice, and of one budget for all at the same value; picks f64[D, contexts]: how often each context counts."""
    many = picks.sum(1)
    lost, same_cost, same_loss = picks @ mine[:, 1], picks @ cost, picks @ loss
    other = np.empty(len(picks))
    for d in range(len(picks)):
        order = np.argsort(same_cost[d], kind="stable")
        least = np.minimum.accumulate(same_loss[d, order])  # a dearer budget that loses no less is never taken
        won, first = np.unique(-least, return_index=True)
        other[d] = np.interp(-lost[d], won, same_cost[d, order][first])
    return picks @ mine[:, 0] / many, other / many


def _oracle(menus: Sequence[Menu], lost: float) -> float | None:
    parts = [m.steps for m in menus if m.steps is not None]
    if len(parts) < len(menus):
        return None
    cost, loss = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    return bound(cost, loss, lost) / len(menus)


def _together(menus: Sequence[Menu]) -> tuple[Floats, Floats, float]:
    return sum(m.cost for m in menus), sum(m.loss for m in menus), sum(m.weight for m in menus)  # type: ignore[return-value]  # not empty
