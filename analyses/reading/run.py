"""python analyses/reading/run.py [TRACE ...] [-o PAGE] [--write]: what is reading by bounds worth? Four charts, each with its numbers.

Without traces: the bundled ones, and exit 1 when a number is not the README's; --write puts them there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analyses.reading import charts
from analyses.reading.measure import EVERY, FEWEST, WHOLE, Found, measure
from analyses.reading.words import ABSENT, HOW, sentences
from kvsim.errors import KvsimError
from kvsim.metrics import interval
from kvsim.report.export import write_png
from kvsim.report.html import Figure, Section, Table, render
from kvsim.trace.open import open_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUNDLED = [ROOT / "traces" / name for name in ("smollm2-needle", "smollm2-reversal")]
README = HERE / "README.md"
TITLE = "Reading by bounds"
LEAD = (
    "Pages are chosen by an upper bound on their logits. How far above the truth is it, what does it cost to prove by it, what do better "
    "summaries buy for the bytes they take, and how long may a choice be kept?"
)
TITLES = {
    "slack": "How loose is the bound of a page, by page size?",
    "depth": "How deep must a proof read, by layer?",
    "bytes": "What do more boxes buy at equal bytes?",
    "age": "How fast does a set of pages age?",
}
BEGIN, END = "<!-- numbers: run.py --write -->", "<!-- end -->"


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("trace", nargs="*", type=Path, help="traces to measure (default: the bundled ones)")
    ask.add_argument(
        "-o", "--out", type=Path, default=ROOT / "build" / "reading.html", help="the page (default: build/reading.html)"
    )
    ask.add_argument("--png", type=Path, help="a folder for the charts as images")
    ask.add_argument("--write", action="store_true", help="put the numbers into README.md")
    args = ask.parse_args()
    traces = args.trace or BUNDLED
    found = measure(traces)
    told = sentences(found)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(render(TITLE, [LEAD], sections(found, told, traces), charts.NAMES), encoding="utf-8")
    if args.png:
        write_png(figures_of(found, told), args.png)
    print(*(line for lines in told.values() for line in lines), f"wrote {args.out}", sep="\n")
    if args.trace:
        return 0
    if args.write:
        README.write_text(rewritten(README.read_text("utf-8"), told), encoding="utf-8")
    moved = [line for lines in told.values() for line in lines if line not in README.read_text("utf-8")]
    print(
        *(f"not in {README.name}, so a number moved: {line}" for line in moved),
        sep="\n",
        end="\n" if moved else "",
        file=sys.stderr,
    )
    return 1 if moved else 0


def rewritten(readme: str, told: dict[str, list[str]]) -> str:
    """The README with these sentences between its two marks."""
    head, rest = readme.split(BEGIN)
    text = "\n\n".join(f"**{TITLES[name]}**\n\n" + "\n".join(f"* {line}" for line in lines) for name, lines in told.items())
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def figures_of(found: Found, told: dict[str, list[str]]) -> list[Figure]:
    cells = found.cells["cell"].to_list()
    draw = {"slack": charts.slack, "depth": charts.depth, "bytes": charts.by_bytes, "age": charts.age}
    return [
        Figure(name, TITLES[name], HOW[name], draw[name](frame, cells), " ".join([*told[name], ABSENT[name]]), frame)
        for name, frame in ((n, getattr(found, n)) for n in draw)
    ]


def sections(found: Found, told: dict[str, list[str]], traces: list[Path]) -> list[Section]:
    """The charts, and what they rest on."""
    opened = [open_trace(path) for path in traces]
    models = sorted({str(t.manifest["source"].get("model")) for t in opened})
    weights = sorted({str(t.manifest["source"].get("weight_format")) for t in opened})
    rows = [(r["cell"], str(r["contexts"]), str(r["steps"]), ", ".join(map(str, r["layers"]))) for r in found.cells.to_dicts()]
    few = bool((found.cells["contexts"] < interval.FEWEST).any())
    notes = [
        f"Steps of a role are all replayed when there are at most {WHOLE}, else every {EVERY}th; a role with fewer than {FEWEST} is left out. "
        "Roles are never averaged together.",
        f"No intervals: fewer than {interval.FEWEST} contexts of a cell say nothing about other contexts." if few else "",
    ]
    facts = [
        ("model", ", ".join(models)),
        ("weights", ", ".join(weights)),
        ("traces", ", ".join(t.id for t in opened)),
        ("command", "python analyses/reading/run.py " + " ".join(str(p) for p in traces if p not in BUNDLED)),
        ("replay", "open loop: queries come from the run with full attention, so no task was solved with these policies"),
    ]
    table = Table("Cells", ("cell", "contexts", "steps", "layers"), rows, notes=[n for n in notes if n])
    rests = Section("What this rests on", facts=facts, blocks=[table])
    return [Section("Four measurements", blocks=figures_of(found, told)), rests]


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KvsimError as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
