"""Samples -> one fit per kernel class, variant and head shape, with the terms that earn their place on shapes left out."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from kvsim.cost.classfit import KEY, ClassFit, summary
from kvsim.cost.form import BASE, features, place, usable
from kvsim.cost.gate import OVER
from kvsim.cost.hardware import Gpu
from kvsim.cost.probe import PROBE
from kvsim.cost.residual import grid
from kvsim.cost.robust import bootstrap, interval, seed_of, solve
from kvsim.cost.steps import STEP_KEY, fit_steps
from kvsim.errors import WrongUse

Array = npt.NDArray[np.float64]
How = Callable[[dict[str, Any], pl.DataFrame, Gpu | None, int, int], list[ClassFit]]

FOLDS = 4
EARNS = 0.95  # a term stays when it lowers the error on left-out shapes by a twentieth
LEAST = 1e-4  # of a log error: less than timings are rounded to
FEWEST = 4  # shapes
DRAWS = 200
STEP_WIDE = 3  # of whole steps: the weights are in every one
TELLING = 4  # launch costs that the bytes of the largest shape must take for the bandwidth to be told
WIDE = 8  # largest over smallest bytes below which no bandwidth can be told from the launch


@dataclass
class Fitted:
    """The fits, and why groups have none: counted in rows by reason."""

    fits: list[ClassFit] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def fit(samples: pl.DataFrame, gpu: Gpu | None, draws: int = DRAWS, seed: int = 0) -> Fitted:
    """Fits every group of the samples. Rows marked impossible or conflicting, and rows from a hot cache, are left out and counted.

    Deterministic: groups in order of their keys, draws from a seed that the key and `seed` make. Raises WrongUse when a class moves bytes
    faster than its link."""
    out = Fitted()
    good = samples.filter(pl.col("status").is_in(["ok", "l2_hot"]) & (pl.col("cache") != "hot"))
    out.left_out.update({s: n for s, n in samples["status"].value_counts().iter_rows() if s in ("impossible", "conflicting")})
    out.left_out["hot cache"] += samples.filter(pl.col("status").is_in(["ok", "l2_hot"]) & (pl.col("cache") == "hot")).height
    out.left_out["plain reads, which say what the device can do"] += good.filter(PROBE).height
    good = good.filter(~PROBE)
    _refuse_faster_than_link(samples, gpu)
    for key, group, wide, how in _groups(good):
        if why := _unfit(group, wide):
            out.refused.append(key | {"rows": group.height, "why": why})
            out.left_out["no fit: " + why.split(";")[0]] += group.height
        else:
            out.fits += how(key, group, gpu, draws, seed)
    return out


def _groups(good: pl.DataFrame) -> Iterator[tuple[dict[str, Any], pl.DataFrame, int, How]]:
    """(key, rows in an order of their own, how far apart their bytes must be, how they are fitted), in order of the keys."""
    steps = pl.col("class") == "step"
    for rows, names, wide, how in (
        (good.filter(~steps), KEY, WIDE, _fit_group),
        (good.filter(steps), STEP_KEY, STEP_WIDE, fit_steps),
    ):
        for values, group in sorted(rows.group_by(*names), key=lambda g: str(g[0])):
            ordered = group.sort("variant", "batch", "context", "pages", "bytes", "t_us", "source")
            yield dict(zip(names, values, strict=True)), ordered, wide, how


def _refuse_faster_than_link(samples: pl.DataFrame, gpu: Gpu | None) -> None:
    for (cls, variant), group in sorted(samples.group_by("class", "variant"), key=lambda g: str(g[0])):
        link = gpu.link_gbps(str(cls)) if gpu else None
        fast = group.filter((pl.col("status") == "impossible") & pl.col("bytes").is_not_null())
        if gpu and link and 2 * fast.height > group.height:
            best = float((fast["bytes"] / fast["t_us"]).max()) * 1e-3  # type: ignore[arg-type]  # numbers, at least one
            raise WrongUse(
                f"{cls} {variant}: up to {best:.0f} GB/s where the link of {gpu.name} moves {link:.0f} GB/s at most, in {fast.height} of "
                f"{group.height} rows: check the column bytes, or name the right --gpu"
            )


def _unfit(group: pl.DataFrame, wide: int) -> str:
    """Why a group cannot be fitted; empty when it can."""
    shapes = group.select("variant", "batch", "context", "pages", "bytes").unique().height
    if shapes < FEWEST:
        return f"fewer than {FEWEST} shapes; measure 8 to 12, corners of batch and context among them"
    if group["class"][0] == "rest":  # of the batch, not of bytes
        return ""
    if group["bytes"].null_count():
        return "no bytes; import with --geometry, --batch and --context, or fill the column in"
    if group["bytes"].max() < wide * max(group["bytes"].min(), 1):  # type: ignore[operator, type-var]  # whole numbers, at least one
        return f"largest and smallest shape are less than {wide} times apart in bytes; measure a longer context or a larger batch"
    return ""


def _fit_group(key: dict[str, Any], group: pl.DataFrame, gpu: Gpu | None, draws: int, seed: int) -> list[ClassFit]:
    l2 = gpu.l2_bytes if gpu and gpu.link_gbps(key["class"]) == gpu.bandwidth_gbps else None
    link = gpu.link_gbps(key["class"]) if gpu else None
    places, t = place(group), group["t_us"].to_numpy()
    cells = np.unique(places, axis=0, return_inverse=True)[1].ravel()
    base = BASE if key["class"] != "rest" else BASE[:1]
    terms, errors = _choose(group, places, cells, t, base, l2, link)
    x, floor, ones = features(group, terms, l2), _floor(terms, link), np.ones(len(t))
    a = solve(x, t, floor, ones)
    again = bootstrap(x, t, floor, cells, a, draws, seed_of(key, seed)) if draws else a[None]
    ci = interval(again, a, int(cells.max()) + 1)
    found = ClassFit(
        key=key,
        coefficients=dict(zip(terms, map(float, a), strict=True)),
        ci95={term: (float(lo), float(hi)) for term, (lo, hi) in zip(terms, ci, strict=True)},
        grid=grid(places, np.log(t / np.maximum(x @ a, 1e-3))),
        l2_bytes=l2 if "l2" in terms else None,
        spread=float(np.percentile(np.abs(errors), 95)) if len(errors) else float("nan"),
        beyond=_beyond(group, places, t, terms, l2, link),
        held=summary(errors),
        rows={s: n for s, n in sorted(group["status"].value_counts().iter_rows())} | {"shapes": int(cells.max()) + 1},
        draws=again[:draws],
        lacks=_lacks(group, dict(zip(terms, map(float, a), strict=True))),
    )
    return [found]


def _lacks(group: pl.DataFrame, a: dict[str, float]) -> str:
    """Which shape would tell the bandwidth, when none spends four times as long on its bytes as on its launches; empty when one does."""
    if "bytes" not in a:
        return ""
    on_bytes = (group["bytes"] / group["n"] * a["bytes"] / 1e6).to_numpy()
    if on_bytes.max() > TELLING * a["launch"]:
        return ""
    row = group.row(int(on_bytes.argmax()), named=True)
    times = TELLING * a["launch"] / max(float(on_bytes.max()), 1e-9)
    where = f"batch {row['batch']}, context {math.ceil(row['context'] * times)}" if row["batch"] and row["context"] else "a shape"
    return f"{where} ({row['bytes'] / row['n'] * times / 1e6:.3g} MB a launch) would tell the bandwidth; none measured is large enough"


def _floor(terms: tuple[str, ...], link: float | None) -> Array:
    """Least coefficients: no byte moves faster than the link."""
    return np.array([1e3 / (OVER * link) if link and term == "bytes" else 0.0 for term in terms])


def _choose(
    group: pl.DataFrame,
    places: Array,
    cells: npt.NDArray[np.int64],
    t: Array,
    base: tuple[str, ...],
    l2: int | None,
    link: float | None,
) -> tuple[tuple[str, ...], Array]:
    """The terms, and log(predicted/measured) on left-out shapes under them: forward, the best extra term first, while each earns its place."""
    fold = _folds(cells)
    terms = base
    errors = _held_out(group, places, t, fold, base, l2, link)
    while len(terms) < min(6, int(cells.max())) and len(errors):
        tried = {
            term: _held_out(group, places, t, fold, (*terms, term), l2, link) for term in usable(group, l2) if term not in terms
        }
        best = min(tried, key=lambda term: float(np.abs(tried[term]).mean()), default=None)
        if best is None or not _earned(np.abs(errors) - np.abs(tried[best]), np.abs(errors)):
            break
        terms, errors = (*terms, best), tried[best]
    return terms, errors


def _earned(gained: Array, errors: Array) -> bool:
    """Whether a term lowers the error by a twentieth, and by more than the left-out shapes could by chance (two standard errors)."""
    chance = gained.std() / np.sqrt(len(gained))
    return bool(gained.mean() > max((1 - EARNS) * errors.mean(), 2 * chance, LEAST))


def _folds(cells: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A fold for every row, the same for all rows of a shape."""
    return np.random.default_rng(0).permutation(int(cells.max()) + 1)[cells] % FOLDS


