"""Rows that never existed: what a chain's estimate says of evicted rows, joined to the attention over what was read (decision 0009)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.account import cosine, relative
from kvsim.engine.attend import Attended, Dense
from kvsim.engine.bank import Record
from kvsim.engine.source import Source
from kvsim.geometry import ITEMSIZE
from kvsim.kernels.dense import LOG2E
from kvsim.kernels.sparse import ALIVE, MASS
from kvsim.policies.protocol import Estimate, Sums

Columns = dict[str, Any]


class Estimated:
    """One kv head; blocks must come in order of step. Rows that leave a sliding window are not evicted, and a sum cannot let go of one that
    was: in such layers nothing is estimated."""

    def __init__(self, estimate: Estimate, source: Source, record: Record | None, head: int):
        self.estimate, self.source, self.record, self.head = estimate, source, record, head
        self.sums = estimate.empty(source.layer.key_dim, source.layer.value_dim)
        self.bytes = sum(x.size for x in self.sums.values()) * ITEMSIZE[source.layer.dtype]
        self.done = -1
        self.gone = np.zeros(source.request.total, bool)
        if record is not None and source.layer.window is None:
            self._drop(np.flatnonzero(record.start[head, : source.request.prompt] & ALIVE == 0))

    def columns(self, block: Dense, got: Attended) -> tuple[Columns, Columns]:
        """Columns [N] that are added to the ledger's, and [N * G] that stand for those of heads."""
        before, after, changed = self._over(block)
        mass, out = self.estimate.says(before, block.queries, self.source.layer.scale)
        with np.errstate(divide="ignore"):
            own = block.lse[: block.rows] + np.log2(got.sums[:, MASS] + block.sink_mass)
        weight = np.where(np.isneginf(mass.ravel()), 0.0, 1 / (1 + np.exp2(own - mass.ravel() * LOG2E)))
        joined = (1 - weight)[:, None] * got.out + weight[:, None] * out.reshape(block.rows, -1)
        there = (before["n"] > 0, after["n"] > 0)
        ledger = {
            "meta_bytes": there[0] * self.bytes,
            "meta_resident_bytes": there[1] * self.bytes,
            "write_bytes": changed * self.bytes,
        }
        heads = {
            "rel_l2": relative(joined, block.out),
            "cosine": cosine(joined, block.out),
            "rel_l2_without": relative(got.out, block.out),
            "mass_estimated": weight,
        }
        return ledger, heads

    def _over(self, block: Dense) -> tuple[Sums, Sums, NDArray[np.bool_]]:
        """Sums [N, ...] at the attention of each step and after its cut, and whether that cut changed them."""
        before, after, changed = [], [], np.zeros(len(block.index), bool)
        for i, at in enumerate(block.index.tolist()):
            self._until(at - 1)
            before.append(self.sums)
            changed[i] = self._until(at)
            after.append(self.sums)
        return _stacked(before), _stacked(after), changed

    def _until(self, step: int) -> bool:
        """With the cuts up to the step at place `step`; whether one dropped a row."""
        dropped = False
        while self.done < step:
            self.done += 1
            if self.record is None or self.source.layer.window is not None:
                continue
            for h, pos, flags in self.record.changes[self.done]:
                new = pos[(flags & ALIVE == 0) & ~self.gone[pos]]
                if h == self.head and len(new):
                    self._drop(new)
                    dropped = True
        return dropped

    def _drop(self, pos: NDArray[np.int64]) -> None:
        if len(pos):
            self.gone[pos] = True
            keys, values = (self.source.rows(side, self.head, pos) for side in "kv")
            self.sums = self.estimate.add(self.sums, keys.astype(np.float64), values.astype(np.float64))


def _stacked(sums: list[Sums]) -> Sums:
    return {name: np.stack([x[name] for x in sums]) for name in sums[0]}
