"""What every budget costs and loses in one context: menus of (layer, kv head), read off the curves, ledger and heads of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.errors import WrongUse
from kvsim.metrics.run import RunTables
from kvsim.policies.language import parse
from kvsim.policies.parameters import unknown
from kvsim.policies.protocol import Chain

Floats = NDArray[np.float64]
Unit = tuple[int, int]  # layer, kv head

TARGETS = {"mass": "mass_recall_mean", "far": "far_recall", "evidence": "evidence_recall", "rel_l2": "rel_l2_mean"}
ALL_STEPS = -1
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # pages of the oracle that chooses anew at each step


@dataclass(frozen=True)
class Target:
    """What is to be reached: mass, far or evidence recall of at least x, or a relative output error rel_l2 of at most x."""

    measure: str
    x: float

    @property
    def loss(self) -> float:
        """The most that may be lost: 1 - recall, or the error."""
        return self.x if self.measure == "rel_l2" else 1 - self.x

    def value(self, loss: Floats | float) -> Floats | float:
        """A loss as the measure tells it."""
        return loss if self.measure == "rel_l2" else 1 - loss

    def __str__(self) -> str:
        return f"{self.measure}={self.x:g}"


def target(text: str) -> Target:
    """mass=0.95 -> Target. Raises WrongUse."""
    measure, equals, x = text.partition("=")
    if measure not in TARGETS:
        unknown("target", measure, TARGETS)
    try:
        number = float(x)
    except ValueError:
        number = -1.0
    if not equals or not 0 < number < 1:
        raise WrongUse(
            f"target {text!r}: expected a number between 0 and 1, for example {measure}={0.1 if measure == 'rel_l2' else 0.95}"
        )
    return Target(measure, number)


@dataclass(frozen=True)
class Menu:
    """One context. Columns are budgets of 1, 2, ... pages, and last everything: cost f64[U, K + 1] in bytes a step, loss f64[U, K + 1]
    summed over the unit's query heads, each weighed by what it has to lose; weight: the sum of all these weights. steps: the same by
    (unit, step) for an oracle that chooses anew each time, where the run has one."""

    name: str
    units: tuple[Unit, ...]
    cost: Floats
    loss: Floats
    weight: float
    steps: tuple[Floats, Floats] | None = None

    @property
    def pages(self) -> int:
        return self.cost.shape[1] - 1

    def widened(self, pages: int) -> Menu:
        """With budgets up to so many pages: those it has not got read everything."""
        more = max(0, pages - self.pages)
        cost, loss = (np.hstack([x, np.repeat(x[:, -1:], more, 1)]) for x in (self.cost, self.loss))
        return Menu(self.name, self.units, cost, loss, self.weight, self.steps)


def menus(run: RunTables, goal: Target) -> tuple[Chain, list[Menu]]:
    """The policy whose curves the run has, and a menu for each of its requests. Raises WrongUse for a run without one such policy."""
    ids = [p.id for p in run.policies if p.rows]
    ranked = [i for i in ids if "@" not in i and parse(i).part("read").index is not None]
    curves = run.tables["curves"].filter(pl.col("policy").is_in(ranked), pl.col("role") == ALL_STEPS).collect()
    found = curves["policy"].unique().to_list()
    if len(found) != 1:
        raise WrongUse(
            f"{run.path}: curves of {len(found)} policies that rank pages by a summary, expected one; replay with -p 'quest(read=pages(1))'"
        )
    if curves[TARGETS[goal.measure]].is_null().all():
        raise WrongUse(
            f"{run.path}: no {goal.measure} in its curves; a trace without evidence spans has none, take mass= or rel_l2="
        )
    oracles = [i for i in ids if i.startswith("full() >> oracle(")]
    trace = f"{run.about['trace']['id']}@{run.about['trace']['sha256'][:12]}"
    return parse(found[0]), [_menu(run, f"{trace}/{r}", found[0], oracles, r, goal) for r in sorted(curves["request"].unique())]


def same_units(every: Sequence[Menu]) -> list[Menu]:
    """All with as many budgets. Raises WrongUse when they are not of the same layers and heads."""
    if len({m.units for m in every}) > 1:
        odd = next(m for m in every if m.units != every[0].units)
        raise WrongUse(
            f"{odd.name}: other layers or kv heads than {every[0].name}; advise on contexts of one model and the same --layers"
        )
    return [m.widened(max(m.pages for m in every)) for m in every]


def _menu(run: RunTables, name: str, policy: str, oracles: Sequence[str], request: int, goal: Target) -> Menu:
    mine = pl.col("request") == request
    group = {x["layer"]: x["q_heads"] // x["kv_heads"] for x in run.about["layers"] if x["kv_heads"]}
    unit = pl.col("q_head") // pl.col("layer").replace_strict(group, return_dtype=pl.Int16)
    here = mine & (pl.col("policy") == policy)
    prices = _prices(run.ledger.filter(here), run.layers)
    weights = (
        run.heads.filter(here).group_by("layer", "q_head").agg(weight=_weight(goal).mean(), whole=_whole(goal).mean()).collect()
    )
    heavy = {
        (layer, head): (w, whole) for layer, head, w, whole in weights.select("layer", "q_head", "weight", "whole").iter_rows()
    }
    curves = run.tables["curves"].filter(here, pl.col("role") == ALL_STEPS).with_columns(kv_head=unit)
    every = curves.sort("layer", "q_head", "pages").collect().partition_by("layer", "kv_head", "q_head", maintain_order=True)
    units, pages = tuple(sorted(prices)), max(len(one) for one in every)
    cost, loss = np.zeros((2, len(units), pages + 1))
    for one in every:
        layer, head, q_head = one.select("layer", "kv_head", "q_head").row(0)
        row, (scan, dense), (w, whole) = units.index((layer, head)), prices[layer, head], heavy[layer, q_head]
        cost[row] = _to(one["read_bytes_mean"].to_numpy() + scan, dense, pages)
        loss[row] += w * _to(_lost(one, goal), whole, pages)
    steps = _by_step(run, mine, oracles, unit, goal) if oracles else None
    return Menu(name, units, cost, loss, sum(w for w, _ in heavy.values()), steps)


def _prices(ledger: pl.LazyFrame, layers: pl.LazyFrame) -> dict[Unit, tuple[float, float]]:
    """Bytes a step of every unit: a scan of its summaries, and everything that is visible."""
    costs = (
        ledger.join(layers, on="layer")
        .group_by("layer", "kv_head")
        .agg(
            scan=pl.col("index_bytes").filter(pl.col("index_bytes") > 0).mean().fill_null(0),
            dense=(pl.col("visible_tokens").cast(pl.Int64) * pl.col("row_bytes")).mean(),
        )
        .collect()
    )
    return {(layer, head): (scan, dense) for layer, head, scan, dense in costs.iter_rows()}


def _to(x: Floats, last: float, pages: int) -> Floats:
    """A sliding layer has fewer budgets than another: beyond them everything is read."""
    return np.concatenate([x, np.full(pages + 1 - len(x), last)])


def _lost(curve: pl.DataFrame, goal: Target) -> Floats:
    """f64[K]: between the budgets at which the error was computed it is taken to be linear."""
    x = curve[TARGETS[goal.measure]].cast(pl.Float64).to_numpy()
    if goal.measure != "rel_l2":
        return np.nan_to_num(1 - x)
    at, told = curve["pages"].to_numpy(), ~np.isnan(x)
    return np.interp(at, at[told], x[told])


def _weight(goal: Target) -> pl.Expr:
    """What a query head counts at a step: the dense mass that it has there for far and evidence, which are ratios of sums, else 1."""
    if goal.measure == "far":
        return pl.when(pl.col("far_recall").is_not_null()).then(pl.col("far_mass").cast(pl.Float64)).otherwise(0.0)
    return pl.col("evidence_dense").cast(pl.Float64).fill_null(0.0) if goal.measure == "evidence" else pl.lit(1.0)


def _whole(goal: Target) -> pl.Expr:
    """What is lost when everything is read: the mass on a learned sink."""
    return pl.col("learned_sink_mass").cast(pl.Float64) if goal.measure == "mass" else pl.lit(0.0)


def _row_loss(goal: Target) -> pl.Expr:
    """Loss times weight of a (query head, step)."""
    x = {name: pl.col(name).cast(pl.Float64) for name in ("mass_recall", "far_recall", "evidence_read", "rel_l2")}
    told = {
        "mass": 1 - x["mass_recall"],
        "far": _weight(goal) * (1 - x["far_recall"]),
        "evidence": _weight(goal) - x["evidence_read"],
        "rel_l2": x["rel_l2"],
    }
    return told[goal.measure].fill_null(0.0)


def _by_step(run: RunTables, mine: pl.Expr, oracles: Sequence[str], unit: pl.Expr, goal: Target) -> tuple[Floats, Floats]:
    """cost, loss f64[U * steps, B + 1] of an oracle at the B budgets that were replayed, and of everything; steps are averaged, so a
    row counts 1 / steps."""
    at = ["layer", "kv_head", "step"]
    cost, loss = [], []
    for policy in oracles:
        these = mine & (pl.col("policy") == policy)
        heads = (
            run.heads.filter(these)
            .with_columns(kv_head=unit)
            .group_by(at)
            .agg(_row_loss(goal).sum().alias("loss"), _whole(goal).sum().alias("whole"))
        )
        rows = run.ledger.filter(these).select(*at, "read_bytes", "visible_tokens").join(heads, on=at).sort(at).collect()
        cost.append(rows["read_bytes"].cast(pl.Float64).to_numpy())
        loss.append(rows["loss"].to_numpy())
    row = dict(run.layers.collect().iter_rows())
    cost.append(rows["visible_tokens"].to_numpy() * np.array([row[x] for x in rows["layer"]], float))
    loss.append(rows["whole"].to_numpy())
    steps = rows["step"].n_unique()
    return np.column_stack(cost) / steps, np.column_stack(loss) / steps
