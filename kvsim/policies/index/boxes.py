"""boxes(): a page is summarised by the min and max of its keys, in n parts; the best corner bounds every q·k from above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import WrongUse
from kvsim.kernels import rotate
from kvsim.kernels.boxes import bounds, corners, rows_of
from kvsim.kernels.rounding import holds, stored
from kvsim.policies.parameters import Checked
from kvsim.policies.protocol import Floats, Mask, expect


@dataclass(frozen=True, kw_only=True)
class boxes(metaclass=Checked):
    """`by` "order": parts of neighbours; "cluster": parts along the page's first principal component once the page is closed.

    dtype "kv" stands for the billed KV dtype, which the allocator puts in its place. A corner past the largest number of its
    dtype is unbounded, so its page is always a candidate. rounding "nearest" is not a bound. keys: what the boxes enclose, the keys as
    captured, as a store decodes them ("recon"), or as captured and widened by how far decoding can move them ("expanded").
    rotate: the basis in which they are axis-parallel."""

    act: ClassVar[str] = "bounds q·k by the smallest and largest key of a page per channel"
    paper: ClassVar[str] = "Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774"

    n: int = 1
    by: Literal["order", "cluster"] = "order"
    dtype: Literal["kv", "float32", "float16", "bfloat16", "fp8"] = "kv"
    rounding: Literal["outward", "nearest"] = "outward"
    keys: Literal["exact", "recon", "expanded"] = "exact"
    rotate: Literal["none", "hadamard", "pca", "random"] = "none"

    def __post_init__(self) -> None:
        expect(self, "n", self.n >= 1, "1 box per page or more")

    @property
    def bound(self) -> bool:
        return self.rounding == "outward"

    def check(self, dim: int) -> None:
        if self.rotate == "hadamard" and dim & (dim - 1):
            raise WrongUse(
                f'boxes(rotate="hadamard"): keys have {dim} dimensions, expected a power of two; "pca" and "random" take any'
            )

    @property
    def fit(self) -> Callable[[Floats], dict[str, NDArray[Any]]] | None:
        """keys [n, d] of a prompt -> the basis [d, d] for all the pages of its request; None: the same for all requests."""
        return (lambda keys: {"basis": rotate.principal(keys)}) if self.rotate == "pca" else None

    def summarise(
        self, keys: Floats, valid: Mask, closed: Mask, *, error: Floats | None = None, basis: Floats | None = None
    ) -> dict[str, NDArray[Any]]:
        """keys [m, S, d], valid [m, S], closed [m] -> lo, hi [m, n, d]. error [m, S, d]: how far each key may lie from what is read."""
        rows, count = rows_of(valid)
        if self.by == "cluster" and self.n > 1:
            for i in np.flatnonzero(closed & (count > 1)):
                mine = rows[i, : count[i]]
                rows[i, : count[i]] = mine[principal_order(keys[i, mine])]
        if self.rotate != "none":
            basis = self._basis(keys.shape[2]) if basis is None else basis
            keys = rotate.turned(keys, basis)
            error = None if error is None else rotate.turned(error, np.abs(basis))
        low, high = (keys, keys) if error is None else (keys - error, keys + error)
        both = np.empty((2, len(keys), self.n, keys.shape[2]))
        corners(low, high, rows, count, *both)
        lo, hi = both if self.dtype == "kv" or holds(self.dtype, both) else self._stored(*both)
        return {"lo": lo, "hi": hi}

    def score(self, q: Floats, summary: dict[str, NDArray[Any]]) -> Floats:
        """q [N, Hkv, G, d], lo and hi [Hkv, P, n, d], basis [Hkv, d, d] -> [N, Hkv, G, P], unscaled."""
        lo, hi = summary["lo"], summary["hi"]
        if self.rotate != "none":
            bases = summary["basis"] if "basis" in summary else [self._basis(q.shape[3])] * q.shape[1]
            q = np.stack([rotate.turned(q[:, h], basis) for h, basis in enumerate(bases)], axis=1)
        out = np.empty((*q.shape[:3], lo.shape[1]))
        bounds(np.ascontiguousarray(q), np.ascontiguousarray(lo), np.ascontiguousarray(hi), out)
        return out

    def numbers(self, dim: int) -> int:
        return 2 * self.n * dim

    def once(self, dim: int) -> int:
        """A Hadamard transform needs no matrix."""
        return dim * dim if self.rotate in ("pca", "random") else 0

    def _basis(self, dim: int) -> Floats:
        assert self.rotate in ("hadamard", "random"), "a basis of its own is fitted first"
        return rotate.hadamard(dim) if self.rotate == "hadamard" else rotate.drawn(dim)

    def _stored(self, lo: Floats, hi: Floats) -> tuple[Floats, Floats]:
        """Corners as the dtype holds them."""
        outward = int(self.bound)
        return stored(lo, self.dtype, -outward), stored(hi, self.dtype, outward)


def principal_order(keys: Floats) -> NDArray[np.int64]:
    """[n, d] -> the rows by their projection on the first principal component, ties to the lower row.

    Its sign makes its largest entry positive."""
    centred = keys - keys.mean(axis=0)
    axis = np.linalg.svd(centred, full_matrices=False)[2][0]
    axis *= np.sign(axis[np.abs(axis).argmax()])
    return np.argsort(centred @ axis, kind="stable")
