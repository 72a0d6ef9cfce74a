"""What an encoding made of rows, and what of it is to be billed: the way from any number format to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.geometry import Layer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Coded:
    """m groups of rows as they are stored.

    values [m, rows, d]: what a reader decodes; bits [m, rows]: codes and outliers of each row; row_meta [m, rows]: bytes of scales, zeros
    and pointers of a row's own; group_meta [m]: bytes of what a group shares, padding included."""

    values: Floats
    bits: Ints
    row_meta: Ints
    group_meta: Ints

    @classmethod
    def even(cls, values: Floats, bits: int, row_meta: int = 0, group_meta: int = 0) -> Coded:
        """Rows that all cost the same."""
        m, rows, _ = values.shape
        return cls(values, np.full((m, rows), bits), np.full((m, rows), row_meta), np.full(m, group_meta))


def encode(codec: Any, x: Floats) -> Coded:
    """x [m, rows, d] by a codec of either kind: one that says what every row costs, or one of a fixed layout."""
    if hasattr(codec, "encode"):
        coded: Coded = codec.encode(x)
        return coded
    bits, group_meta = codec.layout(x.shape[-1])
    return Coded.even(codec.roundtrip(x), bits, group_meta=group_meta)


def nominal_bits(codec: Any, dim: int) -> int:
    """Bits of a row's codes as the method is spoken of: without scales, outliers and padding."""
    return codec.bits * dim if hasattr(codec, "bits") else codec.layout(dim)[0]


def levels(codec: Any) -> tuple[Any, ...]:
    """The widths of one side of a cache: none, one codec, or several."""
    return () if codec is None else codec if isinstance(codec, tuple) else (codec,)


def for_head(codec: Any, layer: Layer, head: int) -> Any:
    """The codec as a kv head of a layer uses it: a calibrated one has numbers of its own there. Raises WrongUse where it has none."""
    return codec.at(layer, head) if hasattr(codec, "at") else codec


def padded_bits(bits: int, unit: int) -> int:
    """Bits rounded up to whole units of memory."""
    return -(-bits // unit) * unit
