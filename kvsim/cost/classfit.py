"""One fit of a kernel class: what it holds, and how its errors are summed up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from kvsim.cost.form import features, hot_share, place
from kvsim.cost.residual import Grid

Array = npt.NDArray[np.float64]

KEY = ("class", "variant", "q_heads", "kv_heads", "head_dim", "kv_bits", "page", "graph")


@dataclass(frozen=True)
class ClassFit:
    """One fit: key, coefficients by term (µs; units in form.UNITS), their 95 % intervals, the measured shapes with what the form misses there.

    spread: 95th percentile of |log error| on left-out shapes inside the hull, the half-width of a prediction's interval; beyond: the
    same on shapes up to twice past the largest one. held: error on the left-out shapes. lacks: what to measure before the
    bandwidth can be told, empty when it can. draws f64[draws, terms]: coefficients of resampled
    shapes, the same draw of one resample in all fits made together; empty where none were drawn."""

    key: dict[str, Any]
    coefficients: dict[str, float]
    ci95: dict[str, tuple[float, float]]
    grid: Grid
    l2_bytes: int | None
    spread: float
    beyond: float
    held: dict[str, float]
    rows: dict[str, int]
    lacks: str = ""
    draws: Array = field(default_factory=lambda: np.zeros((0, 0)))

    def formed(self, samples: pl.DataFrame) -> Array:
        """µs by the form alone."""
        by_term = features(samples, tuple(self.coefficients), self.l2_bytes) * list(self.coefficients.values())
        return np.maximum(by_term.sum(1), 1e-3)

    def times(self, samples: pl.DataFrame) -> tuple[Array, npt.NDArray[np.bool_]]:
        """(µs, inside) of rows of this key."""
        missed, inside = self.grid.at(place(samples))
        inside &= ~self.displaced(samples)
        return self.formed(samples) * np.exp(np.where(inside, missed, 0.0)), inside

    def displaced(self, samples: pl.DataFrame) -> npt.NDArray[np.bool_]:
        """Rows of a cold cache that the measurement found in L2: what was measured there is not what they are."""
        layer = (samples["bytes"].fill_null(0) / samples["layers"]).to_numpy()
        return (samples["cache"] == "cold").to_numpy() & (hot_share(layer, self.l2_bytes) > 0)

    def drawn(self, i: int) -> ClassFit:
        """The fit of the i-th resample; itself where none was drawn."""
        return (
            replace(self, coefficients=dict(zip(self.coefficients, self.draws[i].tolist(), strict=True)))
            if len(self.draws)
            else self
        )

    def stretch(self) -> float:
        """Half-width of the 95 % intervals over the standard deviation of the draws: more than 1.96 where shapes are few."""
        half = np.array([(high - low) / 2 for low, high in (self.ci95[t] for t in self.coefficients)])
        spread = self.draws.std(axis=0) if len(self.draws) else np.zeros(0)
        known = spread > 0 if len(spread) else np.zeros(0, bool)
        return float(max(1.96, (half[known] / spread[known]).max(initial=0.0))) if known.any() else 1.96

    def bandwidth_gbps(self) -> float | None:
        """What the bytes term amounts to."""
        per_mb = self.coefficients.get("bytes", 0.0)
        return 1e3 / per_mb if per_mb else None


def summary(errors: Array) -> dict[str, float]:
    """n, MAPE, 90th percentile of the relative error, signed bias (median), of errors given as log(predicted/measured)."""
    if not len(errors):
        return {"n": 0}
    relative = np.expm1(errors)
    return {
        "n": len(errors),
        "mape": float(np.abs(relative).mean()),
        "p90": float(np.percentile(np.abs(relative), 90)),
        "bias": float(np.median(relative)),
    }
