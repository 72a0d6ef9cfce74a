"""What every analysis has: a command, a page of charts, and numbers in its README that the command computes again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import altair as alt
import polars as pl

from analyses.cells import EVERY, FEWEST, WHOLE
from kvsim.errors import KvsimError
from kvsim.metrics import interval
from kvsim.report.export import write_png
from kvsim.report.html import Figure, Section, Table, render
from kvsim.trace.open import open_trace

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- numbers: run.py --write -->", "<!-- end -->"

Told = dict[str, list[str]]  # question -> a sentence per cell


@dataclass(frozen=True)
class Question:
    """One chart, of the frame of the same name: what it asks, how to read it, what is not drawn, what a cell's rows say."""

    title: str
    how: str
    absent: str
    say: Callable[[pl.DataFrame], str]
    draw: Callable[[pl.DataFrame, Sequence[str]], Any]


@dataclass(frozen=True)
class Analysis:
    """measure: traces -> frames by the questions' names, each with a column cell, and `cells` (cell, contexts, steps, layers); bundled: a
    folder for what is made on the fly -> the traces that the README's numbers are of; labels: whatever legends name."""

    name: str
    title: str
    lead: str
    questions: Mapping[str, Question]
    measure: Callable[[Sequence[Path]], Any]
    bundled: Callable[[Path], list[Path]]
    labels: Sequence[str]

    @property
    def readme(self) -> Path:
        return ROOT / "analyses" / self.name / "README.md"

    def sentences(self, found: Any) -> Told:
        """What the frames say, one sentence per question and cell; every number in it is computed."""
        parts = {name: getattr(found, name).group_by("cell", maintain_order=True) for name in self.questions}
        return {name: [f"{cell}: {self.questions[name].say(mine)}." for (cell,), mine in of] for name, of in parts.items()}

    def figures(self, found: Any, told: Told) -> list[Figure]:
        out = []
        for name, q in self.questions.items():
            frame: pl.DataFrame = getattr(found, name)
            chart: alt.TopLevelMixin = q.draw(frame, frame["cell"].unique(maintain_order=True).to_list())
            out.append(Figure(name, q.title, q.how, chart, " ".join([*told[name], q.absent]), frame))
        return out

    def sections(self, found: Any, told: Told, traces: Sequence[Path], given: Sequence[Path] = ()) -> list[Section]:
        """The charts, and what they rest on; given: those of the traces that stood in the command."""
        return [Section("Measurements", blocks=self.figures(found, told)), self.rests(found.cells, traces, given)]

    def rests(self, cells: pl.DataFrame, traces: Sequence[Path], given: Sequence[Path] = ()) -> Section:
        opened = [open_trace(path) for path in traces]
        models = sorted({str(t.manifest["source"].get("model")) for t in opened})
        weights = sorted({str(x) for t in opened if (x := t.manifest["source"].get("weight_format"))})
        rows = [(r["cell"], str(r["contexts"]), str(r["steps"]), ", ".join(map(str, r["layers"]))) for r in cells.to_dicts()]
        few = bool((cells["contexts"] < interval.FEWEST).any())
        notes = [
            f"Steps of a role are all replayed when there are at most {WHOLE}, else every {EVERY}th; a role with fewer than {FEWEST} is left "
            "out. Roles are never averaged together.",
            f"No intervals: fewer than {interval.FEWEST} contexts of a cell say nothing about other contexts." if few else "",
        ]
        facts = [
            ("model", ", ".join(models)),
            ("weights", ", ".join(weights)),
            ("traces", ", ".join(t.id for t in opened)),
            ("command", " ".join([f"python analyses/{self.name}/run.py", *map(str, given)])),
            ("replay", "open loop: queries come from the run with full attention, so no task was solved with these policies"),
        ]
        table = Table("Cells", ("cell", "contexts", "steps", "layers"), rows, notes=[n for n in notes if n])
        return Section("What this rests on", facts=facts, blocks=[table])

    def rewritten(self, readme: str, told: Told) -> str:
        """The README with these sentences between its two marks."""
        head, rest = readme.split(BEGIN)
        bullets = {name: "\n".join(f"* {line}" for line in lines) for name, lines in told.items()}
        text = "\n\n".join(f"**{self.questions[name].title}**\n\n{lines}" for name, lines in bullets.items())
        return f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def main(analysis: Analysis, doc: str) -> int:
    """The command of an analysis; without traces the bundled ones, and 1 when a number is not the README's."""
    ask = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    page = ROOT / "build" / f"{analysis.name}.html"
    ask.add_argument("trace", nargs="*", type=Path, help="traces to measure (default: the bundled ones)")
    ask.add_argument("-o", "--out", type=Path, default=page, help=f"the page (default: build/{page.name})")
    ask.add_argument("--png", type=Path, help="a folder for the charts as images")
    ask.add_argument("--write", action="store_true", help="put the numbers into README.md")
    args = ask.parse_args()
    try:
        with TemporaryDirectory() as scratch:
            return _answer(analysis, args, args.trace or analysis.bundled(Path(scratch)))
    except KvsimError as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None


def _answer(analysis: Analysis, args: argparse.Namespace, traces: list[Path]) -> int:
    found = analysis.measure(traces)
    told = analysis.sentences(found)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sections = analysis.sections(found, told, traces, args.trace)
    args.out.write_text(render(analysis.title, [analysis.lead], sections, list(analysis.labels)), encoding="utf-8")
    if args.png:
        write_png(analysis.figures(found, told), args.png)
    said = [line for lines in told.values() for line in lines]
    print(*said, f"wrote {args.out}", sep="\n")
    if args.trace:
        return 0
    if args.write:
        analysis.readme.write_text(analysis.rewritten(analysis.readme.read_text("utf-8"), told), encoding="utf-8")
    readme = analysis.readme.read_text("utf-8")
    moved = [line for line in said if line not in readme]
    for line in moved:
        print(f"not in {analysis.readme.name}, so a number moved: {line}", file=sys.stderr)
    return 1 if moved else 0
