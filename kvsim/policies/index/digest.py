"""digest(): a page is summarised by a box as wide as its keys stray from the middle on average; an estimate, not a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.boxes import bounds
from kvsim.kernels.rounding import stored
from kvsim.policies.index.sphere import middle
from kvsim.policies.parameters import Checked
from kvsim.policies.protocol import Floats, Mask


@dataclass(frozen=True, kw_only=True)
class digest(metaclass=Checked):
    """The middle of the page's box plus and minus the mean distance of its keys from there, per channel, rounded to the nearest number of
    the dtype. keys "recon": over the keys as a store decodes them."""

    act: ClassVar[str] = "estimates q·k by a box as wide as keys stray on average; no bound"
    paper: ClassVar[str] = (
        "Chen et al., ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction, NeurIPS 2024"
    )

    dtype: Literal["kv", "float32", "float16", "bfloat16", "fp8"] = "kv"
    keys: Literal["exact", "recon"] = "exact"

    bound: ClassVar[bool] = False

    def summarise(self, keys: Floats, valid: Mask, closed: Mask) -> dict[str, NDArray[Any]]:
        """keys [m, S, d], valid [m, S] -> lo, hi [m, d]."""
        centre = middle(keys, valid)
        stray = (
            np.where(valid[..., None], np.abs(keys - centre[:, None]), 0.0).sum(axis=1)
            / np.maximum(valid.sum(axis=1), 1)[:, None]
        )
        lo, hi = centre - stray, centre + stray
        return {"lo": lo, "hi": hi} if self.dtype == "kv" else {"lo": stored(lo, self.dtype, 0), "hi": stored(hi, self.dtype, 0)}

    def score(self, q: Floats, summary: dict[str, NDArray[Any]]) -> Floats:
        """q [N, Hkv, G, d], lo and hi [Hkv, P, d] -> [N, Hkv, G, P], unscaled."""
        lo, hi = (np.ascontiguousarray(summary[side])[:, :, None] for side in ("lo", "hi"))
        out = np.empty((*q.shape[:3], lo.shape[1]))
        bounds(np.ascontiguousarray(q), lo, hi, out)
        return out

    def numbers(self, dim: int) -> int:
        return 2 * dim
