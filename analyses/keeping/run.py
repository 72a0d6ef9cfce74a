"""python analyses/keeping/run.py [TRACE ...] [-o PAGE] [--write]: what are QEvict's tiers worth? Six charts, each with its numbers.

Without traces: a bundled one and one that is made on the way, and exit 1 when a number is not the README's; --write puts them there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analyses.keeping import charts, words
from analyses.keeping.measure import measure, swinging
from analyses.old_page import ROOT, Analysis, Question, main

REVERSAL = ROOT / "traces" / "smollm2-reversal"
TITLES = {
    "by_bytes": "What are the same bytes worth as tiers, as eviction only, as quantisation only?",
    "cross": "Windows or tiers: which of the two helps?",
    "bits": "How many bits, and how much of the budget for codes?",
    "start": "What does the start decide?",
    "promotion": "What does promotion bring back?",
    "ledger": "Do kept codes cost more where the full tier churns?",
}
ANALYSIS = Analysis(
    name="keeping",
    title="Keeping in tiers",
    lead="QEvict keeps the most attended windows full, codes the next in a few bits and evicts the rest. What is that worth at the bytes it "
    "takes, and which of its parts does the work: the windows, the tier of codes, the start, or promotion?",
    questions={n: Question(TITLES[n], words.HOW[n], words.ABSENT[n], getattr(words, n), getattr(charts, n)) for n in TITLES},
    measure=measure,
    bundled=lambda folder: [swinging(folder), REVERSAL],
    labels=charts.NAMES,
)

if __name__ == "__main__":
    raise SystemExit(main(ANALYSIS, str(__doc__)))
