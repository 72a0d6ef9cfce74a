"""Questions that need no trace: published or computed numbers held against arithmetic, the engine's own parts or a cost model, all worked out
again each time, so nothing is kept and nothing can be stale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvsim
from analyses.contexts import ROOT
from analyses.figures import HOLDS, NOT, OPEN, UNTOLD
from kvsim.report.export import write_png
from kvsim.report.html import Figure, Section, Table, write_page

EQUAL, AT_MOST, AT_LEAST, MORE, OPEN_ENDED = "is", "is at most", "is at least", "is more than", "is left open"
NEAR = 0.01  # "is" allows so much of the published number: it was printed rounded
MANY = {HOLDS: "hold", NOT: "do not hold", UNTOLD: UNTOLD, OPEN: OPEN}  # verdicts of several


@dataclass(frozen=True)
class Sum:
    """One published number and the same worked out here.

    where: the place; said: the statement in our words; published: its number (None: it has none), told as `form`; found: what it comes to;
    kind: how the two must lie; why: what the difference, or the agreement, rests on; low, high: the interval of `found`, where it has one."""

    where: str
    said: str
    published: float | None
    found: float
    why: str
    form: str = ",.2f"
    kind: str = EQUAL
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        if self.kind == OPEN_ENDED or self.published is None:
            return OPEN
        low, high = (self.found if x is None else x for x in (self.low, self.high))
        if self.kind == EQUAL:
            inside = (
                low <= self.published <= high if self.low is not None else math.isclose(self.found, self.published, rel_tol=NEAR)
            )
            return HOLDS if inside else NOT
        if self.kind == AT_MOST:
            return HOLDS if high <= self.published else NOT if low > self.published else UNTOLD
        if self.kind == MORE:
            return HOLDS if low > self.published * (1 + NEAR) else NOT
        return HOLDS if low >= self.published else NOT if high < self.published else UNTOLD

    @property
    def number(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{self.low:{self.form}}, {self.high:{self.form}}]"
        return f"{self.found:{self.form}}{interval}"

    @property
    def told(self) -> str:
        """The published number, as it must lie: at least 5.00."""
        words = "" if self.kind in (EQUAL, OPEN_ENDED) else f"{self.kind.removeprefix('is ')} "
        return "no number" if self.published is None else f"{words}{self.published:{self.form}}"


@dataclass(frozen=True)
class Reckoning:
    """sums: all of them, in order; charts: theirs; notes: what the numbers rest on, a line each."""

    name: str
    title: str
    lead: str
    sums: Callable[[], Sequence[Sum]]
    charts: Callable[[Sequence[Sum]], Sequence[Figure]]
    notes: Sequence[str]

    @property
    def folder(self) -> Path:
        return ROOT / "analyses" / self.name

    @property
    def command(self) -> str:
        return f"python -m analyses {self.name}"

    def block(self) -> str:
        """What stands between the marks of the README: how many hold, and a row for each."""
        sums = self.sums()
        counted = [f"{n} {MANY[word] if n > 1 else word}" for word in MANY if (n := sum(s.verdict == word for s in sums))]
        rows = [f"| {s.where} | {s.said} | {s.told} | {s.number} | **{s.verdict}** | {s.why} |" for s in sums]
        head = "| where | says | published | worked out | verdict | because |\n|---|---|---|---|---|---|\n"
        return f"Of {len(sums)}: {', '.join(counted)}.\n\n" + head + "\n".join(rows) + f"\n\nCommand: `{self.command}`."

    def page(self, out: Path, png: Path | None = None) -> None:
        sums = self.sums()
        figures = list(self.charts(sums))
        rows = [(s.where, s.said, s.told, s.number, s.verdict, s.why) for s in sums]
        columns = ("where", "says", "published", "worked out", "verdict", "because")
        table = Table("Every number", columns, rows, notes=self.notes, words=("says", "because"))
        sections = [
            Section("Measurements", blocks=figures),
            Section("Number by number", blocks=[table]),
            Section("What this rests on", facts=[("command", self.command), ("kvsim", kvsim.__version__)]),
        ]
        write_page(out, self.title, [self.lead], sections)
        if png:
            write_png(figures, png)
