"""boxes(): a page is summarised by the min and max of its keys, in n parts; the best corner bounds every q·k from above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.boxes import bounds, corners
from kvsim.policies.parameters import Checked
from kvsim.policies.protocol import Floats, Ints, Mask, expect

LARGEST = np.finfo(np.float64).max


@dataclass(frozen=True, kw_only=True)
class boxes(metaclass=Checked):
    """`by` "order": parts of neighbours; "cluster": parts along the page's first principal component once the page is closed.

    dtype "kv" stands for the billed KV dtype, which the allocator puts in its place. A corner past the largest number of its
    dtype is unbounded (the largest float64), so its page is always a candidate. rounding "nearest" is not a bound."""

    n: int = 1
    by: Literal["order", "cluster"] = "order"
    dtype: Literal["kv", "float32", "float16", "bfloat16"] = "kv"
    rounding: Literal["outward", "nearest"] = "outward"

    def __post_init__(self) -> None:
        expect(self, "n", self.n >= 1, "1 box per page or more")

    @property
    def bound(self) -> bool:
        return self.rounding == "outward"

    def summarise(self, keys: Floats, valid: Mask, closed: Mask) -> dict[str, NDArray[Any]]:
        """keys [m, S, d], valid [m, S], closed [m] -> lo, hi [m, n, d]."""
        rows = np.argsort(~valid, axis=1, kind="stable")
        count = valid.sum(axis=1)
        if self.by == "cluster" and self.n > 1:
            for i in np.flatnonzero(closed & (count > 1)):
                mine = rows[i, : count[i]]
                rows[i, : count[i]] = mine[principal_order(keys[i, mine])]
        lo, hi = np.empty((2, len(keys), self.n, keys.shape[2]))
        corners(keys, rows, count, lo, hi)
        return {"lo": self._stored(lo, -1), "hi": self._stored(hi, +1)}

    def score(self, q: Floats, summary: dict[str, NDArray[Any]]) -> Floats:
        """q [N, Hkv, G, d], lo and hi [Hkv, P, n, d] -> [N, Hkv, G, P], unscaled."""
        lo, hi = summary["lo"], summary["hi"]
        out = np.empty((*q.shape[:3], lo.shape[1]))
        bounds(np.ascontiguousarray(q), np.ascontiguousarray(lo), np.ascontiguousarray(hi), out)
        return out

    def numbers(self, dim: int) -> int:
        return 2 * self.n * dim

    def _stored(self, x: Floats, side: int) -> Floats:
        """Low (side -1) or high (+1) corners as the dtype holds them."""
        if self.dtype == "kv":
            return x
        y = rounded(x, self.dtype)
        if self.bound:
            inside = side * y < side * x
            y[inside] = side * above(side * y[inside], self.dtype)
        return np.clip(y, -LARGEST, LARGEST)


def principal_order(keys: Floats) -> Ints:
    """[n, d] -> the rows by their projection on the first principal component, ties to the lower row.

    Its sign makes its largest entry positive."""
    centred = keys - keys.mean(axis=0)
    axis = np.linalg.svd(centred, full_matrices=False)[2][0]
    axis *= np.sign(axis[np.abs(axis).argmax()])
    return np.argsort(centred @ axis, kind="stable")


def rounded(x: Floats, dtype: str) -> Floats:
    """The nearest number of the dtype, halves to even, as float64; past its largest number: infinite."""
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return x.astype(dtype).astype(np.float64)
        bits = x.astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def above(x: Floats, dtype: str) -> Floats:
    """The next larger number of the dtype, for numbers of that dtype below infinity, of the zeros +0."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.nextafter(x.astype(dtype), np.asarray(np.inf, dtype)).astype(np.float64)
    bits = x.astype(np.float32).view(np.int32)
    step = np.int32(0x10000)
    return np.where(x >= 0, bits + step, bits - step).view(np.float32).astype(np.float64)
