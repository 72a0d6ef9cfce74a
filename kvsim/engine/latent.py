"""One row of a layer that all its kv heads share, as latents are: it is resident while any head holds it, and read when any head reads it.

Heads that choose alike share every row, and each pays its part. What their union has beyond that is billed on the first of them, so that the
layer's bytes are those of the rows that a cache of latents would hold and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, Held
from kvsim.engine.reads import Picked
from kvsim.engine.source import Source
from kvsim.kernels.sparse import ALIVE

Columns = dict[str, Any]
BYTES = ("resident_bytes", "read_bytes", "page_bytes", "write_bytes")


class Shared:
    """Which rows and pages any head held or read, and how many all of them did together, step by step."""

    def __init__(self, source: Source, pages: int) -> None:
        steps, self.row = len(source.steps), source.layer.row_bytes
        self.whole = source.layer.shared_row_bytes or 0
        self.any = {
            name: np.zeros((steps, n), bool) for name, n in zip(BYTES, (source.request.total,) * 2 + (pages, 1), strict=True)
        }
        self.sum = {name: np.zeros(steps, np.int64) for name in BYTES}
        self.step = source.steps

    def add(self, dense: Dense, held: Held, picked: Picked | None) -> None:
        """A block of steps of one kv head."""
        live: NDArray[np.bool_] = (held.flags & np.uint8(ALIVE)).astype(bool)
        after: NDArray[np.bool_] = (held.after & np.uint8(ALIVE)).astype(bool)
        self._add("resident_bytes", dense, held.pos, after)
        self._add("write_bytes", dense, np.zeros(1, np.int64), np.ones((len(dense.t), 1), bool))
        if picked is None:
            self._add("read_bytes", dense, held.pos, live)
            return
        chosen = np.asarray(picked.chosen.any(1))
        self._add("read_bytes", dense, held.pos, live & chosen[:, picked.pages.of_slots()])
        self._add("page_bytes", dense, picked.pages.id, chosen)

    def _add(self, name: str, dense: Dense, columns: NDArray[np.int64], there: NDArray[np.bool_]) -> None:
        self.any[name][np.ix_(dense.index, columns)] |= there
        self.sum[name][dense.index] += there.sum(1)

    def bill(self, parts: Sequence[Columns], page_rows: int) -> None:
        """Adds to the ledger of the first kv head what the rows of the layer cost beyond the parts of all heads."""
        first = min(part["kv_head"] for part in parts)
        for part in (p for p in parts if p["kv_head"] == first):
            at = np.searchsorted(self.step, part["step"])
            for name in (n for n in BYTES if part[n] is not None):
                union, rows = self.any[name].sum(1)[at], page_rows if name == "page_bytes" else 1
                part[name] = part[name] + (union * self.whole - self.sum[name][at] * self.row) * rows
