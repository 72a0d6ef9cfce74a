"""python analyses/reading/run.py [TRACE ...] [-o PAGE] [--write]: what is reading by bounds worth? Four charts, each with its numbers.

Without traces: the bundled ones, and exit 1 when a number is not the README's; --write puts them there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analyses.old_page import ROOT, Analysis, Question, main
from analyses.reading import charts, words
from analyses.reading.measure import measure

BUNDLED = [ROOT / "traces" / name for name in ("smollm2-needle", "smollm2-reversal")]
TITLES = {
    "slack": "How loose is the bound of a page, by page size?",
    "depth": "How deep must a proof read, by layer?",
    "bytes": "What do more boxes buy at equal bytes?",
    "age": "How fast does a set of pages age?",
}
SAY = {"slack": words.slack, "depth": words.depth, "bytes": words.by_bytes, "age": words.age}
DRAW = {"slack": charts.slack, "depth": charts.depth, "bytes": charts.by_bytes, "age": charts.age}
ANALYSIS = Analysis(
    name="reading",
    title="Reading by bounds",
    lead="Pages are chosen by an upper bound on their logits. How far above the truth is it, what does it cost to prove by it, what do better "
    "summaries buy for the bytes they take, and how long may a choice be kept?",
    questions={n: Question(TITLES[n], words.HOW[n], words.ABSENT[n], SAY[n], DRAW[n]) for n in TITLES},
    measure=measure,
    bundled=lambda _: BUNDLED,
    labels=charts.NAMES,
)

if __name__ == "__main__":
    raise SystemExit(main(ANALYSIS, str(__doc__)))
