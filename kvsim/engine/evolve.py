"""What a keep and a store decide over the steps of one (request, layer), each decision taken from its own past alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine import select
from kvsim.engine.bank import Bank, Record
from kvsim.engine.cuts import cuts_of
from kvsim.engine.logits import Logits
from kvsim.engine.pages import Pages
from kvsim.engine.reads import Reader
from kvsim.engine.recurrence import note
from kvsim.engine.source import Prefix, Sight, Source
from kvsim.errors import WrongUse
from kvsim.geometry import ATTENTION
from kvsim.kernels.product import times
from kvsim.kernels.sparse import ALIVE, KEY_BLUR, own_softmax
from kvsim.policies import allocate
from kvsim.policies.protocol import CODED, FULL, GONE, HOST, SSD, Chain, Ranking, Seen, State, Store

OBSERVED_ROWS = 64  # query rows whose logits over all live slots are held at once, in float64


@dataclass(frozen=True)
class Course:
    """What a policy is to decide over the steps. limits i64[Hkv]: what the kv heads may hold after prefill, where their budget was shared
    over layers (engine.model_scope); sets: write down the sets of every cut, too."""

    chain: Chain
    limits: NDArray[np.int64] | None = None
    sets: bool = False


def evolve(source: Source, chain: Chain, limits: NDArray[np.int64] | None = None, sets: bool = False) -> Record | None:
    """The record of every token's fate, or None when all stay and stay exact."""
    return evolve_all(source, [Course(chain, limits, sets)])[0]


def evolve_all(source: Source, courses: Sequence[Course]) -> list[Record | None]:
    """The records of several policies, each as it would be alone. Those that see attention over the captured keys go step by step
    together, and share their logits."""
    records: list[Record | None] = []
    together: list[Life] = []
    for course in courses:
        if not decides(course.chain):
            records.append(None)
            continue
        life = Life(source, course)
        records.append(life.bank.record)
        if life.watch and course.chain.codecs is None:
            together.append(life)
        else:
            _live(source, [life])
    _live(source, together)
    return records


def decides(chain: Chain) -> bool:
    """Whether a chain ever drops or codes a row."""
    return chain.part("keep").hold is not None or chain.codecs is not None


def _live(source: Source, lives: list[Life]) -> None:
    """All steps, block by block."""
    block = block_of(source)
    logits = Logits(source, OBSERVED_ROWS) if any(life.watch for life in lives) else None
    for start in range(0, len(source.steps), block):
        ts = source.t[start : start + block]
        awake = [life.watch for life in lives if life.enter(start, ts) and life.watch]
        if awake and logits:
            share(logits, awake, start, ts)
        for life in lives:
            for i, t in enumerate(ts.tolist(), start):
                life.step(i, t)


