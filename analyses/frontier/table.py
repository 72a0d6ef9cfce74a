"""Every method in a row: what it loses at its bytes in a replay, and what a running model answered with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from analyses.closed_loop.run import TABLES
from analyses.figures import Figures, told
from analyses.frontier.live import ANSWERS, NEAR, labels
from analyses.frontier.methods import CLOSED, KEEPS, OWN, READS, SHARES, STORES
from analyses.question import Numbers, Tabled
from kvsim.metrics.closed_loop import FULL, open_study, scores
from kvsim.metrics.interval import picks

COLUMNS = ["method", "bytes", "mass read", "evidence read", "output error"]
ANSWERED = ["answered, closed loop", "KL"]
FORMS = {"mass recall": ".0%", "evidence recall": ".0%", "output error": ".3f"}
NOTES = [
    "Mass, evidence and error are of a replay, open loop: queries come from the run with full attention. SmolLM2-135M-Instruct, weights of "
    "4 bits, prompts of 1024 tokens, in 16 bits. Mass: of the probability of full attention, what lies on tokens that were read; evidence: "
    "the same of what lies on the tokens that hold the answer; error: the L2 distance of the attention output from that of full attention, "
    "as a part of its norm. All of answer steps alone, over contexts, layers and query heads.",
    "Bytes held: rows, codes, scales, moments, of what full attention holds; between two budgets that were run numbers lie on a straight "
    "line. Not in them: numbers that a policy remembers of its tokens (h2o one each, 4 bytes: state_bytes in events), and the probabilities "
    "that it looks at and a fused kernel does not give (score_bytes in the ledger). Bytes read: rows that the query heads of a group read "
    "together, and the index, of what full attention reads; whoever reads less holds everything, and its index on top. Every query head "
    "chooses for itself and the three of a group read what any of them chose: where they choose apart, as heads that draw pages at random "
    "do, each has fewer.",
    "Layers of the replay: the first, the middle and the last, each with the same budget. So pyramidkv, which takes from some layers what "
    "it gives to others, has no replay here, nor has expected_attention, whose statistics the traces lack; and turboquant, which leaves the "
    "first and the last two layers exact, seems to hold more than it does in a whole model.",
    "Every method has kvsim's defaults, which are not its authors' everywhere (kvsim policies NAME --presets): quest's code reads the first "
    "two layers whole, here all have the budget (analyses/closed_loop has it with both whole); snapkv's has a window of 64 prompt queries, "
    "here it is 32; adakv's pools 7 scores by their maximum, here 5 by their mean. kivi has the residual of its example scripts, 32 rows, "
    "turboquant presets of vLLM. caote is exact for one eviction: the cut after the prompt takes many at once, each by its error alone. "
    "Block means are of 16 keys of a model that was not trained for them. qevict keeps most of its tokens as codes of 2 bits, so it holds "
    "more of them, and its largest budget here takes less than half of the bytes.",
    "The oracle of keeping sees the future and the oracle of reading the truth, so no method can have them; both keep what has most mass, "
    "which is not always what changes the output least.",
    "The question comes after the prompt, token by token: who evicts once after the prompt (snapkv, adakv, criticalkv, defensivekv, caote "
    "on snapkv) decides before it is asked. Where the question ends the prompt, which their window of last queries is made for, it would "
    "have seen it.",
]


def table(cells: Sequence[Figures]) -> Tabled:
    """Columns, rows and footnotes of the first cell: every method at each share, least error first; beside it what a running model answered,
    where the cell is the one that was run."""
    f = cells[0]
    live, notes = _live() if f.cell == ANSWERS and (TABLES / "frontier").exists() else ({}, [])
    blank = ("", "") if live else ()
    body: list[list[str]] = []
    for side, names, word in (("held", KEEPS, "held"), ("read", READS, "read"), ("coded", STORES, "held")):
        for at in (OWN,) if side == "coded" else tuple(f"{s:.0%}" for s in SHARES):
            some = [n for n in names if f.has(f"{side}: output error", n, at)]
            for n in sorted(some, key=lambda n: float(f(f"{side}: output error", n, at)[0])):
                cost = f"{float(f('coded: bytes', n, OWN)[0]):.0%} {word}" if side == "coded" else f"{at} {word}"
                figures = [_said(f, f"{side}: {x}", n, at, form) for x, form in FORMS.items()]
                body.append([n, cost, *figures, *live.get((n, at), blank)])
            body += [[n, f"{at} held", "", "", "", *live[n, at]] for n in CLOSED if side == "held" and (n, at) in live]
    return [*COLUMNS, *(ANSWERED if live else ())], body, [*NOTES, *notes]


def _said(f: Figures, figure: str, line: str, at: str, form: str) -> str:
    if not f.has(figure, line, at):
        return ""
    value, low, high = told(f(figure, line, at))
    return f"{value:{form}}" + ("" if low is None else f" [{low:{form}}, {high:{form}}]")


def _resampled(kl: pl.Series) -> str:
    """A mean over contexts and its interval, the same contexts drawn for every policy."""
    each = kl.cast(pl.Float64).to_numpy()
    value, low, high = told(np.append(each.mean(), picks(len(each), seed=0) @ each / len(each)))
    return f"{value:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def _live() -> tuple[Mapping[tuple[str, str], tuple[str, str]], list[str]]:
    """(method, bytes) -> the part of the needles that full attention finds which a running model finds, with its interval, and KL; and what
    that rests on."""
    study = open_study(TABLES / "frontier")
    found = scores(study).filter(pl.col("mode") == "forced", pl.col("task") == "needle")
    apart = study.apart.filter(pl.col("task") == "needle").sort("context").partition_by("policy", as_dict=True)
    of = labels(Numbers.read(Path(__file__).with_name("numbers.parquet")), found["policy"])
    told = {
        of[r["policy"]]: (f"{r['score']:.0%} [{r['low']:.0%}, {r['high']:.0%}]", _resampled(apart[r["policy"],]["kl"]))
        for r in found.to_dicts()
        if r["policy"] in of
    }
    full = found.filter(pl.col("policy") == FULL).row(0, named=True)
    return told, [
        f"Closed loop: {full['samples']} other prompts with needles, 512 tokens, every layer (analyses/closed_loop, cell frontier). Answers are "
        f"parts of the {full['samples'] - full['full_fails']} that full attention gives, with Wilson intervals, most of which overlap; KL is at "
        f"the answer, over all {full['samples']}. What reads has the budget at which replays billed these bytes on average, to {NEAR:.1%} of "
        "the tokens; qevict holds the scales of its budget's rows on top, and who evicts once the rows of the answer. The oracle of keeping "
        "and moments cannot be run in a model here. Rows are sorted by output error, which is not the order of the answers: what a replay "
        "tells of a running model is a question of its own (analyses/closed_loop).",
    ]