def _held_out(
    group: pl.DataFrame,
    places: Array,
    t: Array,
    fold: npt.NDArray[np.int64],
    terms: tuple[str, ...],
    l2: int | None,
    link: float | None,
) -> Array:
    """log(predicted/measured) of shapes that a fit without them predicts, those inside its hull only."""
    x, floor = features(group, terms, l2), _floor(terms, link)
    errors = []
    for i in range(FOLDS):
        train, test = fold != i, fold == i
        if train.sum() <= len(terms) or not test.any():
            continue
        a = solve(x[train], t[train], floor, np.ones(int(train.sum())))
        missed, inside = grid(places[train], np.log(t[train] / np.maximum(x[train] @ a, 1e-3))).at(places[test])
        errors.append((np.log(np.maximum(x[test] @ a, 1e-3) / t[test]) + missed)[inside])
    return np.concatenate(errors) if errors else np.zeros(0)


def _beyond(group: pl.DataFrame, places: Array, t: Array, terms: tuple[str, ...], l2: int | None, link: float | None) -> float:
    """95th percentile of |log error| on the top octave of sizes, predicted from below it; NaN when too little is left."""
    below = places[:, 1] < places[:, 1].max() - 0.5
    if below.sum() <= 2 * len(terms):
        return float("nan")
    x = features(group, terms, l2)
    a = solve(x[below], t[below], _floor(terms, link), np.ones(int(below.sum())))
    return float(np.percentile(np.abs(np.log(np.maximum(x[~below] @ a, 1e-3) / t[~below])), 95))


def half(samples: pl.DataFrame) -> pl.Series:
    """Whether a shape belongs to the fitted half: a bit of the hash of its batch and size, so no list of shapes and no choice."""
    names = (f"{b} {s}" for b, s in np.round(place(samples), 6).tolist())
    return pl.Series([hashlib.sha256(name.encode()).digest()[0] % 2 == 0 for name in names], dtype=pl.Boolean)
