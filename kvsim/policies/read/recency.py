"""recency(): the newest pages; a baseline that looks at nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsim.policies.protocol import Floats, Read, View


@dataclass(frozen=True, kw_only=True)
class recency(Read):
    act = "reads the newest pages"

    def score(self, view: View) -> Floats:
        shape = (*view.q.shape[:3], view.page.shape[1])
        return np.broadcast_to(view.page[:, None].astype(np.float64), shape)
