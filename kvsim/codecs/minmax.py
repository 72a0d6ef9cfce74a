"""Asymmetric min-max integers: code = round((x - zero) / step), zero and step kept in fp16 and used as they were rounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.coded import Coded, padded_bits
from kvsim.errors import WrongUse
from kvsim.kernels.quantize import roundtrip

Floats = NDArray[np.float64]
SCALE_BYTES = 4  # zero and step, fp16 each


@dataclass(frozen=True)
class minmax:
    """`axis` "tokens": one scale per channel over `group` tokens; "channels": per token over `group` channels, the last may
    be short. group None: the whole axis, all rows that are coded at once. pack: bits of the words that hold the codes of one group.
    Raises WrongUse when a zero or a step does not fit fp16."""

    bits: int
    axis: str
    group: int | None = None
    pack: int = 1

    @property
    def tokens(self) -> int:
        """Rows that are encoded together; 0: all that are coded at once."""
        return (self.group or 0) if self.axis == "tokens" else 1

    def encode(self, x: Floats) -> Coded:
        """[m, rows, d] -> what is stored of it; rows of a layout but for the padding of words along tokens, which the group pays."""
        _, rows, dim = x.shape
        bits, scales = self.layout(dim)
        padding = dim * (padded_bits(rows * self.bits, self.pack) - rows * self.bits) // 8 if self.axis == "tokens" else 0
        return Coded.even(self.roundtrip(x), bits, group_meta=scales + padding)

    def roundtrip(self, x: Floats) -> Floats:
        """[m, rows, d], m groups of rows -> what a reader decodes, same shape."""
        return self._by_group(self._coded, x)

    def error(self, x: Floats) -> Floats:
        """[m, rows, d] -> how far decoding can move each number, same shape: half a step, or more where the rounded zero and step leave
        the ends of the group outside."""
        return self._by_group(self._reach, x)

    def layout(self, dim: int) -> tuple[int, int]:
        """-> (bits of codes per row, bytes of zeros and steps per group of rows)."""
        if self.axis == "tokens":
            return dim * self.bits, SCALE_BYTES * dim
        group = self.group or dim
        words = [padded_bits(min(group, dim - c) * self.bits, self.pack) for c in range(0, dim, group)]
        return sum(words), SCALE_BYTES * len(words)

    def _by_group(self, what: Callable[[Floats], Floats], x: Floats) -> Floats:
        if self.axis == "tokens":
            return what(x)
        m, rows, dim = x.shape
        flat, group = x.reshape(m * rows, dim, 1), self.group or dim
        if dim % group == 0:
            return what(flat.reshape(-1, group, 1)).reshape(x.shape)
        return np.concatenate([what(flat[:, c : c + group]) for c in range(0, dim, group)], axis=1).reshape(x.shape)

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

    def _reach(self, x: Floats) -> Floats:
        low, high = x.min(axis=1), x.max(axis=1)
        zero, step = self._scale(low, high)
        outside = np.maximum(zero - low, high - (zero + step * self._top))
        return np.broadcast_to(np.maximum(step / 2, outside)[:, None], x.shape)

    def _scale(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """The ends [a, b] of each group -> zero and step."""
        return fp16(low), fp16((high - low) / self._top)


def fp16(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        y = x.astype(np.float16).astype(np.float64)
    if not np.isfinite(y).all():
        raise WrongUse(f"minmax: {np.abs(x).max():.6g} does not fit the fp16 zero or step of a group (at most 65504)")
    return y
