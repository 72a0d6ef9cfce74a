"""Is what a model did plain attention over what it was seen to attend to?"""

from __future__ import annotations

import numpy as np
import torch

from kvsim.capture.bits import raw
from kvsim.geometry import Layer
from kvsim.trace.bits import widen
from kvsim.trace.reference import attend


def distance(
    layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, read: torch.Tensor | None = None
) -> float:
    """Relative error of outputs against softmax(scale q k) v in float64, of the worst kv head; to be held against
    `kvsim.trace.check.OUT`. q and out [Hq, n, d], k and v [Hkv, n, d], of the first n tokens of a text; read bool[n, n]:
    what each query may read (None: all)."""
    queries, keys, values, found = (widen(raw(x)) for x in (q, k, v, out))
    errors, shown = [], None if read is None else read.cpu().numpy()
    for h in range(layer.kv_heads):
        heads = slice(h * layer.group, (h + 1) * layer.group)
        mine = attend(queries[heads].swapaxes(0, 1), np.arange(queries.shape[1]), keys[h], layer, h, shown)[0] @ values[h]
        errors.append(np.linalg.norm(mine - found[heads].swapaxes(0, 1)) / max(float(np.linalg.norm(mine)), 1e-300))
    return float(np.max(errors))
