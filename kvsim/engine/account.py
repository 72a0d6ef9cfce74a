"""Every number of the ledger and of heads, counted from what the engine did; a policy reports nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine import away
from kvsim.engine.attend import Attended, Dense, Held, HeldTruth, page_stats
from kvsim.engine.bank import Record
from kvsim.engine.pages import CHUNK, Pages, pages_of
from kvsim.engine.reads import Picked
from kvsim.engine.select import dealt
from kvsim.engine.source import Source
from kvsim.engine.stop import mass_bound, unread_part
from kvsim.geometry import ATTENTION, BEFORE, INDEX, ITEMSIZE
from kvsim.kernels import sparse
from kvsim.kernels.dense import NONE
from kvsim.kernels.order import common, first_pages
from kvsim.kernels.sparse import ALIVE, KEY_BLUR
from kvsim.policies.protocol import Chain, Read
from kvsim.policies.rules import Rule

Columns = dict[str, Any]
LEAST_MASS = 1e-3  # below it a ratio of masses says nothing
NUMBER = 4  # bytes of a score that is remembered, or of a score, a page number or a partial sum on its way between shards


# ------------------------------------------------------------------------------------------------ ledger
def ledger(chain: Chain, asked: Chain, block: Dense, held: Held, picked: Picked | None, record: Record | None) -> Columns:
    """Columns [N] of one kv head: tokens and bytes held after each step's cut, and read in the step."""
    src, lay, read = block.source, block.source.layer, chain.part("read")
    codecs = chain.codecs
    pages = picked.pages if picked else pages_of(held.pos, CHUNK)
    union = picked.chosen.any(1) if picked else pages.rows(held.flags) > 0

    def tallies(place: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What was read and what is kept at one place (engine.away)."""
        live = away.at(held.after, held.where_after, place)
        return (
            _tally(block, held, away.at(held.flags, held.where, place), pages, union, record),
            _tally(block, held, live, pages, pages.rows(live) > 0, record),
        )

    was_read, kept = tallies(0)
    visible, alive = block.t + 1 - block.first, (held.flags & ALIVE).sum(1)
    once = np.zeros(2, np.int64) if record is None or record.once is None else record.once[:, block.head]
    (read_bytes, meta_bytes), (resident, meta_resident) = (row_bytes(src, once, counts) for counts in (was_read, kept))
    copies = kept[:, sparse.KEYS_CODED] + kept[:, sparse.KEYS_KEPT] if codecs and codecs.shadow else np.zeros(len(kept), np.int64)
    off, fetched = away.tokens(held.after, held.where_after), np.zeros(len(kept), np.int64)
    out: Columns = {"host_resident_bytes": copies * lay.row_bytes}
    for name, place in away.PLACES if held.where is not None else ():
        there, lies = tallies(place)
        fetched = fetched + there[:, sparse.ROWS_READ]
        out[f"{name}_read_bytes"] = sum(row_bytes(src, once, there))
        out[f"{name}_resident_bytes"] = sum(row_bytes(src, once, lies), out.get(f"{name}_resident_bytes", 0))
    wish: Read = asked.part("read")  # also where the layer is read whole by rule
    stated = None if isinstance(wish.read, Rule) else wish.read
    none = np.zeros(len(block.t), np.int64)
    page_bytes = 0 if read.page is None else page_rows(read) * lay.row_bytes
    scanned, index_once = picked.scanned if picked else none, once_bytes(read, src)
    live_pages = on_device = none
    if read.page is not None:
        table = pages_of(held.pos, read.page)
        live_pages = (table.rows(held.after) > 0).sum(1)
        on_device = (table.rows(away.at(held.after, held.where_after)) > 0).sum(1)
    summary = index_bytes(read, src, block.head)
    out |= {
        "pos": block.t,
        "visible_tokens": visible,
        "held_tokens": kept[:, sparse.ROWS_READ],
        "quant_tokens": kept[:, sparse.KEYS_CODED],
        "full_tokens": kept[:, sparse.KEYS_FULL],
        "evicted_tokens": visible - kept[:, sparse.ROWS_READ] - off,
        "asked": None if stated is None else float(getattr(stated, "n", getattr(stated, "x", np.nan))),
        "asked_unit": None if stated is None else type(stated).__name__,
        "read_tokens": was_read[:, sparse.ROWS_READ] + fetched,
        "read_pages": picked.chosen.any(1).sum(1) if picked else None,
        "read_runs": _runs(picked) if picked else None,
        "page_bytes": picked.chosen.any(1).sum(1) * page_bytes if picked else None,
        "resident_page_bytes": on_device * page_bytes if read.page is not None else None,
        "resident_bytes": resident,
        "meta_resident_bytes": meta_resident + kept_bytes(kept),
        "host_tokens": copies + off,
        "index_resident_bytes": live_pages * summary + index_once,
        "read_bytes": read_bytes,
        "meta_bytes": meta_bytes,
        "index_bytes": scanned * summary + (scanned > 0) * index_once,
        "score_bytes": 2 * lay.group * alive * 4 * _looked_at(chain, src.steps[block.index]),
        "write_bytes": none + lay.row_bytes + summary,
    }
    if wish.shards is not None and wish.shards.n > 1:
        partial = lay.group * (lay.value_dim + 2) * NUMBER  # of every shard: a maximum, a sum and an output for each query head
        out["collective_bytes"] = (picked.sent if picked else 0) * 2 * NUMBER + wish.shards.n * partial
        out["page_imbalance"] = imbalance(picked.chosen.any(1), picked.rows > 0, wish.shards.n) if picked else None
    if codecs:
        out |= {
            "coded_numbers": kept[:, sparse.KEYS_CODED] * lay.key_dim + kept[:, sparse.VALUES_CODED] * lay.value_dim,
            "coded_nominal_bits": kept[:, sparse.NOMINAL_BITS],
            "coded_bytes": code_bytes(kept) + meta_resident,
        }
    if read.index is not None and not held.whole:
        again, rows = rebuilt(read, held)
        out |= {"rebuilt_pages": again, "rebuild_bytes": rows * lay.key_bytes}
        out["write_bytes"] = out["write_bytes"] + again * summary
    if record is not None:
        out["write_bytes"] = out["write_bytes"] + record.coded_bytes[block.index, block.head]
        moved = record.moved[block.index, block.head]
        out |= {"moved_in_bytes": moved[:, 0], "moved_out_bytes": moved[:, 1]}
    return out


def rebuilt(read: Read, held: Held) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """i64[N] twice: pages that lost a row in the step's cut, or whose keys are stored otherwise since, and are summarised again; and the rows
    that are left in them."""
    if read.index is None or read.page is None or getattr(read, "summaries", "tight") == "stale":
        none = np.zeros(len(held.flags), np.int64)
        return none, none
    matter = np.uint8(ALIVE if getattr(read.index, "keys", "exact") == "exact" else ALIVE | KEY_BLUR)
    pages = pages_of(held.pos, read.page)
    left, moved = pages.rows(held.after), pages.rows(((held.flags ^ held.after) & matter > 0).view(np.uint8))
    again = (moved > 0) & (left > 0)
    return again.sum(1), (left * again).sum(1)


def _tally(
    block: Dense, held: Held, flags: NDArray[np.uint8], pages: Pages, union: Any, record: Record | None
) -> NDArray[np.int64]:
    counts = np.zeros((len(flags), sparse.COUNTS), np.int64)
    keys = values = np.zeros((sparse.COSTS, len(held.pos)), np.int64)
    if record is not None and record.cost:
        keys, values = (np.ascontiguousarray(record.cost[side][:, block.head, held.pos]) for side in "kv")
    sparse.tally(flags, pages.start, union, keys, values, counts)
    return counts


def row_bytes(source: Source, once: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """counts i64[N, COUNTS] (kernels.sparse) -> (bytes of rows and codes, of scales and zeros); a group touched is paid whole, and once[2]
    with the first coded key and value."""
    lay = source.layer
    rows = counts[:, sparse.KEYS_FULL] * lay.key_bytes + counts[:, sparse.VALUES_FULL] * lay.value_bytes
    tables = (counts[:, [sparse.KEYS_CODED, sparse.VALUES_CODED]] > 0) @ once
    return rows + code_bytes(counts), counts[:, sparse.META_BYTES] + tables


def code_bytes(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """i64[N]: bytes of the codes of coded rows, each side's bits rounded down to bytes."""
    return counts[:, sparse.KEY_BITS] // 8 + counts[:, sparse.VALUE_BITS] // 8


def kept_bytes(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """i64[N]: codes, scales and zeros that are kept beside exact rows."""
    codes = counts[:, sparse.KEPT_KEY_BITS] // 8 + counts[:, sparse.KEPT_VALUE_BITS] // 8
    return codes + counts[:, sparse.KEPT_META_BYTES]


def _looked_at(chain: Chain, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool[N]: steps whose probabilities a part of the chain looks at."""
    watching = [part for part in chain.parts if ATTENTION in part.needs]
    return np.array([any(part.looks(step) for part in watching) for step in steps.tolist()])


def index_bytes(read: Read, source: Source, head: int) -> int:
    """Bytes of one page's summary; of a learned index, whose keys are the layer's, on its first kv head."""
    if INDEX in read.needs:
        assert source.indexer is not None
        return 0 if head else read.index_row_bytes(source.indexer.k.shape[1], ITEMSIZE[source.layer.dtype])
    return 0 if read.index is None else read.index.numbers(source.layer.key_dim) * ITEMSIZE[read.index.dtype]


def once_bytes(read: Read, source: Source) -> int:
    """Bytes of what an index keeps once per kv head."""
    if read.index is None or not hasattr(read.index, "once"):
        return 0
    return read.index.once(source.layer.key_dim) * ITEMSIZE[read.index.dtype]


def page_rows(read: Read) -> int:
    """Rows that a page takes in memory: whole tiles."""
    tile = read.tile or 1
    return -(-read.page // tile) * tile


def imbalance(union: NDArray[np.bool_], exists: NDArray[np.bool_], n: int) -> NDArray[np.float64]:
    """union, exists bool[N, P] -> f64[N]: pages that the busiest of n shards reads, over the mean of all."""
    shard = dealt(exists, n)
    most = np.max([(union & (shard == s)).sum(1) for s in range(n)], axis=0)
    return most * n / union.sum(1)


def _runs(picked: Picked) -> NDArray[np.int64]:
    """Contiguous page runs of the union."""
    union = np.asarray(picked.chosen.any(1))
    out = np.empty(len(union), np.int64)
    for i, row in enumerate(union):
        ids = picked.pages.id[row]
        out[i] = (np.diff(ids, prepend=-2) != 1).sum()
    return out


# ------------------------------------------------------------------------------------------------ heads
def heads(
    chain: Chain,
    dense_by_rule: bool,
    block: Dense,
    held: Held,
    picked: Picked | None,
    got: Attended,
    truth: HeldTruth,
    record: Record | None,
) -> Columns:
    """Columns [N * G] of one kv head's query heads, step by step."""
    src, sums = block.source, got.sums
    recall = sums[:, sparse.MASS]
    kept = _held_mass(block, held, picked, got)
    seen = 1 - block.sink_mass
    fetched = away.mass(block, held, picked)
    far, far_read = block.far_mass, np.minimum(sums[:, sparse.FAR], block.far_mass)
    missed = np.maximum(seen - recall, 0)
    out: Columns = {
        "role": np.repeat(src.request.roles[block.t], block.group),
        "dense": dense_by_rule,
        "mass_recall": recall,
        "mass_evicted": 0.0 if held.whole else np.maximum(seen - kept, 0),
        "mass_unread": np.maximum((seen if held.whole else kept) - recall, 0),
        "learned_sink_mass": block.sink_mass,
        "mass_quant": np.maximum(sums[:, sparse.CODED_MASS] - fetched, 0),
        "mass_host": fetched,
        "far_mass": far,
        "far_recall": np.divide(far_read, far, out=np.full(len(far), np.nan), where=far >= LEAST_MASS),
        "rel_l2": relative(got.out, block.out),
        "cosine": cosine(got.out, block.out),
        "out_bound": 2 * missed * np.repeat(block.value_bound, block.group),
        "out_bound_centred": 2 * missed * block.value_radius,
        "read_tokens": sums[:, sparse.TOKENS].astype(np.int64),
        "rounds": 1 if picked is None else picked.rounds.ravel(),
    }
    if src.request.evidence:
        out |= {
            "evidence_dense": block.evidence_mass,
            "evidence_read": sums[:, sparse.EVIDENCE],
            "evidence_mass": sums[:, sparse.OWN_EVIDENCE],
        }
    if got.exact is not None and got.mixed is not None:
        out |= {"err_select": relative(got.exact, block.out), "err_k": relative(got.mixed, block.out), "err_v": out["rel_l2"]}
    out |= _top_recalls(block, held, picked)
    if picked is not None:
        out["read_pages"] = picked.chosen.sum(-1).ravel()
        out["held_pages"] = np.repeat((picked.rows > 0).sum(1), block.group)
        out["set_age"] = None if picked.age is None else np.repeat(picked.age, block.group)
        out["certified"] = None if picked.certified is None else picked.certified.ravel()
        out["page_precision"] = np.exp2(sums[:, sparse.ENTROPY]) / np.maximum(out["read_pages"], 1)
        out |= _page_recalls(block, picked)
        out["false_read_bytes"] = _false_reads(chain, block, held, picked, record)
        if chain.part("read").index is not None and BEFORE not in chain.part("read").needs:
            out |= _bounds(block, held, picked, truth)
    return out


def relative(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """|a - b| / |b| row by row; 0 where both are zero."""
    size = np.sqrt((b * b).sum(1))
    gap = np.sqrt(((a - b) ** 2).sum(1))
    return np.divide(gap, size, out=np.where(gap > 0, np.inf, 0.0), where=size > 0)


def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    size = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return np.divide((a * b).sum(1), size, out=np.ones(len(a)), where=size > 0)


def _held_mass(block: Dense, held: Held, picked: Picked | None, got: Attended) -> NDArray[np.float64]:
    """Dense probability on everything that was live at the step, read or not."""
    if held.whole:
        return 1 - block.sink_mass
    if picked is None:
        return got.sums[:, sparse.MASS]
    peak, mass = page_stats(held.dots, held.flags, held.every, picked.pages.start, block)
    bent = block.source.bend(peak.astype(np.float64))
    return np.where(peak > NONE, mass * np.exp2(np.minimum(bent - block.lse, 0)), 0).sum(0)[: block.rows]


def _top_recalls(block: Dense, held: Held, picked: Picked | None) -> Columns:
    """The part of the R tokens of highest dense logit that were read, R = 1, 10, 64 (or as many as are visible)."""
    best, count = block.top
    n, group = len(block.t), block.group
    slot = np.searchsorted(held.pos, best).clip(max=len(held.pos) - 1)
    step = np.repeat(np.arange(n), group)[:, None]
    got = (held.pos[slot] == best) & (held.flags[step, slot] & ALIVE).astype(bool)
    if picked is not None:
        head = np.tile(np.arange(group), n)[:, None]
        got &= picked.chosen[step, head, picked.pages.of_slots()[slot]]
    got &= np.arange(best.shape[1]) < count[:, None]
    hits = got.cumsum(1)
    rows = np.arange(len(best))
    return {f"top{r}_recall": hits[rows, np.minimum(r, count) - 1] / np.minimum(r, count) for r in (1, 10, 64)}


def _page_recalls(block: Dense, picked: Picked) -> Columns:
    """The part of the pages of most dense mass that were read: as many as the head read, and 10."""
    order, seen = block.mass_order(picked.pages.size)
    marked = np.zeros(order.shape, bool)
    marked[:, picked.pages.id] = picked.chosen.reshape(block.rows, -1)
    out: Columns = {}
    for name, most in (("page_recall", picked.chosen.sum(-1).ravel()), ("page_recall10", np.full(block.rows, 10))):
        many, hits = np.minimum(most, seen), np.zeros(block.rows, np.int64)
        common(order, marked, many, hits)
        out[name] = hits / many
    return out


def best_pages(block: Dense, picked: Picked) -> NDArray[np.bool_]:
    """bool[N, G, P] on the pages of the grid: those of most dense mass of all visible ones, as many as the head read."""
    order, seen = block.mass_order(picked.pages.size)
    best = np.empty((len(order), 1, order.shape[1]), bool)
    first_pages(order[:, None], np.minimum(picked.chosen.sum(-1).ravel(), seen), best)
    return best.reshape(len(block.t), block.group, -1)


def _false_reads(chain: Chain, block: Dense, held: Held, picked: Picked, record: Record | None) -> NDArray[np.int64]:
    """i64[R]: bytes of rows that a head read in pages that are not its best ones."""
    once = np.zeros(2, np.int64)  # codebooks are no rows
    wrong = picked.chosen & ~best_pages(block, picked)[..., picked.pages.id]
    by_head = [
        row_bytes(block.source, once, _tally(block, held, held.flags, picked.pages, np.ascontiguousarray(wrong[:, g]), record))[0]
        for g in range(block.group)
    ]
    return np.stack(by_head, 1).ravel()


def _bounds(block: Dense, held: Held, picked: Picked, truth: HeldTruth) -> Columns:
    """How far the page scores lie above the best true logit of the page, and the certificate they give for what was read."""
    src, n, group = block.source, len(block.t), block.group
    if truth.decoded is None and held.whole and picked.pages.start[-1] == len(held.pos):
        stats = block.stats(picked.pages.size)
        peak, mass = (x[: len(picked.pages.id)].T[: block.rows].reshape(n, group, -1).astype(np.float64) for x in stats)
    else:
        peak, mass = truth.near_stats(picked.pages)
    rows = picked.rows[:, None]
    live = np.broadcast_to(rows > 0, peak.shape)
    ranked_here = np.asarray(~np.isnan(picked.score).any(-1))
    score = np.where(live & ranked_here[..., None], picked.score, 0)
    slack = np.where(live, src.layer.scale * (score - peak), 0)
    true = np.where(live, src.bend(np.where(live, peak, 0)), -np.inf)
    top = true.max(-1, keepdims=True)
    unread = np.where(picked.chosen, 0, mass_bound(src.bend(score), rows, top)).sum(-1)
    read = np.where(picked.chosen, mass * np.exp2(true - top), 0).sum(-1)
    eps = unread_part(unread, read)
    columns = {"slack_mean": slack.sum(-1) / live.sum(-1), "slack_max": np.where(live, slack, -np.inf).max(-1), "eps_hat": eps}
    return {name: np.where(ranked_here, x, np.nan).ravel() for name, x in columns.items()}
