"""A block of draft tokens is verified at once: a set of pages for every position of it, or one for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.attend import Dense, Past, blocks, steps_per_block, truth_of
from kvsim.engine.reads import Picked, Reader
from kvsim.engine.run import Job
from kvsim.engine.source import Source
from kvsim.errors import WrongUse
from kvsim.policies import allocate
from kvsim.policies.parameters import written
from kvsim.policies.protocol import Chain
from kvsim.policies.rules import Rule

SETS = ("position", "first", "block")

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ranked:
    """All captured steps of one kv head. chosen bool[N, G, P]: the set of each step; score f64[N, G, P]; exists, forced bool[N, P];
    mass f64[N, G, P]: dense probability; ids i64[P]."""

    chosen: Mask
    score: Floats
    exists: Mask
    forced: Mask
    mass: Floats
    ids: Ints


def drafted(source: Source, job: Job, block: int) -> list[dict[str, Any]]:
    """Parts of columns: kv_head, step (the first of `block` consecutive decode steps), sets, and what `replay.drafts.drafted` says.

    Blocks follow one another from the first captured step; what is left of fewer steps, or has gaps, is left out.
    Raises WrongUse for a policy that does not keep everything exactly, ranks no pages, or decides their number or its sets otherwise."""
    chain = allocate.for_layer(job.chain, source.layer)
    if job.chain.part("read").read is not None and chain.part("read").read is None:
        return []  # read whole by rule: there is nothing to choose
    _check(chain)
    starts = [
        i for i in range(0, len(source.steps) - block + 1, block) if source.steps[i + block - 1] - source.steps[i] == block - 1
    ]
    parts = []
    for head in range(source.layer.kv_heads) if job.heads is None else job.heads:
        reader = Reader(chain.part("read"), source, head, steps_per_block(source.layer.group))
        ranked = _ranked(source, reader)
        parts += [_columns(source, reader, ranked, slice(i, i + block)) for i in starts]
    return parts


def _check(chain: Chain) -> None:
    read = chain.part("read")
    if read.page is None or read.read is None or isinstance(read.read, Rule) or read.refresh != 1:
        raise WrongUse(
            f"{written(read)}: a block of drafts needs a read of a fixed budget that ranks pages at every step (refresh=1)"
        )
    if chain.part("keep").hold is not None or chain.codecs is not None:
        raise WrongUse(
            " >> ".join(map(written, chain.parts)) + ": a block of drafts is told of policies that keep every row exact: full()"
        )


def _ranked(source: Source, reader: Reader) -> Ranked:
    size = int(reader.read.page)
    past, found = Past(source, None, reader.head), []
    for index in blocks(source, np.arange(len(source.steps))):
        dense = Dense(source, reader.head, index, keep=False)
        held = past.held(dense)
        truth = truth_of(dense, held, None, reader.read.index)
        picked: Picked = reader.pick(source.steps[index], dense.t, held.pos, held.flags, dense.queries, truth)
        mass = dense.page_mass(size)[:, picked.pages.id].reshape(picked.chosen.shape)
        found.append((picked.chosen, picked.score, picked.rows > 0, picked.forced, mass))
    chosen, score, exists, forced, mass = (np.concatenate(x) for x in zip(*found, strict=True))
    return Ranked(chosen, score, exists, forced, mass, picked.pages.id)


def _columns(source: Source, reader: Reader, ranked: Ranked, at: slice) -> dict[str, Any]:
    t, lay, size = source.t[at], source.layer, int(reader.read.page)
    low, high = lay.first_visible(int(t[0])), int(t[-1]) + 1  # what some position of the block sees
    rows = np.minimum((ranked.ids + 1) * size, high) - np.maximum(ranked.ids * size, low)
    told: dict[str, list[Any]] = {}
    for chosen in sets_of(reader, ranked, at, t).values():
        recall, union = (ranked.mass[at] * chosen).sum(-1), np.flatnonzero(chosen.any((0, 1)))
        row = {
            "mass_recall": recall.mean(),
            "mass_recall_min": recall.min(),
            "mass_recall_last": recall[-1].mean(),
            "read_pages": chosen.sum(-1).mean(),
            "union_pages": len(union),
            "read_bytes": int(rows[union].sum()) * lay.row_bytes,
        }
        for name, x in row.items():
            told.setdefault(name, []).append(x)
    return {"kv_head": reader.head, "step": int(source.steps[at][0]), "sets": list(SETS)} | told


def sets_of(reader: Reader, ranked: Ranked, at: slice, t: Ints) -> dict[str, Mask]:
    """{one of SETS: bool[n, G, P]} of the positions t of one block."""
    exists, n = ranked.exists[at], len(t)
    own = ranked.chosen[at]
    young = ranked.ids * int(reader.read.page) > t[0]  # began after the ranking of the first position
    first = (own[:1] | young) & exists[:, None]
    visible = int(t[-1]) + 1 - reader.source.layer.first_visible(int(t[-1]))
    one, _ = reader.choose(
        ranked.score[at].max(0, keepdims=True),
        np.asarray(exists.any(0, keepdims=True)),
        np.asarray(ranked.forced[at].any(0, keepdims=True)),
        reader.to_pages(reader.read.read, np.array([visible])),
    )
    return {"position": own, "first": first, "block": np.repeat(one, n, 0) & exists[:, None]}
