"""What to try: backend × task × budget, chosen by the numbers that the other questions keep, each branch with its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import altair as alt
import numpy as np
import polars as pl

import kvsim
from analyses.closed_loop.run import TABLES
from analyses.figures import Draws, Figures, told
from analyses.reckoning import Reckoning, Sum
from analyses.saving.question import sums as saved
from kvsim.metrics.closed_loop import open_study, scores
from kvsim.metrics.live_study import HIT
from kvsim.report.charts.measure import layered
from kvsim.report.export import write_png
from kvsim.report.html import Figure, Section, Table, write_page

TASKS = {"needle": "one fact in a text", "reversal": "a question that turns", "plain": "text that goes on"}
SCORES, FUSED, ANY = "gives attention weights (eager)", "gives none (fused: SDPA, FlashAttention)", "any"

CODED = "2 bits of everything"  # reads all the evidence, in codes: the one kind of policy that evidence read does not order (closed_loop)
EVIDENCE = {"qevict": "evidence read", "losses": "evidence recall"}
Place = tuple[str, str, str, str]  # question, figure, line, at: the smaller its figure, the better


@dataclass(frozen=True)
class Branch:
    """tried: who competes at this budget."""

    backend: str
    budget: str
    tried: Mapping[str, Place]


@dataclass(frozen=True)
class Choice:
    """Of one branch in one cell. found: output errors; read: the part of the attention on the evidence that is read, where there is any, of
    policies that read exact rows."""

    branch: Branch
    cell: str
    contexts: int
    found: dict[str, Draws]
    read: dict[str, Draws]

    @property
    def lost(self) -> dict[str, Draws]:
        """What decides: the part of the attention on the evidence that is not read, and without evidence the output error. Of these two
        the first orders policies as a running model does where a fact has to be found, the second where text goes on (closed_loop)."""
        return {name: 1 - x for name, x in self.read.items()} or self.found

    @property
    def order(self) -> list[str]:
        """Ties by output error."""
        return sorted(self.lost, key=lambda name: (float(self.lost[name][0]), float(self.found[name][0])))

    @property
    def advice(self) -> str:
        best, *others = self.order
        if self.read and self.read[best][0] < HIT:
            return f"a larger budget: of these none reads half of the attention on the evidence, {best} reads most"
        return best if not others or self.apart else f"{best} or {others[0]}: {self.contexts} contexts do not tell them apart"

    @property
    def apart(self) -> bool:
        best, following = self.order[:2]
        low = told(self.lost[following] - self.lost[best])[1]
        return low is not None and low > 0

    @property
    def evidence(self) -> str:
        best, *others = self.order
        said = {name: f"{name} {self._said(name)}" for name in self.order}
        questions = sorted({place[0] for place in self.branch.tried.values()})
        links = ", ".join(f"[{q}](../{q}/README.md)" for q in questions)
        what = "attention on the evidence that is read" if self.read else "output error"
        also = ", ".join(f"{name} {self.found[name][0]:.3f}" for name in self.order) if self.read else ""
        return (
            f"{what}: {'; '.join(said[name] for name in (best, *others))}"
            + (f". Output error: {also}" if also else "")
            + (f". {CODED} reads all of it, in codes: {solved()}" if self.read and CODED in self.branch.tried else "")
            + f" ({self.contexts} contexts; {links})"
        )

    def _said(self, name: str) -> str:
        return _interval(self.read[name], ".0%") if self.read else _interval(self.found[name], ".3f")


def _interval(draws: Draws, form: str) -> str:
    value, low, high = told(draws)
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _of(question: str, line: str, at: str) -> Place:
    return question, "output error", line, at


FIFTH = "a fifth of the tokens held"
BRANCHES = (
    Branch(
        SCORES,
        "a twentieth of the tokens held",
        {"QEvict": _of("qevict", "QEvict", "5 %"), "H2O": _of("qevict", "eviction, H2O", "5 %")},
    ),
    Branch(
        SCORES,
        FIFTH,
        {
            "QEvict": _of("qevict", "3 tiers", "8"),
            "QEvict with windows of 32": _of("qevict", "3 tiers", "32"),
            "H2O": _of("qevict", "eviction, H2O", "20 %"),
            "sinks and recent tokens": _of("losses", "recent", "pools"),
            CODED: _of("qevict", "2 bits of everything, KIVI", "20 %"),
        },
    ),
    Branch(
        FUSED,
        FIFTH,
        {
            "sinks and recent tokens": _of("losses", "recent", "pools"),
            CODED: _of("qevict", "2 bits of everything, KIVI", "20 %"),
        },
    ),
    Branch(
        SCORES,
        "three tenths held, 128 tokens of them read",
        {"QEvict >> quest": _of("losses", "QEvict", "chain"), "H2O >> quest": _of("losses", "h2o", "chain")},
    ),
    Branch(
        FUSED,
        "128 tokens read, whatever is held",
        {
            "quest over everything": _of("losses", "everything", "chain"),
            "streaming_llm >> quest": _of("losses", "streaming_llm", "chain"),
        },
    ),
)


def choices() -> list[Choice]:
    """Of every branch, in every cell that all its questions have measured on enough contexts."""
    kept = {n: cells_of(n) for n in sorted({place[0] for b in BRANCHES for place in b.tried.values()})}
    out = []
    for branch in BRANCHES:
        needed = [kept[place[0]] for place in branch.tried.values()]
        for cell in [c for c in needed[0] if all(c in other for other in needed)]:
            found = {name: kept[q][cell](figure, line, at) for name, (q, figure, line, at) in branch.tried.items()}
            seen = {name: _read(kept[q][cell], EVIDENCE[q], line, at) for name, (q, _, line, at) in branch.tried.items()}
            exact = {name: x for name, x in seen.items() if name != CODED}
            read = {name: x for name, x in exact.items() if x is not None}
            out.append(Choice(branch, cell, len(needed[0][cell].contexts), found, read if len(read) == len(exact) else {}))
    return out


def solved() -> str:
    """What codes of everything are worth where a fact has to be found, from the closed loop, which has needles."""
    found = scores(open_study(TABLES / "512")).filter(pl.col("mode") == "forced", pl.col("task") == "needle")
    [share] = found.filter(pl.col("policy").str.contains("kivi(k_bits=2", literal=True))["score"].to_list()
    return f"a running model finds {share:.0%} of the needles with it ([closed loop](../closed_loop/README.md))"


def _read(f: Figures, figure: str, line: str, at: str) -> Draws | None:
    return f(figure, line, at) if f.has(figure, line, at) and np.isfinite(f(figure, line, at)[0]) else None


def cells_of(question: str) -> dict[str, Figures]:
    """Answers, and of text that goes on all that is fed: what a model says is what a policy must not change."""
    kept = import_module(f"analyses.{question}.question").QUESTION.kept
    return {f.cell: f for f in kept.figures() if f.cell.endswith("answer") or f.cell.startswith("plain")}


@dataclass(frozen=True)
class Decision(Reckoning):
    """A page of branches instead of sums."""

    def block(self) -> str:
        head = "| backend | task | budget | try | because |\n|---|---|---|---|---|\n"
        rows = [f"| {c.branch.backend} | {_task(c)} | {c.branch.budget} | **{c.advice}** | {c.evidence} |" for c in choices()]
        times = [f"* {s.said}: {s.number}, {s.why}. **{s.verdict[0].upper()}{s.verdict[1:]}**." for s in saved()]
        missing = ", ".join(sorted(set(TASKS) - {c.cell.split("/")[0] for c in choices()}))
        left = f"\n\nNot decided, for want of contexts: {missing}. Measure yours with `--trace`." if missing else ""
        return (
            f"{head}{chr(10).join(rows)}{left}\n\n**What it is worth in time** ([saving](../saving/README.md))\n\n{chr(10).join(times)}"
            f"\n\nCommand: `{self.command}`."
        )

    def page(self, out: Path, png: Path | None = None) -> None:
        made = choices()
        figures = list(self.charts([]))
        rows = [(c.branch.backend, _task(c), c.branch.budget, c.advice, c.evidence.split(" (")[0]) for c in made]
        columns = ("backend", "task", "budget", "try", "because")
        table = Table("Branches", columns, rows, notes=self.notes, words=columns)
        sections = [
            Section("Decide", blocks=[table]),
            Section("Evidence", blocks=figures),
            Section("What this rests on", facts=[("command", self.command), ("kvsim", kvsim.__version__)]),
        ]
        write_page(out, self.title, [self.lead], sections)
        if png:
            write_png(figures, png)


def _task(choice: Choice) -> str:
    return f"{TASKS[choice.cell.split('/')[0]]} ({choice.cell})"


LOSES = {True: "attention on the evidence not read", False: "output error (relative L2)"}  # by whether there is evidence
MOST = 190  # pixels of a panel: three with their names fill a page


def charts(every: Sequence[Sum]) -> list[Figure]:
    """A row of panels for each branch, a panel for each task."""
    del every
    rows = [
        (f"{c.branch.budget} · {c.branch.backend}", c.cell, LOSES[bool(c.read)], name, *told(draws))
        for c in choices()
        for name, draws in c.lost.items()
        if np.isfinite(draws[0])
    ]
    frame = pl.DataFrame(rows, schema=["branch", "cell", "measure", "policy", "lost", "low", "high"], orient="row")
    panels = [
        alt.hconcat(
            *(_panel(one) for _, one in mine.group_by("cell", maintain_order=True)),
            spacing=24,
            title=alt.Title(str(branch), fontSize=13, offset=10),
        )
        for (branch,), mine in frame.group_by("branch", maintain_order=True)
    ]
    chart = alt.vconcat(*panels, spacing=30, description="What every policy of every branch loses, a panel for each task.")
    how = (
        "The smaller the better; the best on top. Bars are 95 % intervals over contexts. Codes of everything read all the evidence, so "
        "they stand where text goes on alone. Not drawn: full attention, which loses nothing, and the oracle, which nobody can have."
    )
    return [Figure("branches", "Who loses least at a budget?", how, chart, "", frame)]


def _panel(mine: pl.DataFrame) -> alt.LayerChart:
    """One task of one branch."""
    cell, measure = mine.row(0, named=True)["cell"], mine.row(0, named=True)["measure"]
    shares = measure == LOSES[True]
    order = mine.sort("lost")["policy"].to_list()
    y = alt.Y("policy:N", sort=order, title=None, axis=alt.Axis(labelLimit=180, minExtent=150))
    scale = alt.Scale(domain=[0, 1]) if shares else alt.Scale(zero=True)
    x = alt.X(
        "lost:Q",
        title=measure,
        scale=scale,
        axis=alt.Axis(format=".0%", values=[0, 0.5, 1]) if shares else alt.Axis(format="~g", tickCount=4),
    )
    tip = [alt.Tooltip("policy:N"), *(alt.Tooltip(f"{n}:Q", format=".3~g") for n in ("lost", "low", "high"))]
    base = alt.Chart(mine.drop("branch", "cell", "measure")).encode(y=y, tooltip=tip)
    bars = base.mark_rule(aria=False).encode(x=alt.X("low:Q", title=measure), x2="high:Q")
    points = base.mark_point(filled=True, size=60, opacity=1, color="#0072B2", aria=False).encode(x=x)
    title = alt.Title(TASKS[cell.split("/")[0]], subtitle=cell, fontSize=12, fontWeight="normal", subtitleFontSize=11, offset=8)
    return layered(bars, points, width=MOST, height=26 * len(order), title=title)


QUESTION = Decision(
    name="decision",
    title="What to try",
    lead="Which policy to try first, by what your attention kernel gives, what your task is and what you can afford. Every line is chosen "
    "by numbers that the other "
    "questions keep, and changes with them.",
    sums=list,
    charts=charts,
    notes=(
        "Where a fact has to be found, who reads most of the attention on it; in text that goes on, the least output error: what orders "
        "policies as a running model does (closed_loop). Where the interval of the difference to the next one reaches 0, both are named.",
        "Open loop, on one small model: what to try first, not what to ship.",
    ),
)
