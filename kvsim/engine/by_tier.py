"""Attention by what a token is to the policy: a sink, recent, or of the history full, coded or on the host; and the output without each.

Softmax sums add up, so one pass over what was read, cut into classes, gives the output that is left when any class is taken away."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.account import relative
from kvsim.engine.attend import HEAD_TOKENS, NEAR_TOKENS, Dense, Held, decoded_dots
from kvsim.engine.bank import Record
from kvsim.engine.pages import CHUNK, pages_of
from kvsim.engine.reads import Picked
from kvsim.kernels.by_tier import HELD, READ, WEIGHT, split
from kvsim.kernels.sparse import KEY_CODED
from kvsim.policies.protocol import Chain

CLASSES = ("sinks", "recent", "full", "coded", "host")
SINKS, RECENT, FULL, CODED, HOST = range(5)


def ends(chain: Chain) -> tuple[int, int]:
    """(sinks, recent) in tokens: the keep's own parameters of these names, else 4 and 64. A `recent` that is a share counts as none."""
    keep = chain.part("keep")
    sinks, recent = getattr(keep, "sinks", HEAD_TOKENS), getattr(keep, "recent", NEAR_TOKENS)
    return sinks, recent if isinstance(recent, int) else NEAR_TOKENS


def classes(held: Held, t: NDArray[np.int64], sinks: int, recent: int) -> NDArray[np.uint8]:
    """u8[N, n]: the class of every slot at every step. What is coded is coded wherever it stands; of the rest a sink is a sink, though it be
    recent."""
    out = np.where(held.pos > t[:, None] - recent, RECENT, FULL)
    out = np.where(held.pos < sinks, SINKS, out)
    return np.where(held.flags & KEY_CODED, CODED, out).astype(np.uint8)


def by_tier(chain: Chain, block: Dense, held: Held, picked: Picked | None, record: Record | None) -> dict[str, Any]:
    """Columns [N * G] of the by_tier table. held_CLASS, read_CLASS: dense probability on tokens held, on tokens read; own_CLASS: own
    probability; without_CLASS: relative L2 error of the output when the class is left out of what was read (null where none of it was)."""
    src, rows, dim = block.source, block.rows, block.source.layer.value_dim
    pages = picked.pages if picked else pages_of(held.pos, CHUNK)
    chosen = picked.chosen if picked else np.repeat((pages.rows(held.flags) > 0)[:, None], block.group, 1)
    values = src.whole("v", block.head)
    blurred, blurred_values = held.dots, values
    if record is not None and record.key_group is not None:
        blurred = decoded_dots(block, held, record)
        blurred_values = record.decoded["v"][block.head] if "v" in record.decoded else values
    sinks, recent = ends(chain)
    sums, out, rest = np.zeros((rows, len(CLASSES), 3)), np.zeros((rows, len(CLASSES), dim)), np.empty(rows)
    split(
        held.dots, blurred, values, blurred_values, held.pos, held.flags, classes(held, block.t, sinks, recent), pages.of_slots(), chosen,
        np.float32(src.unit), np.float32(src.cap), block.lse, block.sink, sums, out, rest,
    )  # fmt: skip
    found: dict[str, Any] = {"sinks": sinks, "recent": recent}
    whole = sums[:, :, WEIGHT].sum(1) + rest
    for c, name in enumerate(CLASSES):
        others = [x for x in range(len(CLASSES)) if x != c]
        left = sums[:, others, WEIGHT].sum(1) + rest
        without = out[:, others].sum(1) / np.where(left > 0, left, 1.0)[:, None]  # nothing left: an output of zero
        found |= {
            f"held_{name}": sums[:, c, HELD],
            f"read_{name}": sums[:, c, READ],
            f"own_{name}": sums[:, c, WEIGHT] / whole,
            f"without_{name}": np.where(sums[:, c, WEIGHT] > 0, relative(without, block.out), np.nan),
        }
    return found
