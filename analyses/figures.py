"""From sums per context to figures: a number per (figure, line, at) and cell with its interval over contexts, and verdicts on claims.

Everything rests on *rows*: cell, context, figure (what is measured), line (policy or series), at (the place along x, "" without one),
top, below: a figure is Σ top / Σ below over the contexts of its cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.errors import KvsimError
from kvsim.metrics.interval import FEWEST, picks

Draws = NDArray[np.float64]  # f64[1 + DRAWS]: what all contexts say, then what each resampling of them says
KEY = ("figure", "line", "at")
SCHEMA = {"cell": pl.String, "context": pl.String, **dict.fromkeys(KEY, pl.String), "top": pl.Float64, "below": pl.Float64}

HOLDS, NOT, UNTOLD, OPEN = "holds", "does not hold", "cannot be told", "left open by the notes"


# ---------------------------------------------------------------------------------------------- rows
def mean(column: str | pl.Expr) -> tuple[pl.Expr, pl.Expr]:
    """(top, below) of a plain mean over rows that have a value."""
    x = (pl.col(column) if isinstance(column, str) else column).cast(pl.Float64)
    return x.sum(), x.count().cast(pl.Float64)


def share(part: str | pl.Expr, whole: str | pl.Expr) -> tuple[pl.Expr, pl.Expr]:
    """(top, below) of a ratio of sums over rows that have both."""
    top, below = ((pl.col(x) if isinstance(x, str) else x).cast(pl.Float64) for x in (part, whole))
    both = top.is_not_null() & below.is_not_null()
    return top.filter(both).sum(), below.filter(both).sum()


def rows(
    table: pl.DataFrame, figures: Mapping[str, tuple[pl.Expr, pl.Expr]], line: str | pl.Expr = "policy", at: str | pl.Expr = "at"
) -> pl.DataFrame:
    """A table of one context -> role, figure, line, at, top, below: every figure's two sums for each role, line and place along x
    (columns or expressions; a table without a column `at` or `role` has the place, the role "")."""
    named = {"line": line, "at": at}
    if isinstance(at, str) and at not in table.columns:
        named["at"] = pl.lit("")
    if "role" not in table.columns:
        table = table.with_columns(role=pl.lit(""))
    keys = {n: (pl.col(x) if isinstance(x, str) else x).cast(pl.String) for n, x in named.items()}
    groups = table.with_columns(**keys).group_by("role", "line", "at", maintain_order=True)
    each = groups.agg(*(e.alias(f"{n}{i}") for n, pair in figures.items() for i, e in enumerate(pair)))
    return pl.concat(
        each.select("role", pl.lit(n).alias("figure"), "line", "at", top=pl.col(f"{n}0"), below=pl.col(f"{n}1")) for n in figures
    )


# ---------------------------------------------------------------------------------------------- figures
class NoFigure(KvsimError):
    """A cell has no such number: nobody looks at the evidence there, or it is written otherwise."""


class Figures:
    """The figures of one cell: f("slack", "quest", "16") -> Draws. The same contexts are drawn for all, so that differences and ratios of
    them are paired. Below eight contexts there are no draws, so no interval."""

    def __init__(self, cell: str, table: pl.DataFrame) -> None:
        self.cell, self.table = cell, table
        self.contexts: list[str] = table["context"].unique(maintain_order=True).sort().to_list()
        self._sums = {key: part for key, part in table.group_by(*KEY, maintain_order=True)}
        self._counts = _counts(len(self.contexts))

    def __call__(self, figure: str, line: str, at: str | float = "") -> Draws:
        key = figure, line, str(at)
        if key not in self._sums:
            near = get_close_matches(" / ".join(key), [" / ".join(map(str, k)) for k in self._sums], 1)
            raise NoFigure(f"{self.cell}: no figure {' / '.join(key)!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        part = self._sums[key]
        at_ = [self.contexts.index(c) for c in part["context"]]
        top, below = np.zeros(len(self.contexts)), np.zeros(len(self.contexts))
        np.add.at(top, at_, part["top"].to_numpy())
        np.add.at(below, at_, part["below"].to_numpy())
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Draws = (self._counts @ top) / (self._counts @ below)
        return found

    def has(self, figure: str, line: str, at: str | float = "") -> bool:
        return (figure, line, str(at)) in self._sums

    def places(self, figure: str, line: str) -> list[str]:
        """Along x, in the order of the rows."""
        return [at for f, x, at in self._sums if (f, x) == (figure, line)]

    def frame(self) -> pl.DataFrame:
        """-> cell, contexts, figure, line, at, value, low, high (null without an interval), in the order of the rows."""
        out = [(self.cell, len(self.contexts), *key, *told(self(*key))) for key in self._sums]
        schema = {"cell": pl.String, "contexts": pl.Int64, **dict.fromkeys(KEY, pl.String)}
        return pl.DataFrame(out, schema | dict.fromkeys(("value", "low", "high"), pl.Float64), orient="row").fill_nan(None)


@cache
def _counts(contexts: int) -> NDArray[np.float64]:
    """f64[1 + DRAWS, contexts]: how often each context counts; only the first row below FEWEST."""
    drawn = picks(contexts, seed=0) if contexts >= FEWEST else np.zeros((0, contexts), np.int64)
    return np.concatenate([np.ones((1, contexts)), drawn])


def told(draws: Draws) -> tuple[float, float | None, float | None]:
    """value, and the 95 % percentile interval, None where there are no draws or none has a value."""
    drawn = draws[1:][np.isfinite(draws[1:])]
    if not len(drawn):
        return float(draws[0]), None, None
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(draws[0]), float(low), float(high)


def by_cell(table: pl.DataFrame) -> list[Figures]:
    """Rows of several cells -> their figures, cells in the order of the rows."""
    return [Figures(str(cell), part) for (cell,), part in table.group_by("cell", maintain_order=True)]


# ---------------------------------------------------------------------------------------------- claims
def at_least(x: float) -> tuple[float, float]:
    """A range of numbers by which a claim holds."""
    return x, math.inf


def at_most(x: float) -> tuple[float, float]:
    return -math.inf, x


@dataclass(frozen=True)
class Claim:
    """What the notes say and the number that it stands or falls by.

    notes: their claim in our words, with the place; number: figures of a cell -> Draws, named by `of` and written as `form`;
    claimed: the range in which the claim holds (None: they leave it open, the number answers);
    so, if_not: the finding where it holds, and where it does not, {} standing for the numbers there;
    cells: those of its roles that it speaks of (a part of their name)."""

    notes: str
    of: str
    number: Callable[[Figures], Draws]
    claimed: tuple[float, float] | None
    so: str
    if_not: str = ""
    form: str = ".1%"
    cells: str = ""


@dataclass(frozen=True)
class Verdict:
    """On one claim in one cell."""

    cell: str
    contexts: int
    value: float
    low: float | None
    high: float | None
    word: str  # HOLDS, NOT, UNTOLD or OPEN

    def said(self, form: str) -> str:
        """12.7 [11.9, 13.4]"""
        interval = "" if self.low is None else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.value:{form}}{interval}"


def judge(claim: Claim, cells: Sequence[Figures]) -> list[Verdict]:
    """A verdict per cell that the claim speaks of and that has the number: it holds when the whole interval lies in the claimed range, does not
    when all of it lies outside, and cannot be told else. Raises NoFigure when no cell has it."""
    asked = [f for f in cells if claim.cells in f.cell]
    out, missing = [], []
    for f in asked:
        try:
            value, low, high = told(claim.number(f))
        except NoFigure as e:
            missing.append(e)
            continue
        if math.isfinite(value):
            out.append(Verdict(f.cell, len(f.contexts), value, low, high, worded(claim.claimed, low, high)))
    if missing and len(missing) == len(asked):
        raise missing[0]
    return out


def worded(claimed: tuple[float, float] | None, low: float | None, high: float | None) -> str:
    """The word for an interval, beside the range in which the claim holds."""
    if low is None or high is None:
        return UNTOLD
    if claimed is None:
        return OPEN
    if claimed[0] <= low and high <= claimed[1]:
        return HOLDS
    return NOT if high < claimed[0] or low > claimed[1] else UNTOLD
