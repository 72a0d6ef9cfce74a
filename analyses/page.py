"""A question's page: claims and verdicts, its charts, and what they rest on; one file, by the report's own writer."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from analyses import words
from analyses.contexts import EVERY, FEW_STEPS, WHOLE
from analyses.figures import judge
from analyses.question import Numbers, Question
from kvsim.metrics.interval import FEWEST
from kvsim.report.export import write_png
from kvsim.report.html import Section, Table, write_page


def write(question: Question, mine: Numbers, out: Path, command: str, every: bool = False, png: Path | None = None) -> None:
    """Findings, charts, claims with their numbers, cells. every: cells with too few contexts for an interval are shown, too."""
    cells = mine.figures(every)
    frame = pl.concat([f.frame() for f in cells])
    there = set(frame["figure"])
    figures = [
        c.figure(frame) for c in question.charts if there.intersection(c.figures)
    ]  # a user's traces may have none of a chart's
    judged = [(c, judge(c, cells)) for c in question.claims]
    found = [f"{text}." if text[-1] != "." else text for c, of in judged if (text := words.finding(c, of))]
    claims = [
        f"The notes: {c.notes} {words.numbers(c, of)} {words.read_as(c)} {words.verdict(of)}".replace("**", "")
        for c, of in judged
    ]
    tables = (
        [Table(question.title, *question.table(cells)[:2], notes=question.table(cells)[2])] if question.table and cells else []
    )
    counted = Table("Cells", ("cell", "contexts"), [(f.cell, str(len(f.contexts))) for f in cells], notes=_notes(mine))
    facts = [
        ("command", command),
        ("model", "; ".join(mine.models)),
        ("kvsim", mine.version),
        ("traces", ", ".join(f"{name} {digest[:8]}" for name, digest in mine.digests.items())),
        ("replay", "open loop: queries come from the run with full attention, so no task was solved with these policies"),
    ]
    sections = [
        Section("Found", text=found or ["Nothing: no cell has enough contexts."], blocks=tables),
        Section("Measurements", blocks=figures),
        Section("Claim by claim", text=claims),
        Section("What this rests on", facts=facts, blocks=[counted]),
    ]
    write_page(out, question.title, [question.lead], sections, list(question.labels))
    if png:
        write_png(figures, png)


def _notes(mine: Numbers) -> list[str]:
    few = f"A cell with fewer than {FEWEST} contexts has no interval and no verdict: it says nothing about other contexts."
    notes = [
        f"Steps of a role are all replayed when there are at most {WHOLE}, else every {EVERY}th; a role with fewer than {FEW_STEPS} is left "
        "out. Roles are never averaged together.",
        "Intervals: 95 % percentile bootstrap over whole contexts, the same draws for every figure of a cell.",
    ]
    return [*notes, few] if any(len(f.contexts) < FEWEST for f in mine.figures(few=True)) else notes
