"""The read part of a chain over one kv head: page tables, summaries, ranking, budget, refresh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine import select
from kvsim.engine.bank import Record
from kvsim.engine.pages import Pages, Versions, pages_of, versions
from kvsim.engine.source import Source
from kvsim.engine.stop import Depths, Ordered, Truth, depths, foretold, ordered
from kvsim.errors import WrongUse
from kvsim.geometry import BEFORE, INDEX, TRUTH
from kvsim.kernels.order import page_states, settled
from kvsim.kernels.sparse import ALIVE, KEY_BLUR
from kvsim.policies import allocate
from kvsim.policies.parameters import written
from kvsim.policies.protocol import Learned, Read, View
from kvsim.policies.rules import Rule, gap

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
UNKNOWN = 255  # no state of a page yet
TOGETHER = 64  # pages whose keys are looked at together: a MB, which stays in the cache and is not asked of the system anew
UNBOUNDED = 1e200  # what an infinite score counts as, so that differences of scores are numbers


@dataclass
class Picked:
    """What the query heads of one kv head read in a block of steps. rows i64[N, P]: live tokens of every page; chosen bool[N, G, P];
    score f64[N, G, P], unscaled, NaN where no ranking took place; order i32[N, G, P] of a fixed budget (None otherwise); forced
    bool[N, P]; scanned i64[N]: pages whose summary was read; certified bool[N, G]: a rule's proof was reached (None: it gives none);
    sent i64[N]: scores that shards told each other; age i64[N]: steps since the ranking that the set rests on (None: every step has its
    own)."""

    pages: Pages
    rows: Ints
    chosen: Mask
    score: NDArray[np.float64]
    order: NDArray[np.int32] | None
    forced: Mask
    rounds: Ints
    scanned: Ints
    certified: Mask | None
    sent: Ints
    age: Ints | None = None

    def joined(self, budgets: int) -> Ints:
        """i64[N, K]: the pages of a head's order that are read at 1 ... K pages: never fewer than the forced ones."""
        return np.maximum(np.arange(1, budgets + 1), self.forced.sum(1)[:, None])


