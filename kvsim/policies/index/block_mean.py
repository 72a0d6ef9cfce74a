"""block_mean(): a page is summarised by the mean of its keys; an estimate, not a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.boxes import bounds
from kvsim.kernels.rounding import stored
from kvsim.policies.parameters import Checked
from kvsim.policies.protocol import Floats, Mask


@dataclass(frozen=True, kw_only=True)
class block_mean(metaclass=Checked):
    """q·mean is the mean of the page's logits: a page with one token that matters among many that do not looks like any other. Half the
    bytes of a box. keys "recon": over the keys as a store decodes them."""

    act: ClassVar[str] = "estimates q·k by the mean of the page's keys; no bound"
    paper: ClassVar[str] = "Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, arXiv 2502.13189"

    dtype: Literal["kv", "float32", "float16", "bfloat16", "fp8"] = "kv"
    keys: Literal["exact", "recon"] = "exact"

    bound: ClassVar[bool] = False

    def summarise(self, keys: Floats, valid: Mask, closed: Mask) -> dict[str, NDArray[Any]]:
        """keys [m, S, d], valid [m, S] -> mean [m, d]."""
        mean = np.where(valid[..., None], keys, 0.0).sum(axis=1) / np.maximum(valid.sum(axis=1), 1)[:, None]
        return {"mean": mean if self.dtype == "kv" else stored(mean, self.dtype, 0)}

    def score(self, q: Floats, summary: dict[str, NDArray[Any]]) -> Floats:
        """q [N, Hkv, G, d], mean [Hkv, P, d] -> [N, Hkv, G, P], unscaled."""
        mean = np.ascontiguousarray(summary["mean"])[:, :, None]
        out = np.empty((*q.shape[:3], mean.shape[1]))
        bounds(np.ascontiguousarray(q), mean, mean, out)  # a box without width: sums in a fixed order
        return out

    def numbers(self, dim: int) -> int:
        return dim
