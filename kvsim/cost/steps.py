"""Whole decode steps: a rest of the step for each variant (weight format, engine), and one bandwidth that they share.

The few steps that anybody measures cannot tell a bandwidth each, and the cache is read by the same kernel whatever the weights are.
Source: cost study, answer 2."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from kvsim.cost.classfit import KEY, ClassFit, summary
from kvsim.cost.form import features, place
from kvsim.cost.gate import OVER
from kvsim.cost.hardware import Gpu
from kvsim.cost.residual import grid
from kvsim.cost.robust import bootstrap, interval, seed_of, solve

Array = npt.NDArray[np.float64]

STEP_KEY = tuple(k for k in KEY if k != "variant")
TERMS = ("launch", "bytes")


def fit_steps(key: dict[str, Any], group: pl.DataFrame, gpu: Gpu | None, draws: int, seed: int) -> list[ClassFit]:
    """Steps of one head shape -> a fit for each variant: `launch` is the rest of the step, `bytes` the shared microseconds per MB."""
    variants = sorted(group["variant"].unique())
    mine = np.array([[v == name for name in variants] for v in group["variant"]])
    plain = features(group, TERMS, None)
    x = np.column_stack([mine * plain[:, :1], plain[:, 1]])
    t, places = group["t_us"].to_numpy(), place(group)
    floor = np.append(np.zeros(len(variants)), 1e3 / (OVER * gpu.bandwidth_gbps) if gpu else 0.0)
    cells = np.unique(np.column_stack([mine.argmax(1), places]), axis=0, return_inverse=True)[1].ravel()
    a = solve(x, t, floor, np.ones(len(t)))
    count = int(cells.max()) + 1
    again = bootstrap(x, t, floor, cells, a, draws, seed_of(key, seed)) if draws else a[None]
    ci = interval(again, a, count)
    errors = _left_out(x, t, floor, cells)
    return [
        _of_variant(
            key | {"variant": name},
            mine[:, i],
            group,
            places,
            np.log(t / (x @ a)),
            errors,
            a[[i, -1]],
            ci[[i, -1]],
            again[:draws, [i, -1]],
        )
        for i, name in enumerate(variants)
    ]


def _of_variant(
    key: dict[str, Any],
    mine: npt.NDArray[np.bool_],
    group: pl.DataFrame,
    places: Array,
    missed: Array,
    errors: Array,
    a: Array,
    ci: Array,
    draws: Array,
) -> ClassFit:
    found = errors[mine][np.isfinite(errors[mine])]
    return ClassFit(
        key={name: key[name] for name in KEY},
        coefficients=dict(zip(TERMS, map(float, a), strict=True)),
        ci95={term: (float(low), float(high)) for term, (low, high) in zip(TERMS, ci, strict=True)},
        grid=grid(places[mine], missed[mine]),
        l2_bytes=None,
        spread=float(np.percentile(np.abs(found), 95)) if len(found) else float("nan"),
        beyond=float("nan"),
        held=summary(found),
        rows={s: n for s, n in sorted(group.filter(pl.Series(mine))["status"].value_counts().iter_rows())}
        | {"shapes": int(mine.sum())},
        draws=draws,
    )


def _left_out(x: Array, t: Array, floor: Array, cells: npt.NDArray[np.int64]) -> Array:
    """log(predicted/measured) of every step, its own shape left out; NaN where a variant has no other."""
    errors = np.full(len(t), np.nan)
    for cell in range(int(cells.max()) + 1):
        rest = cells != cell
        if (x[rest].max(0) > 0).all():
            a = solve(x[rest], t[rest], floor, np.ones(int(rest.sum())))
            errors[~rest] = np.log(x[~rest] @ a / t[~rest])
    return errors
