"""What the form misses, on the shapes that were measured: the log-residual between them, and what lies inside.

Split heuristics and waves of blocks make steps that no closed form has (same bytes, twice the time); between measured shapes they
interpolate well. Source: cost study, section 3."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import QhullError

Array = npt.NDArray[np.float64]

NEAR = 1e-6  # of log2: the digits of a model's file


class Grid:
    """Measured places f64[cells, 2] (log2 batch, log2 size), one log-residual each; linear between them, 0 outside."""

    def __init__(self, places: Array, residuals: Array) -> None:
        self.places, self.residuals = places, residuals
        self.axis = [i for i in (0, 1) if len(places) and np.ptp(places[:, i]) > 0]
        self.plane = None
        if len(self.axis) == 2:
            try:
                self.plane = LinearNDInterpolator(places, residuals)
            except QhullError:  # all on one line
                self.axis = [1]

    def at(self, places: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """(log-residual, whether the place is inside: the convex hull of two axes, the interval of one, the point of none)."""
        if self.plane is not None:
            found = self.plane(places)
            near = np.abs(places[:, None] - self.places[None]).sum(-1)
            exact = near.min(1) < NEAR  # corners of the hull fall out of it by rounding
            found = np.where(exact, self.residuals[near.argmin(1)], found)
            return np.nan_to_num(found), ~np.isnan(found)
        inside = np.all(
            [
                (p >= lo - NEAR) & (p <= hi + NEAR)
                for p, lo, hi in zip(places.T, self.places.min(0), self.places.max(0), strict=True)
            ],
            axis=0,
        )
        if not self.axis:
            return np.where(inside, self.residuals.mean(), 0.0), inside
        order = np.argsort(self.places[:, self.axis[0]], kind="stable")
        along = np.interp(places[:, self.axis[0]], self.places[order, self.axis[0]], self.residuals[order])
        return np.where(inside, along, 0.0), inside


def grid(places: Array, log_residual: Array) -> Grid:
    """One cell a distinct place; repeats enter by their median."""
    cells, which = np.unique(places, axis=0, return_inverse=True)
    return Grid(cells, np.array([np.median(log_residual[which.ravel() == i]) for i in range(len(cells))]))
