"""Speculative decoding over a trace: what one set of pages for a block of drafts loses, and what boxes that are not scanned again cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from kvsim.engine import drafts
from kvsim.engine.source import Source
from kvsim.errors import WrongUse
from kvsim.paging import Pool, inflation
from kvsim.replay.asked import AnyPolicy, chosen, jobs_of, resolve
from kvsim.replay.lanes import source_for, source_of
from kvsim.replay.needs import check_needs
from kvsim.trace.open import Trace, open_trace

UNIT = {"request": pl.Int32, "layer": pl.Int16, "kv_head": pl.Int16}


def drafted(
    trace: Trace | str | Path,
    policy: AnyPolicy,
    block: int,
    *,
    layers: Iterable[int] | None = None,
    requests: Iterable[int] | None = None,
    kv_dtype: str | None = None,
) -> pl.DataFrame:
    """A read policy over blocks of `block` consecutive decode steps that are verified together -> request, layer, kv_head, step (the
    first of the block), sets, and for each kind of sets:

    mass_recall, _min, _last: dense probability on what was read, meaned over positions and query heads; the least of them; meaned over the
    heads of the last position · read_pages: of a query head at a position, meaned · union_pages: different pages of the whole block and
    group · read_bytes: their rows, each loaded once.

    sets "position": every position its own, as in a replay; "first": that of the first position and pages begun since; "block": one by the
    largest score that any position gives a page, with the budget of the last. Every position sees only its own past in them.
    Raises WrongUse for a policy without a fixed read budget over full()."""
    if block < 2:
        raise WrongUse(f"a block of {block} drafts: expected 2 or more")
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    asked = resolve(opened, policy, layers=layers, requests=requests, kv_dtype=kv_dtype)
    check_needs(opened, asked)
    numbers = dict.fromkeys(("mass_recall", "mass_recall_min", "mass_recall_last", "read_pages"), pl.Float64)
    schema = UNIT | {"step": pl.Int32, "sets": pl.String} | numbers | {"union_pages": pl.Int32, "read_bytes": pl.Int64}
    frames = [pl.DataFrame(schema=schema)]
    for request in asked.requests:
        for layer in asked.layers:
            jobs = jobs_of(asked.entries[0].policy, layer)
            _, source = source_for(opened, request, layer, [job.chain for job in jobs])
            with threadpool_limits(1, user_api="blas"):
                parts = [part for job in jobs for part in drafts.drafted(source, job, block)]
            at = {"request": request.id, "layer": layer.id}
            frames += [pl.DataFrame(part | at).select(pl.col(c).cast(d) for c, d in schema.items()) for part in parts]
    return pl.concat(frames)


def stale_boxes(
    trace: Trace | str | Path,
    page: int,
    block: int,
    accepted: int,
    *,
    layers: Iterable[int] | None = None,
    requests: Iterable[int] | None = None,
) -> pl.DataFrame:
    """`block` drafts at a time of which `accepted` stay, with boxes that are not scanned again after a rollback -> request, layer, kv_head,
    pages (that decoding has written to, counted at every block), stale_pages (of them, those whose box is too wide), inflation_mean,
    inflation_max (of the bound of the next query, in scaled logits, over stale pages and query heads), rescanned_rows (what scanning again
    would have read).

    A trace has no rejected drafts: in their place stand the keys of the tokens one block later, which fit the text and not the place.
    Raises WrongUse unless 0 < accepted < block."""
    if not 0 < accepted < block or page < 1:
        raise WrongUse(
            f"page={page}, block={block}, accepted={accepted}: expected pages of 1 token or more, and 0 < accepted < block"
        )
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    mine = chosen("layers", layers, [x.id for x in opened.captured_layers], opened)
    whose = chosen("requests", requests, [r.id for r in opened.requests], opened)
    rows = []
    for request in (r for r in opened.requests if r.id in whose):
        for layer in (x for x in opened.captured_layers if x.id in mine):
            source = source_of(opened.lane(request, layer))
            for head in range(layer.kv_heads):
                told = _stale(source, head, page, block, accepted)
                rows.append({"request": request.id, "layer": layer.id, "kv_head": head} | told)
    counts = dict.fromkeys(("pages", "stale_pages"), pl.Int64) | dict.fromkeys(("inflation_mean", "inflation_max"), pl.Float64)
    return pl.DataFrame(rows, schema=UNIT | counts | {"rescanned_rows": pl.Int64})


def _stale(source: Source, head: int, page: int, block: int, accepted: int) -> dict[str, float | int | None]:
    start = source.request.prompt // page * page  # whole pages of the prompt are never written to again
    keys = source.rows("k", head, np.arange(start, source.request.total))
    pool = Pool(len(keys) // page + block // page + 3, page, keys.shape[1])
    request = pool.open()
    touched, rescanned, wide = 0, 0, [np.zeros(0)]
    for at, t, wrong in _rounds(source, start, block, accepted):
        pool.append(request, keys[pool.lengths[request] : t - start])
        pool.append(request, keys[wrong])
        pool.rollback(request, len(wrong), rescan=False)
        stale = np.any([x != y for x, y in zip(pool.boxes(request), pool.scanned(request), strict=True)], axis=(0, 2))
        q = source.queries(head, slice(at, at + 1))[0].astype(np.float64)
        wide.append(inflation(pool, request, q)[:, stale].ravel() * source.layer.scale)
        touched, rescanned = touched + len(stale), rescanned + (t - start) % page
    every = np.concatenate(wide)
    return {
        "pages": touched,
        "stale_pages": len(every) // source.layer.group,
        "inflation_mean": float(every.mean()) if len(every) else None,
        "inflation_max": float(every.max()) if len(every) else None,
        "rescanned_rows": rescanned,
    }


def _rounds(source: Source, start: int, block: int, accepted: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """(place of the next query, its position, which keys stand for the rejected drafts) of every block, while the trace has them."""
    where = {int(t): i for i, t in enumerate(source.t)}
    t = source.request.prompt + accepted
    while t - accepted + 2 * block <= source.request.total:
        if t in where:
            yield where[t], t, np.arange(t, t + block - accepted) + block - start
        t += accepted
