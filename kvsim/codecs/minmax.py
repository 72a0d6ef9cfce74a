"""Grids of even steps between the ends of a group: asymmetric integers, as KIVI stores them and as OSCAR does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.pipeline import grouped, pipeline
from kvsim.errors import WrongUse
from kvsim.kernels.quantize import roundtrip
from kvsim.kernels.rounding import rounded

Floats = NDArray[np.float64]


def minmax(bits: int, axis: Literal["tokens", "channels"], group: int | None = None, pack: int = 1) -> pipeline:
    """A pipeline of nothing but `uniform` codes. `axis` "tokens": one scale per channel over `group` tokens; "channels": per token over `group`
    channels, the last may be short. group None: the whole axis."""
    return pipeline(group=grouped(axis, group), grid=uniform(bits), pack=pack)


@dataclass(frozen=True)
class uniform:
    """code = round((x - zero) / step), halves to even; zero, the lowest number, and step kept in fp16 and used as they were rounded.

    Raises WrongUse when a zero or a step does not fit fp16."""

    bits: int
    scale_bytes = 4  # zero and step, fp16 each

    def code(self, x: Floats, group: grouped) -> tuple[Floats, int]:
        """[m, rows, d] -> what a reader decodes, same shape."""
        return group.each(self._coded, x), 0

    def reach(self, x: Floats) -> Floats:
        """[a, g, b] -> how far decoding can move each number: half a step, or more where the rounded zero and step leave the ends of the
        group outside."""
        low, high = x.min(axis=1), x.max(axis=1)
        zero, step = self._scale(low, high)
        outside = np.maximum(zero - low, high - (zero + step * self._top))
        return np.broadcast_to(np.maximum(step / 2, outside)[:, None], x.shape)

    @property
    def _top(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    def _coded(self, x: Floats) -> Floats:
        """[a, g, b]: every [a, :, b] is one group."""
        out = np.empty_like(x)
        if not roundtrip(x, float(self._top), out):
            self._scale(x.min(axis=1), x.max(axis=1))  # says which number does not fit
        return out

    def _scale(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """The ends [a, b] of each group -> zero and step."""
        return fp16(low), fp16((high - low) / self._top)


LEAST_RANGE = 1e-8  # of a group, below which its step does not fall


@dataclass(frozen=True)
class zero_point:
    """code = floor(x / step + point + 1/2) between 0 and the highest, decoded (code - point) * step: the step from the range, at least 1e-8, and
    point = -min / step, which is no whole number. Both in `store`, and used as they were rounded.

    As FutureMLS-Lab/OSCAR 473ff3f codes rows, in float32. fp16 is ours for its published 16 bits; a step is then never so small that the
    point of its group would not fit."""

    bits: int
    store: Literal["float32", "float16"] = "float32"

    @property
    def scale_bytes(self) -> int:
        return 2 * (4 if self.store == "float32" else 2)

    def code(self, x: Floats, group: grouped) -> tuple[Floats, int]:
        """[m, rows, d] -> what a reader decodes, same shape."""
        return group.each(self._coded, x), 0

    def _coded(self, x: Floats) -> Floats:
        top, (low, high) = 2**self.bits - 1, (f(axis=1, keepdims=True) for f in (x.min, x.max))
        least = LEAST_RANGE / top
        if self.store == "float16":
            least = np.maximum(2.0**-24, np.abs(low) / 32768)
        step = rounded(np.maximum((high - low) / top, least), self.store)
        point = rounded(-low / step, self.store)
        return (np.clip(np.floor(x / step + point + 0.5), 0, top) - point) * step


def fp16(x: Floats, what: str = "minmax: {} does not fit the fp16 zero or step of a group") -> Floats:
    """The nearest numbers of fp16. Raises WrongUse for one past 65504; what: where it was to stand, {} in the place of the largest."""
    with np.errstate(over="ignore"):
        y = x.astype(np.float16).astype(np.float64)
    if not np.isfinite(y).all():
        raise WrongUse(f"{what.format(f'{np.abs(x).max():.6g}')} (at most 65504)")
    return y
