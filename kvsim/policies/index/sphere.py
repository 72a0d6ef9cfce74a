"""sphere(): a page is summarised by a centre and the distance of its farthest key; q·centre + |q| radius bounds every q·k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.boxes import bounds, corners, rows_of
from kvsim.kernels.rounding import stored
from kvsim.policies.parameters import Checked
from kvsim.policies.protocol import Floats, Mask


@dataclass(frozen=True, kw_only=True)
class sphere(metaclass=Checked):
    """The centre is that of the page's box, rounded towards zero to a number of the dtype; the radius is measured from there and rounded
    up, so the score is a bound in every dtype. keys "recon": around the keys as a store decodes them."""

    act: ClassVar[str] = "bounds q·k by a centre and a radius"

    dtype: Literal["kv", "float32", "float16", "bfloat16", "fp8"] = "kv"
    keys: Literal["exact", "recon"] = "exact"

    bound: ClassVar[bool] = True

    def summarise(self, keys: Floats, valid: Mask, closed: Mask) -> dict[str, NDArray[Any]]:
        """keys [m, S, d], valid [m, S] -> centre [m, d], radius [m]."""
        centre = middle(keys, valid)
        if self.dtype != "kv":
            centre = np.copysign(stored(np.abs(centre), self.dtype, -1), centre)
        far = np.sqrt(((keys - centre[:, None]) ** 2).sum(axis=-1))
        radius = np.where(valid, far, 0.0).max(axis=1)
        return {"centre": centre, "radius": radius if self.dtype == "kv" else stored(radius, self.dtype, 1)}

    def score(self, q: Floats, summary: dict[str, NDArray[Any]]) -> Floats:
        """q [N, Hkv, G, d], centre [Hkv, P, d], radius [Hkv, P] -> [N, Hkv, G, P], unscaled."""
        centre, radius = np.ascontiguousarray(summary["centre"])[:, :, None], summary["radius"]
        out = np.empty((*q.shape[:3], centre.shape[1]))
        bounds(np.ascontiguousarray(q), centre, centre, out)
        with np.errstate(over="ignore"):  # an unbounded radius
            return out + np.sqrt((q * q).sum(axis=-1))[..., None] * radius[:, None]

    def numbers(self, dim: int) -> int:
        return dim + 1


def middle(keys: Floats, valid: Mask) -> Floats:
    """keys [m, S, d], valid [m, S] -> the centres of their boxes, [m, d]."""
    lo, hi = np.empty((2, len(keys), 1, keys.shape[2]))
    corners(keys, keys, *rows_of(valid), lo, hi)
    return (lo[:, 0] + hi[:, 0]) / 2
