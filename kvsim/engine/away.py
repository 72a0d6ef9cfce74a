"""Rows that live on the host or on SSD: coded, fetched when a step reads them, and never counted as held on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.sparse import ALIVE

ON_HOST, ON_SSD = 1, 2  # where a row is; 0 on the device
PLACES = (("host", ON_HOST), ("ssd", ON_SSD))

Flags = NDArray[np.uint8]


def at(flags: Flags, where: Flags | None, place: int = 0) -> Flags:
    """flags u8[N, n] of the rows at one place, 0 for those elsewhere."""
    if where is None:
        return flags if place == 0 else np.zeros_like(flags)
    return flags * (where == place)


def tokens(flags: Flags, where: Flags | None) -> NDArray[np.int64]:
    """i64[N]: live rows that are not on the device."""
    if where is None:
        return np.zeros(len(flags), np.int64)
    return (((flags & ALIVE) > 0) & (where > 0)).sum(1)


def mass(block: Any, held: Any, picked: Any) -> NDArray[np.float64]:
    """f64[N * G]: dense probability on the rows that each query head fetched, summed in the order of their positions."""
    src, group = block.source, block.group
    out = np.zeros((len(block.t), group))
    if held.where is None:
        return out.ravel()
    page = np.zeros(0, np.int64) if picked is None else picked.pages.of_slots()
    for i, where in enumerate(held.where):
        slots = np.flatnonzero((where > 0) & ((held.flags[i] & ALIVE) > 0))
        rows = slice(i * group, (i + 1) * group)
        p = np.exp2(src.bend(held.dots[slots, rows].astype(np.float64)) - block.lse[rows])
        read = 1.0 if picked is None else picked.chosen[i][:, page[slots]].T
        out[i] = np.ascontiguousarray((p * read).T).sum(1)
    return out.ravel()
