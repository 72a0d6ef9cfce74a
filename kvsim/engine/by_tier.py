"""Attention by what a token is to the policy: a sink, recent, or of the history full, coded or on the host; and the output without each.

Softmax sums add up, so one pass over what was read, cut into classes, gives the output that is left when any class is taken away."""

from __future__ import annotations

from collections.abc import Iterator
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

Dots = NDArray[np.float32]
CLASSES = ("sinks", "recent", "full", "coded", "host")
SINKS, RECENT, FULL, CODED, HOST = range(5)


def ends(chain: Chain) -> tuple[int, int]:
    """(sinks, recent) in tokens: the keep's own parameters of these names, else 4 and 64. A `recent` that is a share counts as none."""
    keep = chain.part("keep")
    sinks, recent = getattr(keep, "sinks", HEAD_TOKENS), getattr(keep, "recent", NEAR_TOKENS)
    return sinks, recent if isinstance(recent, int) else NEAR_TOKENS


def classes(held: Held, t: NDArray[np.int64], sinks: int, recent: int) -> NDArray[np.uint8]:
    """u8[N, n]: the class of every slot at every step. What is coded or on the host is that wherever it stands; of the rest a sink is a sink,
    though it be recent."""
    out = np.where(held.pos > t[:, None] - recent, RECENT, FULL)
    out = np.where(held.pos < sinks, SINKS, out)
    out = np.where(held.flags & KEY_CODED, CODED, out)
    return np.where(held.where > 0, HOST, out).astype(np.uint8) if held.where is not None else out.astype(np.uint8)


def by_tier(chain: Chain, block: Dense, held: Held, picked: Picked | None, record: Record) -> dict[str, Any]:
    """Columns [N * G] of the by_tier table. held_CLASS, read_CLASS: dense probability on tokens held, on tokens read; own_CLASS: own
    probability; without_CLASS: relative L2 error of the output when the class is left out of what was read (null where none of it was)."""
    sinks, recent = ends(chain)
    sums, out, rest = _split(block, held, picked, record, classes(held, block.t, sinks, recent))
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


def _split(
    block: Dense, held: Held, picked: Picked | None, record: Record, of: NDArray[np.uint8]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """What kernels.by_tier.split sums, over runs of steps in which codes decode to the same rows."""
    src, shape = block.source, (block.rows, len(CLASSES))
    page, chosen = what_was_read(block, held, picked)
    values = src.whole("v", block.head)
    sums, out, rest = np.zeros((*shape, 3)), np.zeros((*shape, src.layer.value_dim)), np.empty(block.rows)
    for steps, part, dots, blurred in decodings(block, held, record):
        at = int(block.index[steps.start])
        blurred_values = record.decoded_at("v", block.head, at) if "v" in record.decoded else values
        split(
            dots, blurred, values, blurred_values, held.pos, held.flags[steps], of[steps], page, chosen[steps],
            np.float32(src.unit), np.float32(src.cap), block.lse[part], block.sink[part], sums[part], out[part], rest[part],
        )  # fmt: skip
    return sums, out, rest


def what_was_read(block: Dense, held: Held, picked: Picked | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(i64[n]: the page of each slot, bool[N, G, P]: the pages read); without pages all that is held, on a grid of its own."""
    if picked is not None:
        return picked.pages.of_slots(), picked.chosen
    pages = pages_of(held.pos, CHUNK)
    return pages.of_slots(), np.repeat((pages.rows(held.flags) > 0)[:, None], block.group, 1)


def decodings(block: Dense, held: Held, record: Record) -> Iterator[tuple[slice, slice, Dots, Dots]]:
    """Runs of steps in which codes decode to the same rows: steps, their query rows, dot products with keys as captured and as decoded."""
    whole = [slice(0, len(block.t))]
    for steps in record.versions(block.head, block.index) if record.key_group is not None else whole:
        part = slice(steps.start * block.group, steps.stop * block.group)
        blurred = decoded_dots(block, held, record, int(block.index[steps.start]))
        yield steps, part, np.ascontiguousarray(held.dots[:, part]), np.ascontiguousarray(blurred[:, part])
