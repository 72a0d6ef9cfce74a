"""Depths that queries choose against fixed ones, and whether risks were foretold:

    python tools/dynamic.py RUN... [--foretell FILE TRACE...] [--png FOLDER]

Runs hold at least one policy with a stopping rule and some quest(read=pages(K)) beside it; see docs/advise.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from kvsim.advise.dynamic import Dynamic, against_fixed
from kvsim.errors import KvsimError
from kvsim.metrics.run import RunTables, open_run
from kvsim.policies.language import parse
from kvsim.policies.rules import Rule
from kvsim.replay.difficulty import foretell
from kvsim.report.charts.reliability import foretold_against_observed
from kvsim.report.export import write_png
from kvsim.report.html import Figure
from kvsim.trace.open import open_trace
from kvsim.units import pages


def compared(runs: Sequence[RunTables]) -> Iterator[tuple[str, Dynamic]]:
    """Every policy with a rule, by the rule."""
    reads = {p.id: parse(p.id).part("read").read for p in runs[0].policies if p.rows}
    fixed = {x.n: name for name, x in reads.items() if isinstance(x, pages)}
    for name, x in reads.items():
        if isinstance(x, Rule):
            yield name.split("read=")[1].split("), ")[0] + ")", against_fixed(runs, name, fixed)


def told(rule: str, x: Dynamic) -> str:
    return (
        f"{rule}: {x.contexts} contexts, {x.pages:.2f} pages, P99 {x.pages_p99:.1f}{_sure(x.p99_interval, '.1f')};"
        f" recall p5 {x.recall_p5:.3f}, fixed {x.fixed_p5:.3f}, gain {x.gain:+.3f}{_sure(x.interval, '+.3f')},"
        f" by head {x.gain_by_head:+.3f}{_sure(x.by_head_interval, '+.3f')}; ±0.03 needs {x.needed} contexts"
    )


def _sure(interval: tuple[float, float] | None, form: str) -> str:
    return " (no interval: fewer than 8 contexts)" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def reliability(found: pl.DataFrame) -> pl.DataFrame:
    """All contexts, layers and levels together."""
    mean = [((pl.col(c) * pl.col("n")).sum() / pl.col("n").sum()).alias(c) for c in ("foretold", "observed")]
    return found.group_by("bin").agg(*mean, total=pl.col("n").sum()).sort("bin")


def chart(found: pl.DataFrame) -> Figure:
    how = "A point on the dashed line: as many queries covered too little as was foretold. Above it the risk was told too low."
    return Figure("reliability", "Was the risk foretold?", how, foretold_against_observed(found), "", found)


def main(words: Sequence[str]) -> int:
    words, png = (words[:-2], words[-1]) if words[-2:-1] == ["--png"] else (words, None)
    at = words.index("--foretell") if "--foretell" in words else len(words)
    try:
        for rule, x in compared([open_run(path) for path in words[:at]]) if at else ():
            print(told(rule, x))
        if rest := words[at + 1 :]:
            found = foretell([open_trace(path) for path in rest[1:]], f'quest(read=gap(file="{rest[0]}"))')
            if png:
                write_png([chart(reliability(found))], Path(png))
            for bin_, foretold, observed, n in reliability(found).iter_rows():
                print(
                    f"{bin_ / 10:.1f}-{bin_ / 10 + 0.1:.1f}: foretold {foretold:.3f}, observed {observed:.3f}, {n} queries and levels"
                )
    except KvsimError as e:
        print(f"dynamic: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