class Reader:
    """Ranks and picks pages for one kv head under one read policy; keeps page summaries and, between refreshes, the set.

    `full_block`: every call scores as many steps, so that products have one shape. record: how the keys are stored."""

    def __init__(self, read: Read, source: Source, head: int, full_block: int, record: Record | None = None):
        self.read, self.source, self.head, self.full_block = read, source, head, full_block
        self.summaries = Summaries(read, source, head, record) if read.index is not None else None
        self.held_set: tuple[int, int, list[set[int]]] | None = (
            None  # step and position of the last ranking, each query head's pages
        )

    def pick(
        self,
        steps: Ints,
        t: Ints,
        pos: Ints,
        flags: NDArray[np.uint8],
        q: NDArray[np.float64],
        truth: Truth,
        known: dict[Any, Any] | None = None,
    ) -> Picked:
        """steps, t i64[N]; slots at pos i64[n], flags u8[N, n]; q f64[N, G, d]. known: scores and orders of other policies over the same
        slots, by `ranking_of`; one that differs in its budget alone takes them from there."""
        read, lay = self.read, self.source.layer
        assert read.page is not None
        pages, group = pages_of(pos, read.page), q.shape[1]
        rows = pages.rows(flags)
        exists = rows > 0
        if read.read is None:  # everything(page=...): the pages are named, none is ranked
            every = np.repeat(exists[:, None], group, 1)
            none = np.full(every.shape, np.nan)
            zero = np.zeros(len(t), np.int64)
            return Picked(pages, rows, every, none, None, exists, np.ones(every.shape[:2], int), zero, None, zero)
        if read.shards is not None and (least := int(exists.sum(1).min())) < read.shards.n:
            where = f"request {self.source.request.id}, layer {self.source.layer.id}, step {steps[exists.sum(1).argmin()]}"
            raise WrongUse(
                f"{type(read).__name__}(shards={written(read.shards)}): {where} has {least} pages of {read.page} tokens to deal out,"
                " expected a page for every shard; take fewer shards or smaller pages"
            )
        forced = select.forced_pages(read.forced, pages.id, read.page, t) & exists
        visible = t + 1 - lay.first_of_each(t)
        known = {} if known is None else known
        score = _once(known, ("score", *ranking_of(read)), lambda: self.score(t, pages, exists, pos, flags, q, truth))
        ranks = np.ones(len(t), bool) if read.refresh == 1 else self._due(steps)
        rounds, order, certified, sent = np.ones((len(t), group), np.int64), None, None, np.zeros(len(t), np.int64)
        age: Ints | None = None
        if isinstance(read.read, Rule):
            chosen, depth = self._by_rule(read.read, score, pages, rows, forced, t, visible, truth)
            rounds, certified, scanned = depth.rounds, depth.certified, exists.sum(1)
        else:
            k = self.to_pages(read.read, visible)
            chosen, order = self.choose(score, exists, forced, k, known)
            there = exists.sum(1)
            scanned = np.where(there > k, there, 0)
            sent = self._sent(exists, k, group)
        if read.refresh != 1:
            (chosen, age), order, certified = self._keep_set(steps, t, pages, exists, chosen, ranks), None, None
            score = np.where(ranks[:, None, None], score, np.nan)
            scanned, sent, rounds = np.where(ranks, scanned, 0), np.where(ranks, sent, 0), np.where(ranks[:, None], rounds, 0)
        scanned = scanned if read.index is not None or INDEX in read.needs else np.zeros_like(scanned)
        return Picked(pages, rows, chosen, score, order, forced, rounds, scanned, certified, sent, age)

    def _sent(self, exists: Mask, k: Ints, group: int) -> Ints:
        """i64[N]: with shards that rank together, every one tells its best scores, one list for each ranking."""
        over = self.read.shards
        if over is None or over.n == 1 or over.budget != "global":
            return np.zeros(len(k), np.int64)
        n = exists.sum(1)
        rankings = group if self.read.heads in ("each", "share") else 1
        own = np.stack([np.minimum(n // over.n + (s < n % over.n), k) for s in range(over.n)])
        return np.where(n > k, own.sum(0) * rankings, 0)

    def to_pages(self, budget: Any, visible: Ints) -> Ints:
        """i64[N]: a budget at steps that see so many tokens."""
        request, lay, size = self.source.request, self.source.layer, self.read.page
        if getattr(budget, "of", None) != "visible":
            return np.full(len(visible), allocate.to_pages(budget, size, int(visible[0]), request, lay))
        return np.array([allocate.to_pages(budget, size, n, request, lay) for n in visible.tolist()])

    def _by_rule(
        self,
        rule: Rule,
        score: NDArray[np.float64],
        pages: Pages,
        rows: Ints,
        forced: Mask,
        t: Ints,
        visible: Ints,
        truth: Truth,
    ) -> tuple[Mask, Depths]:
        src, size = self.source, self.read.page
        told = ordered(src, pages, score, rows, forced)
        if isinstance(rule, gap) and rule.file is not None:
            weights = rule.weights(src.layer.id, self.head)
            depth = foretold(told, np.array(rule.levels), t - src.request.prompt, weights, rule.risk)
        else:
            ends = [allocate.rule_pages(rule, size, int(n), src.request, src.layer) for n in visible]
            floor, cap = (np.array(x)[:, None] for x in zip(*ends, strict=True))
            depth = depths(rule, told, cap, floor, truth)
        chosen = np.zeros(score.shape, bool)
        np.put_along_axis(chosen, told.order.astype(np.int64), np.arange(score.shape[-1]) < depth.pages[..., None], -1)
        return np.repeat(chosen.any(1, keepdims=True), score.shape[1], 1) if self.read.heads == "share" else chosen, depth

    def ordered(self, t: Ints, pos: Ints, flags: NDArray[np.uint8], q: NDArray[np.float64], truth: Truth) -> Ordered:
        """The pages in the order that a rule would open them."""
        pages = pages_of(pos, self.read.page)
        rows = pages.rows(flags)
        forced = select.forced_pages(self.read.forced, pages.id, self.read.page, t) & (rows > 0)
        return ordered(self.source, pages, self.score(t, pages, rows > 0, pos, flags, q, truth), rows, forced)

    def _due(self, steps: Ints) -> Mask:
        due = np.zeros(len(steps), bool)
        for i, step in enumerate(steps):
            due[i] = step == 0 if self.read.refresh == "never" else step % self.read.refresh == 0
        return due

    def choose(
        self, score: NDArray[np.float64], exists: Mask, forced: Mask, k: Ints, known: dict[Any, Any] | None = None
    ) -> tuple[Mask, NDArray[np.int32] | None]:
        """The pages bool[N, G, P] that a budget of k pages reads, and the order that every budget reads from, unless shards do."""
        read, group = self.read, score.shape[1]

        def rank() -> NDArray[np.int32]:
            if read.heads == "split":
                return select.split_order(score, exists, forced, getattr(read, "private", 1))
            return select.page_order(select.joint(read.heads, score, exists, self.source.unit), exists, forced)

        order = _once({} if known is None else known, ("order", *ranking_of(read)), rank)
        chosen = select.pick(order, exists, forced, k, read.heads, group, read.shards)
        return chosen, order if read.shards is None else None

    def _keep_set(self, steps: Ints, t: Ints, pages: Pages, exists: Mask, chosen: Mask, ranks: Mask) -> tuple[Mask, Ints]:
        """Between rankings the set stays and pages born since join it (ruling B06); when nothing of it is left, the newest page is read.
        And the age of each step's set."""
        out, age = np.zeros_like(chosen), np.zeros(len(t), np.int64)
        for i in range(len(t)):
            if ranks[i] or self.held_set is None:
                self.held_set = int(steps[i]), int(t[i]), [set(pages.id[c].tolist()) for c in chosen[i]]
                out[i] = chosen[i]
            else:
                ranked, since, sets = self.held_set
                age[i] = steps[i] - ranked
                young = pages.id * pages.size > since
                for g, ids in enumerate(sets):
                    out[i, g] = (np.isin(pages.id, list(ids)) | young) & exists[i]
                    if not out[i, g].any():
                        out[i, g, np.flatnonzero(exists[i])[-1]] = True
        return out, age

    def score(
        self, t: Ints, pages: Pages, exists: Mask, pos: Ints, flags: NDArray[np.uint8], q: NDArray[np.float64], truth: Truth
    ) -> NDArray[np.float64]:
        """f64[N, G, P], -inf where a page does not exist."""
        seen = self.summaries
        v = versions(pages, flags, t, seen.matter if seen else ALIVE)
        arrays: dict[str, NDArray[Any]] = seen.of(v, pages, pos) | seen.fitted if seen else {}
        summary = {name: x[None] for name, x in arrays.items()}
        n, group, dim = q.shape
        full = max(self.full_block, n)
        batch, times = q[:, None], t[:]
        if n < full:
            batch, times = np.zeros((full, 1, group, dim)), np.full(full, t[-1])
            batch[:n, 0], times[:n] = q, t
        asked = None
        if TRUTH in self.read.needs:

            def asked(kind: str) -> NDArray[np.float64]:
                out = np.zeros((full, 1, group, len(v.page)))
                out[:n, 0] = (truth.mass(pages) if kind == "mass" else truth.peak(pages))[..., v.page]
                return out

        where = (self.source.request.id, self.source.layer.id, self.head)
        learned = self._learned(t, pos[v.slot[:, 0]], full) if INDEX in self.read.needs else None
        before = self._before(t, batch) if BEFORE in self.read.needs else None
        view = View(times, batch, pages.id[v.page][None], summary, where, asked, learned, before)
        more = [] if before is None else [before]
        for x in (batch, times, *summary.values(), *((learned.q, learned.w, learned.k) if learned else more)):
            x.flags.writeable = False
        got = scored(self.read, view)
        told = np.ascontiguousarray(got[:n, 0])
        score = np.empty((n, group, len(pages.id)))
        if settled(told, v.moving, v.number, exists, UNBOUNDED, score):
            raise not_a_number(self.read)
        return score

    def _before(self, t: Ints, like: NDArray[np.float64]) -> NDArray[np.float64]:
        """The queries of the layer before of the steps at positions t, in the shape of this layer's."""
        told, group = self.source.before, self.source.layer.group
        assert told is not None
        out = np.zeros_like(like)
        mine = slice(self.head * group, (self.head + 1) * group)
        out[: len(t), 0] = told[np.searchsorted(self.source.t, t), mine]
        return out

    def _learned(self, t: Ints, pos: Ints, full: int) -> Learned:
        """Rows of the learned indexer: of the steps at positions t, as many as `full`, and of the tokens at pos."""
        rows = self.source.indexer
        assert rows is not None
        at = np.searchsorted(self.source.t, t)
        q, w = np.zeros((full, *rows.q.shape[1:])), np.zeros((full, rows.w.shape[1]))
        q[: len(t)], w[: len(t)] = rows.q[at], rows.w[at]
        return Learned(q, w, rows.k[pos].astype(np.float64), rows.score_fn)


def scored(read: Read, view: View) -> NDArray[np.float64]:
    """f64[N, Hkv, G, P]: what a read policy says of a view. Raises WrongUse: an array of another shape."""
    got, expected = read.score(view), (*view.q.shape[:3], view.page.shape[1])
    if not isinstance(got, np.ndarray) or got.shape != expected:
        shape = getattr(got, "shape", type(got).__name__)
        raise WrongUse(f"{type(read).__name__}.score returned {shape}, expected an array [N, Hkv, G, P] = {expected}")
    return got


def not_a_number(read: Read) -> WrongUse:
    return WrongUse(f"{type(read).__name__}.score returned NaN for a page that exists")


def ranking_of(read: Read) -> tuple[Any, ...]:
    """What decides the order of pages: all of a read policy but its budget."""
    return type(read), *((f.name, getattr(read, f.name)) for f in fields(read) if f.name != "read")


def _once(known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    if key not in known:
        known[key] = make()
    return known[key]


class Summaries:
    """The index's arrays of one kv head; a page is summarised again only when its live rows, or how their keys are stored, changed."""

    def __init__(self, read: Read, source: Source, head: int, record: Record | None):
        self.index: Any = read.index
        self.source, self.head, self.record, self.size = source, head, record, int(read.page)
        fit = getattr(self.index, "fit", None)
        self.fitted: dict[str, NDArray[Any]] = fit(source.whole("k", head)[: source.request.prompt]) if fit else {}
        self.keys = getattr(self.index, "keys", "exact")
        self.stale = getattr(read, "summaries", "tight") == "stale"
        self.matter = ALIVE if self.keys == "exact" else ALIVE | KEY_BLUR
        pages = -(-source.request.total // self.size)
        self.state = np.full((pages, self.size + 1), UNKNOWN, np.uint8)  # of every position, and whether the page is closed
        self.arrays: dict[str, NDArray[Any]] = {}
        self.rows, self.became = 0, (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def of(self, v: Versions, pages: Pages, pos: Ints) -> dict[str, NDArray[Any]]:
        """{name: [V, ...]} for every version."""
        if self.stale:
            v, pos = self._as_written(v, pages, pos)
        ids, at = pages.id[v.page], pos[v.slot]
        state = np.zeros((len(ids), self.size + 1), np.uint8)
        page_states(at, v.valid, v.blurred, v.closed, state)
        stale = (state != self.state[ids]).any(1)
        made = self._made(v, at, np.flatnonzero(stale)) if stale.any() else {}
        newest = np.zeros(len(pages.id), np.int64)
        newest[v.page] = np.arange(len(ids))  # pages repeat in order of step: the last state stays
        out = self._kept(ids, newest, made)
        for name, x in made.items():
            out[name][stale] = x
        if not self._in_place(ids, newest):
            for name, x in out.items():
                self.arrays[name][pages.id] = x[newest]
        self.state[pages.id] = state[newest]
        return out

    def _in_place(self, ids: Ints, newest: Ints) -> bool:
        """Whether the pages are a run, and the states that come after their first have room behind them."""
        return bool(ids[len(newest) - 1] - ids[0] + 1 == len(newest) and ids[0] + len(ids) <= self.rows)

    def _kept(self, ids: Ints, newest: Ints, made: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """{name: [V, ...]} as far as it is known. Pages in a run are where they are kept, without a copy: until the next call what they
        become in this block lies behind them, where pages that are not there yet will be."""
        pages = len(newest)
        if not self.arrays:
            self.rows = len(self.state) + 2 * (len(ids) - pages)
            self.arrays = {name: np.zeros((self.rows, *x.shape[1:]), x.dtype) for name, x in made.items()}
        for x in self.arrays.values():
            x[self.became[0]] = x[self.became[1]]
        self.became = ids[:0], ids[:0]
        if not self._in_place(ids, newest):
            return {name: x[ids] for name, x in self.arrays.items()}
        first, later = int(ids[0]), ids[pages:]
        for x in self.arrays.values():
            x[first + pages : first + len(ids)] = x[later]
        self.state[first + pages : first + len(ids)] = UNKNOWN
        changed = newest >= pages
        self.became = ids[:pages][changed], first + newest[changed]
        return {name: x[first : first + len(ids)] for name, x in self.arrays.items()}

    def _as_written(self, v: Versions, pages: Pages, pos: Ints) -> tuple[Versions, Ints]:
        """The same versions with every row that was ever in the page; the newest of an open page is alive, for it was just written."""
        at = pages.id[v.page][:, None] * self.size + np.arange(self.size)
        newest = np.where(v.valid, pos[v.slot], -1).max(1, keepdims=True)
        valid = (at <= newest) | v.closed[:, None]
        return replace(v, slot=np.where(valid, at, 0), valid=valid, blurred=np.zeros_like(valid)), np.arange(at.max() + 1)

    def _made(self, v: Versions, at: Ints, which: Ints) -> dict[str, NDArray[Any]]:
        """Summaries of some versions, with the float64 keys of no more than TOGETHER pages at a time; at i64[V, S]: positions."""
        valid, blurred, closed = v.valid[which], v.blurred[which], v.closed[which]
        at, out = np.where(valid, at[which], 0), dict[str, NDArray[Any]]()
        for first in range(0, len(which), TOGETHER):
            one = slice(first, first + TOGETHER)
            keys, error = self._keys(at[one], blurred[one])
            for name, x in self.index.summarise(keys, valid[one], closed[one], **error, **self.fitted).items():
                out.setdefault(name, np.empty((len(which), *x.shape[1:]), x.dtype))[one] = x
        return out

    def _keys(self, pos: Ints, blurred: Mask) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """f64[m, S, d] at positions [m, S] as the index wants them, and when it widens them by their error, that too."""
        keys = self.source.rows("k", self.head, pos.ravel()).reshape(*pos.shape, -1)
        if self.keys == "recon" and blurred.any():
            assert self.record is not None
            keys[blurred] = self.record.decoded["k"][self.head, pos[blurred]]
        if self.keys != "expanded":
            return keys, {}
        error = np.zeros(keys.shape)
        if blurred.any():
            error[blurred] = self._error(pos[blurred], keys[blurred])
        return keys, {"error": error}

    def _error(self, pos: Ints, keys: NDArray[np.float64]) -> NDArray[np.float64]:
        """f64[n, d]: how far decoding may move coded keys [n, d], by the steps of their groups; decoded keys are kept in float32."""
        record = self.record
        assert record is not None
        assert record.key_group is not None
        assert record.key_codec is not None
        group = record.key_group[self.head]
        members = np.flatnonzero(np.isin(group, group[pos]))
        members = members[np.argsort(group[members], kind="stable")]
        rows = self.source.rows("k", self.head, members)
        error = record.key_codec.error(rows.reshape(-1, record.key_codec.tokens, rows.shape[1])).reshape(rows.shape)
        order = np.argsort(members)
        error = error[order[np.searchsorted(members[order], pos)]]
        return error + 2.0**-24 * (np.abs(keys) + error)