def block_of(source: Source) -> int:
    """Captured steps whose logits are held at once."""
    return max(1, OBSERVED_ROWS // source.layer.group)


class Life:
    """One policy over the steps of one (request, layer).

    A keep or store with ATTENTION in its needs sees, at the steps it looks at, the softmax over what the read part loaded."""

    def __init__(self, source: Source, course: Course):
        chain, keep = course.chain, course.chain.part("keep")
        store: Store | None = chain.part("store")
        self.source, self.keep, self.store = source, keep, store if store and store.codecs else None
        self.watching = [part for part in (keep, self.store) if part and ATTENTION in part.needs]
        self.bank, self.sight = Bank(source, chain.codecs), Sight(source, keep.needs)
        self.bank.record.sets = [] if course.sets else None
        seen, self.bank.state, ranking = begin(source, keep, self.bank)
        if self.store:
            self.bank.store_state = self.store.start(Prefix(source, self.store.needs, type(self.store).__name__), seen)
        seen = seen if course.limits is None else replace(seen, limit=course.limits)
        _place(self.bank, ranking, seen, keep, self.store, -1)
        self.watch = Watch(source, self.bank, chain.part("read")) if self.watching else None
        self.awake = False
        self.bank.compact(block_of(source))  # before the prompt of another policy is laid out beside it

    def enter(self, start: int, ts: NDArray[np.int64]) -> bool:
        """Makes room for the tokens of a block of steps; whether attention is looked at in it. Pages are picked at every step, looked at
        or not."""
        self.bank.compact(int(ts[-1]) - self.bank.newest + block_of(self.source) - len(ts))
        steps = self.source.steps[start : start + len(ts)].tolist()
        self.awake = self.watch is not None and (
            bool(self.watch.readers) or any(part.looks(step) for step in steps for part in self.watching)
        )
        return self.awake

    def step(self, i: int, t: int) -> None:
        """The i-th captured step, at position t."""
        self.join(t)
        watch = self.watch if self.awake else None
        a = watch.attention(i, t) if watch and (watch.readers or self.looking(i)) else None
        before = self.bank.flags() if watch and self.bank.codecs else None
        self.settle(i, a)
        if watch and before is not None:
            watch.blurred(before, i)

    def looking(self, i: int) -> list[Any]:
        """The parts that look at the attention of the i-th step."""
        return [part for part in self.watching if part.looks(int(self.source.steps[i]))]

    def join(self, t: int) -> None:
        """The tokens up to position t are appended; they need room (Bank.compact)."""
        for new in range(self.bank.newest + 1, t + 1):
            self.bank.append(new)

    def settle(self, i: int, a: NDArray[np.float64] | None) -> None:
        """What becomes of the rows after the attention of the i-th step, a f64[Hkv, G, slots] over what was read."""
        source, keep, bank, step, looking = self.source, self.keep, self.bank, int(self.source.steps[i]), self.looking(i)
        t, sight = bank.newest, self.sight if keep.looks(step) else None
        seen = bank.seen(step, t, hold_limit(source, keep, t), a if keep in looking else None, sight, i)
        _place(bank, keep.step(bank.state, seen), seen, keep, self.store, i, a if self.store in looking else None)


def begin(source: Source, keep: Any, bank: Bank) -> tuple[Seen, State, Ranking | None]:
    """What a keep is shown at the end of the prompt, and what it makes of it."""
    last = source.request.prompt - 1
    seen = bank.seen(-1, last, hold_limit(source, keep, last), sight=Sight(source, keep.needs))
    return seen, *keep.start(Prefix(source, keep.needs, type(keep).__name__), seen)


def hold_limit(source: Source, keep: Any, t: int) -> int:
    """Whole tokens per kv head that may be held after the step at position t."""
    return allocate.hold_limit(keep, t + 1 - source.layer.first_visible(t), source.request, source.layer)


def beyond(source: Source, keep: Any, t: int) -> dict[int, float]:
    """Bytes per kv head that each tier outside the device may hold after the step at position t."""
    lay = source.layer
    visible = t + 1 - lay.first_visible(t)
    return {tier: float(allocate.to_tokens(x, visible, source.request, lay) * lay.row_bytes) for tier, x in keep.beyond.items()}


def _place(
    bank: Bank,
    ranking: Ranking | None,
    seen: Seen,
    keep: Any,
    store: Store | None,
    index: int,
    a: NDArray[np.float64] | None = None,
) -> None:
    """plan -> placement: the keep says who stays (and, when it stores too, how full), the store what of it is coded. a: what it sees."""
    if ranking is not None:
        if type(ranking) is not Ranking:
            raise WrongUse(
                f"a keep returned {type(ranking).__name__}, expected a Ranking or None: a policy ranks, the engine counts"
            )
        tier = select.cut(ranking, seen.pos, seen.valid, seen.limit, row_cost(bank), beyond(bank.source, keep, seen.t))
        note(bank.record, ranking, seen, tier, index)
        if ranking.unit is not None:
            bank.record.cuts += cuts_of(ranking, seen.valid, bank.tiers(), tier, index)
        if store:
            bank.apply(np.where(tier, seen.k, GONE), np.where(tier, seen.v, GONE), index)
        else:
            bank.apply(tier, tier, index)
    if store:
        after = replace(bank.seen(seen.step, seen.t, seen.limit, a), state=bank.store_state)
        keys, values = (np.asarray(x).astype(np.uint8) for x in store.place(after))
        k, v = (np.where(x, np.minimum(tier, CODED), tier) for x, tier in ((keys, after.k), (values, after.v)))
        bank.apply(k, v, index, (keys, values))
    bank.record.state.append(bank.state_numbers())


def row_cost(bank: Bank) -> dict[int, float]:
    """Bytes of one row of one kv head by tier; a coded row with its part of its group's scales, where all coded rows cost the same."""
    lay, codecs, cost = bank.source.layer, bank.codecs, {FULL: float(bank.source.layer.row_bytes)}
    if codecs and not codecs.grows and all(codec is None or hasattr(codec, "layout") for codec in (codecs.k, codecs.v)):
        cost[CODED] = 0.0
        sides: Any = ((codecs.k, lay.key_dim, lay.key_bytes), (codecs.v, lay.value_dim, lay.value_bytes))
        for codec, dim, exact in sides:
            bits, meta = codec.layout(dim) if codec else (8 * exact, 0)
            cost[CODED] += bits / 8 + (meta / (codec.tokens or 1) if codec else 0)
        cost[HOST] = cost[SSD] = cost[CODED]
    return cost


def share(logits: Logits, watches: Sequence[Watch], start: int, ts: NDArray[np.int64]) -> None:
    """Logits of a block's queries over the slots that live now, in any bank, or join in it."""
    wanted = np.zeros(logits.column.shape, bool)
    for watch in watches:
        bank = watch.bank
        for h in range(len(wanted)):
            wanted[h, bank.pos[h, : bank.n][bank.valid[h, : bank.n]]] = True
            wanted[h, bank.newest + 1 : int(ts[-1]) + 1] = True
    logits.gather(start, len(ts), wanted)
    for watch in watches:
        watch.begin(logits, ts)
    for h in range(len(wanted)):
        logits.multiply(h)


class Watch:
    """A policy's own attention over its live slots."""

    def __init__(self, source: Source, bank: Bank, read: Any):
        self.source, self.bank = source, bank
        heads = range(source.layer.kv_heads)
        ranks = read.page is not None and read.read is not None
        self.readers = [Reader(read, source, h, 1, bank.record) for h in heads] if ranks else None

    def begin(self, logits: Logits, ts: NDArray[np.int64]) -> None:
        """Finds the slots that live now or join in the block among the columns; keys that are coded are seen decoded."""
        bank, n = self.bank, self.bank.n
        born = np.arange(bank.newest + 1, int(ts[-1]) + 1)
        pos = bank.pos.copy()
        pos[:, n : n + len(born)] = born
        self.logits, self.at = logits, np.take_along_axis(logits.column, np.maximum(pos, 0), 1)
        self.read = np.ones((len(pos), 1, pos.shape[1]), bool)
        for h, blur in enumerate(bank.key_blur & bank.valid):
            if blur.any():
                logits.keys[h, self.at[h, blur]] = bank.record.decoded["k"][h, pos[h, blur]]

    def blurred(self, before: NDArray[np.uint8], index: int) -> None:
        """Keys that were just coded, after the step at place `index`, are seen decoded from the next step on."""
        now = self.bank.flags()
        again = [x for x in self.bank.record.recoded if x.index == index and x.side == "k"]
        for h in range(len(now)):
            changed = ((now[h] ^ before[h]) & KEY_BLUR & -(now[h] & ALIVE)) > 0
            for x in again:
                changed |= (x.head == h) & np.isin(self.bank.pos[h, : self.bank.n], x.pos)
            new = np.flatnonzero(changed)
            for s in new:
                name = self.bank.record.decoded["k"][h] if now[h, s] & KEY_BLUR else None
                pos = self.bank.pos[h, s]
                self.logits.keys[h, self.at[h, s]] = name[pos] if name is not None else self.source.rows("k", h, pos[None])[0]
            self.logits.multiply(h, self.at[h, new])

    def attention(self, i: int, t: int) -> NDArray[np.float64]:
        """f64[Hkv, G, width] of the i-th captured step, 0 where not read."""
        lay, bank, row = self.source.layer, self.bank, (i - self.logits.start) * self.source.layer.group
        width, read = bank.pos.shape[1], self.read
        if self.readers:
            read = np.zeros((lay.kv_heads, lay.group, width), bool)
            picked = [self._pick(h, i, t, row, read[h]) for h in range(lay.kv_heads)]
            bank.record.reads.append(picked)
        a = np.empty((lay.kv_heads, lay.group, width))
        own_softmax(self.logits.dots, self.at, row, bank.valid, read, self.source.unit, self.source.cap, self.source.sinks, a)
        return a

    def _pick(self, h: int, i: int, t: int, row: int, read: NDArray[np.bool_]) -> Any:
        assert self.readers is not None
        bank, live = self.bank, np.flatnonzero(self.bank.valid[h, : self.bank.n])
        dots = self.logits.dots[h, row : row + self.source.layer.group][:, self.at[h, live]]
        q = self.source.queries(h, slice(i, i + 1)).astype(np.float64)
        flags = np.where(bank.key_blur[h, live], ALIVE | KEY_BLUR, ALIVE).astype(np.uint8)[None]
        if bank.key_blur[h, live].any() and getattr(self.readers[h].read.index, "keys", "exact") == "exact":
            dots = times(q[0], self.source.rows("k", h, bank.pos[h, live]).T)  # the truth is that of the keys as captured
        picked = self.readers[h].pick(
            self.source.steps[i : i + 1], np.array([t]), bank.pos[h, live], flags, q, OwnTruth(self.source, h, dots, q)
        )
        read[:, live] = picked.chosen[0][:, picked.pages.of_slots()]
        return picked


class OwnTruth:
    """stop.Truth of one step: dots f64[G, n] over the live slots, q f64[1, G, d]."""

    def __init__(self, source: Source, head: int, dots: NDArray[np.float64], q: NDArray[np.float64]):
        self.source, self.head, self.q, self.dots, self.logits = source, head, q, dots, source.bend(dots)

    def peak(self, pages: Pages) -> NDArray[np.float64]:
        return np.maximum.reduceat(self.logits, pages.start[:-1], axis=1)[None]

    def mass(self, pages: Pages) -> NDArray[np.float64]:
        return np.add.reduceat(np.exp2(self.logits - self.top(pages)[0, :, None]), pages.start[:-1], axis=1)[None]

    def top(self, pages: Pages) -> NDArray[np.float64]:
        return self.logits.max(1)[None]

    def kth(self, r: int) -> NDArray[np.float64]:
        group, n = self.dots.shape
        return (np.partition(self.dots, n - r, axis=1)[:, n - r] * self.source.unit if r <= n else np.full(group, -np.inf))[None]

    def size(self) -> NDArray[np.float64]:
        return np.linalg.norm(self.q, axis=-1) * self.source.longest_key(self.head) * self.source.unit
