"""Codes on a grid of learned levels, the numbers at both ends of the range kept exact (KVQuant, arXiv 2401.18079).

A number is brought to [-1, 1] by an offset and a range, and its code is the nearest level there. Outliers, beyond two thresholds, are kept
apart: a 16-bit number and a 16-bit index each, and per row a 32-bit pointer to where its own begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.calibration import MAKE, Calibration
from kvsim.codecs.pipeline import grouped
from kvsim.errors import WrongUse
from kvsim.geometry import Layer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
OUTLIER_BITS, POINTER_BYTES = 32, 4
RANGE_BYTES = 4  # offset and range, fp16 each
ROUNDED, LARGEST = 1e-6, 65504.0  # of levels stored in float32; of fp16
ROUNDS = 100  # of k-means, which comes to rest long before


@dataclass(frozen=True)
class nuq:
    """A grid for every kv head. side "k": thresholds, offsets and ranges per channel from the calibration; "v": per row, from the row itself."""

    bits: int
    outliers: float
    side: str
    calibration: Calibration

    @property
    def scale_bytes(self) -> int:
        return _scale_bytes(self.outliers, fixed=self.side == "k")

    def check(self, layer: Layer, dim: int) -> None:
        """Raises WrongUse for a layer that the calibration does not cover, or whose heads or keys are others, and for levels that are none."""
        where = f"calibration {self.calibration.path}"
        for head in range(layer.kv_heads):
            one = self.at(layer, head)
            if one.level.shape != (2**self.bits,) or (np.diff(one.level) < 0).any() or np.abs(one.level).max() > 1 + ROUNDED:
                raise WrongUse(
                    f"{where}: {self.side}.level of layer {layer.id} is not {2**self.bits} ascending levels from -1 to 1; {MAKE}"
                )
            if one.edges is not None and one.edges.shape != (4, dim):
                numbers = one.edges.shape[-1] if one.edges.ndim else 1
                raise WrongUse(f"{where}: keys of layer {layer.id} have {numbers} numbers there, here {dim}; {MAKE}")
            if one.edges is not None and (np.abs(one.edges).max() > LARGEST or (one.edges[3] < 0).any()):
                raise WrongUse(f"{where}: k.edges of layer {layer.id} are no ranges that fp16 holds; {MAKE}")

    def at(self, layer: Layer, head: int) -> coder:
        """The grid of one kv head. Raises WrongUse when the calibration does not cover it."""
        level = self.calibration.array(f"{layer.id}.{self.side}.level", layer.id)
        if self.side == "v":
            return coder(self.bits, self.outliers, level)
        return coder(self.bits, self.outliers, level, self.calibration.array(f"{layer.id}.k.edges", layer.id, head))


@dataclass(frozen=True, eq=False)
class coder:
    """level f64[2**bits], ascending in [-1, 1]; edges f64[4, d] of fixed ranges (low and high threshold, offset, range), or None: per row."""

    bits: int
    outliers: float
    level: Floats
    edges: Floats | None = None

    @property
    def scale_bytes(self) -> int:
        return _scale_bytes(self.outliers, fixed=self.edges is not None)

    def code(self, x: Floats, group: grouped) -> tuple[Floats, Ints]:
        """[m, rows, d] -> what a reader decodes, same shape; bits of the outliers of each row. A group is a row."""
        if self.edges is None:
            outlier = beyond(x, self.outliers)
            offset, span = ranges(x, outlier, axis=-1)
        else:
            low, high, offset, span = self.edges
            outlier = ((x < low) | (x > high)) & (self.outliers > 0)
        values = np.where(outlier, x, nearest((x - offset) / np.where(span > 0, span, 1.0), self.level) * span + offset)
        return values, OUTLIER_BITS * outlier.sum(axis=-1)

    def once(self, dim: int) -> int:
        """Bytes of levels, thresholds and ranges, fp16 each."""
        return 2 * (len(self.level) + (0 if self.edges is None else self.edges.size))


def _scale_bytes(outliers: float, fixed: bool) -> int:
    """Of a row: where its outliers begin, and its own range."""
    return (POINTER_BYTES if outliers > 0 else 0) + (0 if fixed else RANGE_BYTES)


def thresholds(x: Floats, outliers: float, axis: int) -> tuple[Floats, Floats]:
    """Between which all but the part `outliers` of the numbers lie, half of it at each end (linear quantiles)."""
    low, high = np.quantile(x, [outliers / 2, 1 - outliers / 2], axis=axis, keepdims=True)
    return low, high


def beyond(x: Floats, outliers: float) -> NDArray[np.bool_]:
    """The outliers of each row by thresholds of its own, which are outliers themselves."""
    low, high = thresholds(x, outliers, axis=-1)
    return np.asarray(((x <= low) | (x >= high)) & (outliers > 0))


def ranges(x: Floats, outlier: NDArray[np.bool_], axis: int) -> tuple[Floats, Floats]:
    """Middle and half width of the numbers that are no outliers; their median where all are."""
    inside = ~outlier | outlier.all(axis=axis, keepdims=True)
    low = np.where(inside, x, np.inf).min(axis=axis, keepdims=True)
    high = np.where(inside, x, -np.inf).max(axis=axis, keepdims=True)
    return (high + low) / 2, (high - low) / 2


def nearest(x: Floats, level: Floats) -> Floats:
    """The nearest of ascending levels; of two as near the lower."""
    return level[np.searchsorted((level[1:] + level[:-1]) / 2, x)]


def learned(x: Floats, bits: int) -> Floats:
    """f64[2**bits]: levels of least squared error on numbers x, by k-means from even quantiles; ascending."""
    x = np.sort(x.ravel())
    sums = np.append(0.0, np.cumsum(x))
    level = np.quantile(x, (np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(ROUNDS):
        cut = np.concatenate([[0], np.searchsorted(x, (level[1:] + level[:-1]) / 2), [len(x)]])
        many = np.diff(cut)
        new = np.where(many > 0, np.diff(sums[cut]) / np.maximum(many, 1), level)
        if (new == level).all():
            break
        level = new
    return level


def of_keys(x: Floats, bits: int, outliers: float) -> dict[str, Floats]:
    """What nuq needs of one layer's keys [Hkv, n, d]: "k.edges" [Hkv, 4, d] and "k.level"."""
    low, high = thresholds(x, outliers, axis=1)
    outlier = ((x < low) | (x > high)) & (outliers > 0)
    offset, span = ranges(x, outlier, axis=1)
    inside = ((x - offset) / np.where(span > 0, span, 1.0))[~outlier]
    return {"k.edges": np.concatenate([low, high, offset, span], axis=1), "k.level": learned(inside, bits)}


def of_values(x: Floats, bits: int, outliers: float) -> dict[str, Floats]:
    """What nuq needs of one layer's values [Hkv, n, d]: "v.level"."""
    outlier = beyond(x, outliers)
    offset, span = ranges(x, outlier, axis=-1)
    return {"v.level": learned(((x - offset) / np.where(span > 0, span, 1.0))[~outlier], bits)}
