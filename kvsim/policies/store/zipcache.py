"""ZipCache: all rows coded, those that the prompt's last queries attend to in more bits; nothing is evicted.

After the prompt every row is ranked once; then, every `period` steps, the rows since. Older rows keep their width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvsim.codecs.minmax import uniform
from kvsim.codecs.pipeline import grouped, pipeline
from kvsim.codecs.scale import channel_divisor
from kvsim.geometry import Need
from kvsim.policies.protocol import (
    ATTENTION,
    FULL,
    PREFILL_MASS,
    Codecs,
    Floats,
    Ints,
    Levels,
    Mask,
    Prefix,
    Seen,
    State,
    Store,
    Window,
    expect,
)  # fmt: skip
from kvsim.units import whole

HIGH, LOW = 1, 2


@dataclass(frozen=True, kw_only=True)
class zipcache(Store):
    """Deviations from the authors' code (b6932b9): values are scaled and coded per kv head, where it mixes rows of different heads; no random
    early probes, which a trace does not have; the divisors of channels are per width and event."""

    act = "codes all rows, the attended ones in more bits"
    paper = (
        "He et al., ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification, arXiv 2405.14256"
    )
    presets: ClassVar = {
        "thisisbillhe": {
            "source": "ThisisBillhe/ZipCache b6932b9, example of its README; the last prompt queries alone are probes",
            "high": 4, "low": 2, "unimportant": 0.4, "period": 100, "divisor": "tokens",
        },
    }  # fmt: skip

    high: int = 4
    low: int = 2
    unimportant: float = 0.4  # part of the rows of an event that gets `low` bits
    period: int = 100  # steps between events after the prompt
    probes: str = "window"
    window: int = 32  # prompt queries of probes="window"
    divisor: Literal["tokens", "probes"] = "probes"

    def __post_init__(self) -> None:
        for side in ("high", "low"):
            expect(self, side, 1 <= getattr(self, side) <= 8, "1 to 8 bits")
        expect(self, "low", self.low <= self.high, f"at most high={self.high}")
        expect(self, "unimportant", 0 <= self.unimportant <= 1, "a part of the rows, 0 to 1")
        expect(self, "period", self.period >= 1, "1 step or more")
        known = '"window" (the last prompt queries) or "columns" (all of them): random early queries are not in a trace'
        expect(self, "probes", self.probes in ("window", "columns"), known)
        expect(self, "window", self.window >= 1, "1 prompt query or more")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({ATTENTION, PREFILL_MASS if self.probes == "columns" else Window(self.window)})

    @property
    def codecs(self) -> Codecs:
        grids = [uniform(bits) for bits in (self.high, self.low)]
        keys = (pipeline(group=grouped("tokens"), grid=grid) for grid in grids)
        values = (pipeline(scale=channel_divisor(), grid=grid) for grid in grids)
        return Codecs(tuple(keys), tuple(values))

    def looks(self, step: int) -> bool:
        return (step + 1) % self.period == 0

    def start(self, prefix: Prefix, seen: Seen) -> State:
        """The attention that the probes give each row, on average over the divisor."""
        n = seen.pos.shape[1]
        probes = np.arange(n if self.probes == "columns" else min(self.window, seen.t + 1))[::-1]
        mass = prefix.mass() if self.probes == "columns" else prefix.window(self.window).sum(axis=0)
        return State({"score": prefix.by_kv_head(mass) / seen_by(n - 1 - probes, n, self.divisor)})

    def place(self, seen: Seen) -> tuple[Levels | Mask, Levels | Mask]:
        waiting, coded = seen.valid & (seen.k == FULL), seen.valid & (seen.k != FULL)
        if seen.step < 0:
            assert seen.state is not None
            level = self._level(seen.state.slots["score"], waiting)
        elif self.looks(seen.step):
            assert seen.a is not None
            level = self._level(seen.a.sum(axis=1), waiting)
        else:
            return coded, coded
        level[coded] = HIGH  # what is coded keeps its width
        return level, level

    def _level(self, score: Floats, waiting: Mask) -> Levels:
        """u8[Hkv, n]: LOW for the rows of least score, HIGH for the others that wait; of equal ones the lower position is HIGH."""
        out = np.where(waiting, HIGH, 0).astype(np.uint8)
        for h, rows in enumerate(waiting):
            slots = np.flatnonzero(rows)
            order = slots[np.argsort(-score[h, slots], kind="stable")]
            out[h, order[len(order) - whole(self.unimportant * len(order)) :]] = LOW
        return out


def seen_by(probes: Ints, n: int, divisor: str) -> Ints:
    """i64[n]: what sums of attention over `probes` (places of queries among n rows) are divided by. "probes": how many of them see the row;
    "tokens", as the authors have it: all rows from it on, which makes little of early rows when few of the queries are probes."""
    rows = np.arange(n)
    return n - rows if divisor == "tokens" else (probes[:, None] >= rows).sum(axis=0)
