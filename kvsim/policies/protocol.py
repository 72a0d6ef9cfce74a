"""The waist: all that a policy author reads, and all that the engine asks of a policy.

Shapes: N steps, Hkv kv heads, G query heads that share one, n live slots of a kv head (ascending positions), P pages, d head dim.

Who calls whom, for one (request, layer):
    state, ranking = keep.start(prefix, seen)      once, after prefill: the first cut; store.start(prefix, seen): what it remembers
    at every step:   read.score(view)  ->  the engine picks pages and attends  ->  keep.step(state, seen)  ->  the engine cuts
                     ->  store.place(seen): which of the rows left are coded, and in which width
A policy ranks and protects; it never sorts, applies a budget, places a row or counts a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.calibration import Sample
from kvsim.codecs.calibration import save as save_calibration
from kvsim.codecs.coded import levels
from kvsim.errors import WrongUse
from kvsim.geometry import (
    ALL_LAYERS,
    ATTENTION,
    BEFORE,
    FUTURE,
    INDEX,
    K_PRE,
    KEY_NORM,
    KEYS,
    PREFILL_MASS,
    Q_STATS,
    QUERIES,
    TRUTH,
    VALUES,
    WO_NORM,
    Layer,
    Need,
    Span,
    Window,
)  # fmt: skip
from kvsim.policies.parameters import Checked, expect
from kvsim.units import Budget, Hold, tokens

GONE, CODED, FULL = 0, 1, 2
HOST, SSD = 3, 4  # coded, and not on the device
LARGEST_PAGE = 2**15 - 1  # tokens; as much as the column page_size of plans holds
PAGE_SIZES = f"a page size of 1 to {LARGEST_PAGE} tokens"

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Levels = NDArray[np.uint8]


@dataclass
class State:
    """What a keep remembers. slots: arrays [Hkv or 1, n] that the engine keeps aligned with the live slots (0 for a new
    token); other: anything else, plain and copyable."""

    slots: dict[str, NDArray[Any]] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """What a policy may look at after a step: the past, and only what it itself read.

    step -1 is the cut after prefill, where `a` is None. Slots where `valid` is False hold nothing (pos -1)."""

    step: int
    t: int  # position of the newest token
    pos: Ints  # [Hkv, n], ascending where valid
    valid: Mask  # [Hkv, n]
    k: NDArray[np.uint8]  # [Hkv, n]: CODED or FULL, what each row's key is stored as
    v: NDArray[np.uint8]
    limit: Ints  # [Hkv]: the hold budget now, in whole tokens
    a: Floats | None = None  # [Hkv, G, n]: own softmax, 0 where not read; only with ATTENTION in needs, at steps that it looks at
    state: State | None = None  # what a store's start() made, for its place() to use and change
    wo_norm: Floats | None = None  # [Hkv, G, n]: L1 norm of each query head's output projection of the value; WO_NORM
    key_norm: Floats | None = None  # [Hkv, n]: L2 norm of the key; KEY_NORM
    keys: Floats | None = None  # [Hkv, n, d]: as captured, whatever a store made of them, 0 where there is none; KEYS
    values: Floats | None = None  # [Hkv, n, dv]: likewise; VALUES
    q: Floats | None = None  # [Hkv, G, d]: the queries of the newest token; QUERIES
    future: Floats | None = None  # [Hkv, n]: dense attention that all later steps pay, summed over the group; FUTURE


def older(seen: Seen, residual: int) -> Mask:
    """[Hkv, n]: live slots but for the newest `residual` of each kv head."""
    newer = seen.valid.sum(axis=1, keepdims=True) - seen.valid.cumsum(axis=1)
    return seen.valid & (newer >= residual)


@dataclass(frozen=True)
class Stage:
    """One helping of a cut: the best units by `score` (None: the ranking's), as many as `take` of the budget left buys at `tier`, or of the
    tier's own budget (Keep.beyond).

    among: the slots that it may take, of units that lie wholly in it (None: all); places it cannot fill stay empty."""

    take: float = 1.0
    tier: int = FULL
    score: Floats | None = None
    among: Mask | None = None  # [Hkv|1, n]


@dataclass(frozen=True)
class Ranking:
    """Who should survive. First axis Hkv, or 1: one decision for the whole layer. Higher survives, ties to the lower position."""

    score: Floats  # [Hkv|1, n]; a unit's score is the sum over its slots
    protect: Mask | None = None  # [Hkv|1, n]: stays full, inside the budget
    unit: Ints | None = None  # [Hkv|1, n]: slots of one unit share one fate; None: every slot alone
    stages: tuple[Stage, ...] = (Stage(),)
    own: float = 1.0  # below 1 the kv heads share the layer's budget, each sure of this part of its own


class Codec(Protocol):
    """A number format for rows; codecs.pipeline makes one of stages. Groups of `tokens` rows are encoded together; 0: all rows that are coded
    at once.

    It has roundtrip and layout, when every row costs the same, or else encode:
        roundtrip(x)      [m, rows, d], m groups of rows -> the values a reader would decode, same shape
        layout(dim)       -> (bits of codes per row, bytes of scales and zeros per group of rows)
        encode(x)         [m, rows, d] -> Coded: the values, and what every row and group costs
    It may also have:
        bits              nominal bits of a number (else those of the layout)
        at(layer, head)   -> the codec of one kv head, when it was calibrated
        once(dim)         -> bytes that a kv head stores once for all its coded rows
        check(layer, dim) raises WrongUse for a layer, or rows of `dim` numbers, that it has no form for
        outliers          the part of the numbers kept exact, which may cost more than they save
        error(x)          [m, rows, d] -> how far decoding can move each number; None: it is not known"""

    @property
    def tokens(self) -> int: ...


Widths = Codec | tuple[Any, ...] | None  # one codec, several to choose from by level (1, 2, ...), or never coded


@dataclass(frozen=True)
class Codecs:
    """How coded rows are stored; None: that side is never coded. keys: encoded before ("pre") or after ("post") RoPE."""

    k: Widths
    v: Widths
    keys: str = "post"
    ledger: bool = False  # codes outlive a promotion and are reused
    shadow: bool = False  # promotion restores the original from a host copy

    def check(self, layer: Layer) -> None:
        """Raises WrongUse for a layer that one of them has no form for."""
        for widths, dim in ((self.k, layer.key_dim), (self.v, layer.value_dim)):
            for codec in levels(widths):
                if hasattr(codec, "check"):
                    codec.check(layer, dim)

    @property
    def grows(self) -> bool:
        """Whether a coded row may cost more than an exact one: one whose numbers are mostly outliers."""
        return any(getattr(codec, "outliers", 0) > 0 for codec in (*levels(self.k), *levels(self.v)))


class Prefix(Protocol):
    """What a keep may look at before decoding; each is refused unless declared in `needs`. Columns are the live slots, n of them."""

    layer: Layer
    where: tuple[int, int]  # request, layer: for seeds only
    spans: Sequence[Span]  # labelled ranges of positions of the request

    def mass(self) -> Floats: ...  # [Hq, n]: attention mass of all prompt queries on each key; PREFILL_MASS
    def queries(self) -> Floats: ...  # [Hkv, n]: how many prompt queries saw each key
    def window(self, rows: int) -> Floats: ...  # [min(rows, prompt), Hq, n]: attention of the last prompt queries; Window(rows)
    def last_queries(self, rows: int) -> Floats: ...  # [min(rows, prompt), Hkv, G, d], oldest first; QUERIES and Window(rows)
    def wo_norm(self) -> Floats: ...  # [Hq, n]: L1 norm of each query head's output projection of the value; WO_NORM
    def key_norm(self) -> Floats: ...  # [Hkv, n]: L2 norm of the key; KEY_NORM
    def keys(self) -> Floats: ...  # [Hkv, n, d]; KEYS
    def values(self) -> Floats: ...  # [Hkv, n, dv]; VALUES
    def q_stats(
        self,
    ) -> tuple[Floats, Floats]: ...  # mean [Hq, d], covariance [Hq, d, d] of the prompt queries before RoPE; Q_STATS
    def future(self) -> Floats: ...  # [Hkv, n]: dense attention that all decode steps pay, summed over the group; FUTURE
    def by_kv_head(self, x: Floats) -> Floats: ...  # [Hq, n] -> [Hkv, n], summed over the group


@dataclass(frozen=True)
class Learned:
    """What a learned indexer says of N steps and of P pages of one token: geometry.Indexer, its rows of these. One for the whole layer."""

    q: Floats  # [N, H, d]
    w: Floats  # [N, H]
    k: Floats  # [P, d]
    score_fn: str


@dataclass(frozen=True)
class View:
    """What a read policy may look at: N steps at once, P page versions, each to be scored from (query, page) alone.

    page [Hkv, P] is the page's id (-1: padding); a page that still grows appears once per length, so ids may repeat."""

    t: Ints  # [N] positions of the queries
    q: Floats  # [N, Hkv, G, d]
    page: Ints  # [Hkv, P]
    summary: dict[str, NDArray[Any]]  # arrays [Hkv, P, ...] made by the index
    where: tuple[int, ...]  # request, layer, first kv head: for seeds only
    truth: Callable[[str], Floats] | None = None  # truth("mass" | "logit") -> [N, Hkv, G, P]; only with TRUTH
    learned: Learned | None = None  # only with INDEX, which needs pages of one token
    before: Floats | None = None  # [N, Hkv, G, d]: the queries of the attention layer before, heads as here; only with BEFORE


class Index(Protocol):
    """A page's summary and what it says about a query. bound: score is never below the best true q·k of the page, to float64.

    It may also have (boxes has all of them):
        keys: "exact" | "recon" | "expanded"    summarise is given the captured keys, the keys as they are stored, or the captured keys and
                                                error= [m, S, d], how far each may lie from the stored one
        fit(keys [n, d]) -> {name: array}       what it must know of a kv head's prompt; summarise and score are given it, too (or None)
        once(dim) -> int                        numbers stored once per kv head, and read at every ranking
        check(dim)                              raises WrongUse for keys it has no form for"""

    @property
    def bound(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    def summarise(
        self, keys: Floats, valid: Mask, closed: Mask
    ) -> dict[str, NDArray[Any]]: ...  # [m, S, d], [m, S], [m] -> [m, ...]
    def score(self, q: Floats, summary: dict[str, NDArray[Any]]) -> Floats: ...  # [N, Hkv, G, d] -> [N, Hkv, G, P], unscaled
    def numbers(self, dim: int) -> int: ...  # stored numbers per page


class Part(metaclass=Checked):
    """Base of every policy: gives `>>`. A policy is a frozen dataclass of parameters in a file of its own name."""

    kind: ClassVar[str] = ""
    act: ClassVar[str] = ""  # one line: what it does
    paper: ClassVar[str] = ""  # where it comes from
    presets: ClassVar[
        dict[str, dict[str, Any]]
    ] = {}  # official defaults: {name: {"source": ..., "claim": ..., parameter: value}}

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    def looks(self, step: int) -> bool:
        """Whether the rows beside and the queries that `needs` names are looked at after this step; with ATTENTION, its probabilities too,
        which are billed then."""
        return True

    def beside(self, chain: Chain) -> None:
        """Raises WrongUse when this part cannot do its work next to the others of the chain."""

    def __rshift__(self, other: Part | Chain) -> Chain:
        return Chain((self,)) >> other


class Keep(Part):
    """What survives to the next step.

    With ALL_LAYERS in needs the layers share one budget: the rows of all of them are ranked together by what `start` says, which is
    told the budget that each would have alone, and every kv head is cut to as many rows as it won."""

    kind = "keep"
    hold: Hold | None = None
    codecs: Codecs | None = None  # only for one that decides keep and store together
    beyond: ClassVar[Mapping[int, Hold]] = MappingProxyType({})  # budgets of tiers outside the device: {HOST: ..., SSD: ...}
    joint: bool = False  # the kv heads share one set or one budget: they cannot be given policies of their own

    def __post_init__(self) -> None:
        if isinstance(self.hold, tokens):
            held = self.protected(self.hold.n)
            expect(self, "hold", held <= self.hold.n, f"at least the {held} tokens that it protects")

    def protected(self, limit: int) -> int:
        """Of `limit` tokens, how many are held whatever their score; refused when that is more than the limit."""
        return 0

    def pinned_positions(self, spans: Sequence[Span]) -> list[int]:
        """Positions that are held whatever their score, beside those that `protected` counts. Raises WrongUse for spans that are not there."""
        return []

    def layers(self, hold: int, prompt: int, count: int) -> Floats | None:
        """Real-valued tokens of each of the model's `count` attention layers, `hold` on average; None: every layer gets `hold`."""
        return None

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        """The state, and the cut after prefill (None: no cut)."""
        raise NotImplementedError

    def step(self, state: State, seen: Seen) -> Ranking | None:
        """After the attention of a step: who should survive it (None: no cut now)."""
        raise NotImplementedError


class Store(Part):
    """At what fidelity a kept row is stored. exact_layers: attention layers that it leaves alone, as many first as last ones."""

    kind = "store"
    exact_layers: int = 0

    @property
    def codecs(self) -> Codecs | None:
        raise NotImplementedError

    def start(self, prefix: Prefix, seen: Seen) -> State:
        """What it remembers, made after prefill and before any cut: its slots stay aligned with the live ones, as a keep's do."""
        return State()

    def place(self, seen: Seen) -> tuple[Mask | Levels, Mask | Levels]:
        """[Hkv, n] twice: which keys and which values are coded from now on (whole groups, once coded always coded). bool, or with codecs
        of several widths u8: 0 as it is, 1 the first, 2 the second, ... What is coded already keeps its width."""
        raise NotImplementedError

    def beside(self, chain: Chain) -> None:
        keep = chain.part("keep")
        if keep is not None and keep.codecs is not None:
            raise WrongUse(f"{type(keep).__name__} >> {type(self).__name__}: {type(keep).__name__} decides itself what is coded")


Sums = dict[str, NDArray[np.float64]]


class Estimate(Part):
    """What stands in the softmax for rows that were evicted: rows that never existed (decision 0009).

    The engine adds every row that a cut drops, bills the numbers and joins what is said to the attention over what was read."""

    kind = "estimate"

    def empty(self, key_dim: int, value_dim: int) -> Sums:
        """What is kept of one kv head when nothing is evicted, `n`, how many rows that are, among it; its numbers are what is billed."""
        raise NotImplementedError

    def add(self, sums: Sums, keys: Floats, values: Floats) -> Sums:
        """The same with m more rows, keys [m, d] and values [m, dv] as captured."""
        raise NotImplementedError

    def says(self, sums: Sums, q: Floats, scale: float) -> tuple[Floats, Floats]:
        """sums of N steps, stacked, queries [N, G, d] -> (log of the estimated sum of exp(scale q·k) [N, G], -inf where nothing is
        evicted, and the output over these rows [N, G, dv])."""
        raise NotImplementedError

    def check(self, layer: Layer) -> None:
        """Raises WrongUse for a layer it has no form for."""
        if layer.softcap:
            raise WrongUse(f"{type(self).__name__}: layer {layer.id} caps its logits; only sums of exp(scale q·k) are estimated")

    def beside(self, chain: Chain) -> None:
        keep = chain.part("keep")
        if keep is None or keep.hold is None:
            raise WrongUse(
                f"{type(self).__name__}: nothing is evicted before it; put a keep with a budget first, h2o(hold=share(0.2)) >> …"
            )
        if chain.codecs is not None:
            raise WrongUse(f"{type(self).__name__}: stands for rows as captured; leave out the part of the chain that codes rows")


@dataclass(frozen=True)
class Forced:
    """Pages read whatever their score: the newest, those touching [0, sinks), those touching the last `recent` tokens."""

    tail: bool = False
    sinks: int = 0
    recent: int = 0


@dataclass(frozen=True, kw_only=True)
class Read(Part):
    """Which pages a query loads: a ranking here, the budget and the forced pages applied by the engine."""

    kind = "read"
    read: Budget
    page: int = 16
    sinks: int = 0
    recent: int = 0
    tail: Literal["forced", "free"] = "free"
    refresh: int | Literal["never"] = 1

    index = None  # an Index, when pages are ranked by their summaries
    heads = "each"
    tile = None
    shards = None

    def __post_init__(self) -> None:
        expect(self, "page", 1 <= self.page <= LARGEST_PAGE, PAGE_SIZES)
        expect(self, "page", self.page == 1 or INDEX not in self.needs, "1 with a learned indexer, which scores tokens")
        expect(self, "sinks", self.sinks >= 0, "0 tokens or more")
        expect(self, "recent", self.recent >= 0, "0 tokens or more")
        expect(self, "refresh", self.refresh == "never" or self.refresh >= 1, 'a number of steps, 1 or more, or "never"')

    @property
    def forced(self) -> Forced:
        return Forced(self.tail == "forced", self.sinks, self.recent)

    def score(self, view: View) -> Floats:
        """[N, Hkv, G, P], higher is read first; no state."""
        raise NotImplementedError

    def index_row_bytes(self, dim: int, itemsize: int) -> int:
        """With INDEX in needs: bytes of a token's index key of `dim` numbers, stored and scanned once for the layer. itemsize: of the dtype that
        is billed."""
        raise NotImplementedError


KINDS = ("keep", "store", "estimate", "read")


@dataclass(frozen=True)
class Chain:
    """keep >> store >> estimate >> read, each at most once and in this order."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        ranks = [KINDS.index(p.kind) for p in self.parts]
        if ranks != sorted(set(ranks)):
            shown = " >> ".join(f"{type(p).__name__} ({p.kind})" for p in self.parts)
            raise WrongUse(f"{shown}: the order is keep >> store >> estimate >> read, each at most once")
        for part in self.parts:
            part.beside(self)

    def __rshift__(self, other: Part | Chain) -> Chain:
        if not isinstance(other, (Part, Chain)):
            return NotImplemented
        return Chain(self.parts + (other.parts if isinstance(other, Chain) else (other,)))

    def part(self, kind: str) -> Any:
        """The keep, store or read of this chain, or None."""
        return next((p for p in self.parts if p.kind == kind), None)

    @property
    def codecs(self) -> Codecs | None:
        """How rows are coded, by the store or by a keep that stores too; None: they stay exact."""
        store, keep = self.part("store"), self.part("keep")
        return (store.codecs if store else None) or (keep.codecs if keep else None)

    def with_part(self, part: Part) -> Chain:
        return Chain(tuple(part if p.kind == part.kind else p for p in self.parts))


__all__ = [
    "ALL_LAYERS", "ATTENTION", "BEFORE", "CODED", "FULL", "FUTURE", "GONE", "HOST", "INDEX", "K_PRE", "KEYS", "KEY_NORM", "KINDS",
    "PREFILL_MASS", "QUERIES", "Q_STATS", "TRUTH", "VALUES", "WO_NORM", "Budget", "Chain", "Codec", "Codecs", "Estimate", "Forced", "Hold",
    "Index", "Keep", "Layer", "Learned", "Levels", "Need", "Part", "Prefix", "Ranking", "Read", "SSD", "Sample", "Seen", "Span", "Stage",
    "State", "Store", "Sums", "View", "Window", "expect", "older", "replace", "save_calibration",
]  # fmt: skip
