"""QEvict: windows of tokens ranked by attention every `period` steps; the best stay full, the next are coded, the rest go.

A window is scored by the attention it received (card C4); sinks, recent tokens and what does not fill a window are never scored and stay
full. The first demotion codes a window from the original values, later ones reuse the codes, unless `requantise` says otherwise.

Of the notes only sums of attention over the layer's heads are QEvict's own; the other scores are those of SnapKV, CriticalKV and
DefensiveKV, taken over the queries since the last cut and used to rank windows. docs/definitions.md has every formula."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvsim.codecs.minmax import uniform
from kvsim.codecs.pipeline import grouped, pipeline
from kvsim.geometry import Need
from kvsim.policies import scores
from kvsim.policies.parameters import written
from kvsim.policies.protocol import (
    ATTENTION,
    CODED,
    FULL,
    HOST,
    K_PRE,
    PREFILL_MASS,
    SSD,
    WO_NORM,
    Chain,
    Codecs,
    Floats,
    Hold,
    Ints,
    Keep,
    Mask,
    Prefix,
    Ranking,
    Seen,
    Stage,
    State,
    Window,
    expect,
)  # fmt: skip
from kvsim.units import share, tokens

SUMS = ("cum", "critical")  # scores that add up from cut to cut; the others look at the queries since the last one only


@dataclass(frozen=True, kw_only=True)
class qevict(Keep):
    act = "every few steps keeps the most attended windows full, codes the next and evicts the rest"
    paper = "QEvict, arXiv 2608.05326, known from notes on it only"

    hold: Hold = field(default=share(0.2))
    quant_share: float = 0.7  # of the budget beside what is protected, in bytes
    window: int = 8
    period: int = 8
    bits: int = 2
    sinks: int = 5
    recent: int = 32
    offset: int = 0  # tokens between the sinks and the first window
    promotion: Literal["ledger", "shadow", "never"] = "ledger"
    decay: float = 1.0
    host: Hold | None = None  # budgets of their own for coded windows that leave the device
    ssd: Hold | None = None
    score: Literal["cum", "snapkv", "defensive", "critical"] = "cum"
    scope: Literal["layer", "head"] = "layer"
    init: Literal["last", "window", "column", "zeros"] = "last"
    score_from: Literal["birth", "age"] = "age"
    domain: Literal["pre", "post"] = "pre"
    requantise: Literal["never", "each"] = "never"

    def __post_init__(self) -> None:
        expect(self, "quant_share", 0 <= self.quant_share <= 1, "a part of the budget, 0 to 1")
        expect(self, "window", self.window >= 1, "1 token or more")
        expect(self, "period", self.period >= 1, "1 step or more")
        expect(self, "bits", 1 <= self.bits <= 8, "1 to 8 bits")
        expect(self, "sinks", self.sinks >= 0, "0 tokens or more")
        expect(self, "recent", self.recent >= 0, "0 tokens or more")
        expect(self, "offset", 0 <= self.offset < self.window, f"0 tokens or more, fewer than window={self.window}")
        expect(self, "decay", 0 < self.decay <= 1, "a factor per event, above 0 and at most 1")
        expect(self, "decay", self.decay == 1 or self.score in SUMS, f'1 with score="{self.score}": it starts anew at cuts')
        rows = self.init != "column" or self.score != "defensive"
        expect(self, "init", rows, '"last", "window" or "zeros" with score="defensive", which looks at single queries')
        away = self.host is not None or self.ssd is not None
        expect(self, "promotion", not away or self.promotion != "shadow", '"ledger" or "never" with host= or ssd=')
        if isinstance(self.hold, tokens) and (room := self.hold.n - self.sinks - self.offset - self.recent) > 0:
            left = f"at most {room} tokens, what sinks, offset and recent leave of hold={written(self.hold)}"
            expect(self, "window", self.window <= room, left)
        super().__post_init__()

    def protected(self, limit: int) -> int:
        """Sinks, recent tokens, and what is not a whole window at either end, at its most. A share may be less than that (ruling A19):
        it grows with the context, and until it is more all windows go."""
        return 0 if isinstance(self.hold, share) else self.sinks + self.offset + self.recent + self.window - 1

    @property
    def needs(self) -> frozenset[Need]:
        start = {"last": Window(self.period), "window": Window(max(1, self.recent)), "column": PREFILL_MASS, "zeros": ATTENTION}
        wanted = {ATTENTION, start[self.init]} | ({K_PRE} if self.domain == "pre" else set())
        return frozenset(wanted | ({WO_NORM} if self.score in ("critical", "defensive") else set()))

    @property
    def codecs(self) -> Codecs:  # type: ignore[override]  # a field of its base, here derived from bits and window
        keys = pipeline(group=grouped("tokens", self.window), grid=uniform(self.bits))
        values = pipeline(grid=uniform(self.bits))
        reused = self.requantise == "never"
        return Codecs(keys, values, keys=self.domain, ledger=reused, shadow=self.promotion == "shadow")

    @property
    def joint(self) -> bool:  # type: ignore[override]  # a field of its base, here by scope
        return self.scope == "layer"

    @property
    def beyond(self) -> dict[int, Hold]:  # type: ignore[override]  # derived from host and ssd
        """Budgets of tiers outside the device."""
        return {tier: hold for tier, hold in ((HOST, self.host), (SSD, self.ssd)) if hold is not None}

    def beside(self, chain: Chain) -> None:
        if store := chain.part("store"):
            expect(self, "bits", False, f"no store behind it, because it codes rows itself; leave out {type(store).__name__}()")
        keys = getattr(getattr(chain.part("read"), "index", None), "keys", "exact")
        same = self.requantise == "never" or keys == "exact"
        expect(self, "requantise", same, f'"never" with keys="{keys}": an index of what codes decode to cannot follow changes')

    # -------------------------------------------------------------------------------------------- attention
    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        state = State({"fresh": np.zeros(seen.pos.shape if self._own or self.score == "defensive" else (1, seen.pos.shape[1]))})
        if WO_NORM in self.needs:
            state.slots["worth"] = self._worth(seen)
        unit, stop = self._windows(seen)
        state.slots["score"] = np.where(stop <= seen.t + 1, self._born(prefix, state, seen), 0.0)
        state.slots["codes"] = np.zeros(unit.shape, bool)
        return state, self._rank(state, seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        assert seen.a is not None
        eligible, slots = self._eligible(seen), state.slots
        if WO_NORM in self.needs:
            slots["worth"] = np.where(seen.pos == seen.t, self._worth(seen), slots["worth"])
        counted = eligible if self.score_from == "age" else seen.valid[: len(eligible)]
        if self.score == "defensive":
            worst = scores.defensive(seen.a, seen.valid)
            slots["fresh"] = np.where(counted, np.maximum(slots["fresh"], worst), slots["fresh"])
        else:
            slots["fresh"] += np.where(counted, seen.a.mean(axis=1) if self._own else seen.a.mean(axis=(0, 1)), 0.0)
        if (seen.step + 1) % self.period:
            return None
        score, fresh = slots["score"], slots["fresh"]
        now = self.decay * score + fresh if self.score in SUMS else self._since(state, fresh, seen)
        score[:] = np.where(eligible, now, score)
        slots["fresh"] = np.where(eligible | (self.score not in SUMS), 0.0, fresh)
        return self._rank(state, seen)

    def _born(self, prefix: Prefix, state: State, seen: Seen) -> Floats:
        """Scores of the prompt's tokens: what one period's queries would have given them."""
        if self.score == "defensive" and self.init != "zeros":
            rows = prefix.window(self.period if self.init == "last" else max(1, self.recent))
            queries, _, n = rows.shape
            by_kv = rows.reshape(queries, len(seen.pos), -1, n).transpose(1, 0, 2, 3).reshape(len(seen.pos), -1, n)
            return self._since(state, scores.defensive(by_kv, seen.valid), seen)
        mass = self._prompt(prefix, seen)
        shown = prefix.by_kv_head(mass) / prefix.layer.group if self._own else mass.mean(axis=0)[None]
        return shown if self.score in SUMS else self._since(state, shown, seen)

    def _prompt(self, prefix: Prefix, seen: Seen) -> Floats:
        """[Hq, n]: attention of `period` prompt queries, by those that `init` names."""
        if self.init == "last":
            return prefix.window(self.period).sum(axis=0)
        if self.init == "window":
            return prefix.window(max(1, self.recent)).mean(axis=0) * self.period
        if self.init == "column":
            could_see = seen.t + 1 - seen.pos[0]
            if prefix.layer.window is not None:
                could_see = np.minimum(could_see, prefix.layer.window)
            return prefix.mass() / could_see * self.period
        return np.zeros((prefix.layer.q_heads, seen.pos.shape[1]))

    def _since(self, state: State, fresh: Floats, seen: Seen) -> Floats:
        """Scores from the queries since the last cut alone."""
        if self.score == "snapkv":
            return scores.smoothed(fresh, seen.valid)
        by_kv = scores.floored(fresh, np.broadcast_to(self._eligible(seen), fresh.shape)) * state.slots["worth"]
        return by_kv if self._own else by_kv.mean(axis=0)[None]

    def _worth(self, seen: Seen) -> Floats:
        """[Hkv, n]: how much the value of a token that joins now can move the output; for "defensive" as a part of all kv heads'."""
        assert seen.wo_norm is not None
        norm = seen.wo_norm.mean(axis=1)
        if self.score == "critical":
            return norm
        total = norm.sum(axis=0, keepdims=True)
        return np.divide(norm, total, out=np.full(norm.shape, 1 / len(norm)), where=total > 0)

    # -------------------------------------------------------------------------------------------- the cut
    def _rank(self, state: State, seen: Seen) -> Ranking:
        unit, _ = self._windows(seen)
        slots, full = state.slots, 1 - self.quant_share
        score, coded = slots["score"], (seen.k == CODED)[: len(unit)]
        slots["codes"] = coded | slots["codes"] if self.requantise == "never" else coded
        never_coded = ~coded if self.promotion == "never" else None
        # In a sliding layer the oldest window may have lost rows: without codes it stays full or goes.
        codable = slots["codes"] | (self._rows(unit, seen) == self.window)
        moves: Floats | None = None
        first: tuple[Stage, ...] = (Stage(full, FULL, among=never_coded),)
        if self.score == "critical":
            worth = slots["worth"] if self._own else slots["worth"].mean(axis=0)[None]
            moves = scores.critical(score, worth)
            first = (Stage(full / 2, FULL, among=never_coded), Stage(full / 2, FULL, moves, among=never_coded))
        rest = (Stage(self.quant_share, CODED, moves, codable), *(Stage(1.0, tier, moves, codable) for tier in self.beyond))
        return Ranking(score, protect=~self._eligible(seen), unit=unit, stages=(*first, *rest))

    @property
    def _own(self) -> bool:
        """Every kv head decides for itself."""
        return self.scope == "head"

    def _windows(self, seen: Seen) -> tuple[Ints, Ints]:
        """Window of every slot and where it ends, [Hkv or 1, n]; below 0 before the first."""
        first = self.sinks + self.offset
        unit = (seen.pos if self._own else seen.pos[:1]) - first
        unit = unit // self.window
        return unit, first + (unit + 1) * self.window

    def _rows(self, unit: Ints, seen: Seen) -> Ints:
        """How many live slots the window of each slot has."""
        live = np.where(seen.valid[: len(unit)] & (unit >= 0), unit + 1, 0)
        return np.stack([np.bincount(x)[x] for x in live])

    def _eligible(self, seen: Seen) -> Mask:
        """Windows all of whose tokens are older than the recent ones."""
        unit, stop = self._windows(seen)
        return (unit >= 0) & (stop <= seen.t + 1 - self.recent)
