"""python analyses/closed_loop/run.py [--measure FOLDER] [--write]: does a replay say what a running model will do?

Without options: the README's numbers again from tables/, a page of the study with most policies in build/closed_loop.html, and exit 1 when a
number is not in the README. --measure runs the studies in FOLDER, those that stopped from where they stopped, for an hour or more of one core,
and condenses them into tables/; --write puts the numbers into the README and into what the report says under its charts."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import polars as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analyses.closed_loop import words
from analyses.closed_loop.cells import CELLS, MANY, cell
from kvsim.errors import KvsimError
from kvsim.metrics import closed_loop
from kvsim.metrics.closed_loop import Study, open_study
from kvsim.metrics.interval import FEWEST
from kvsim.metrics.sensitivity import sensitivity
from kvsim.report import facts
from kvsim.report.page import report

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "build" / "closed_loop.html"
README, TABLES, TOLD = HERE / "README.md", HERE / "tables", HERE.parents[1] / "kvsim" / "report" / "foretold.json"
DEFINITIONS = HERE.parents[1] / "docs" / "definitions.md"
BEGIN, END = "<!-- numbers: run.py --write -->", "<!-- end -->"
LINE = "<!-- analyses/closed_loop/run.py --write -->"


def measure(folder: Path, names: list[str]) -> None:
    """The studies that are not there yet, one after the other, then all that there is into tables/."""
    from kvsim.live.command import command

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / name).exists():
            for line in command(cell(name, folder)):
                print(line, flush=True)


def condense(folder: Path) -> None:
    """Finished or not: a study that goes on says how many contexts it has, and is left out while they are too few for an interval."""
    for name in CELLS:
        found = next((x for x in (folder / name, folder / f"{name}.partial") if any(x.glob("layers*.parquet"))), None)
        if found is not None:
            study = open_study(found)
            if min(study.answers.group_by("task").agg(pl.col("context").n_unique())["context"].to_list()) < FEWEST:
                continue
            if name == "layers":
                sensitivity(study).write_parquet(TABLES / "layers.parquet")
            else:
                shutil.rmtree(TABLES / name, ignore_errors=True)
                closed_loop.condense(study, TABLES / name)


def studies() -> dict[str, Study]:
    """By name, those that are not about some layers alone."""
    return {name: open_study(TABLES / name) for name in CELLS[:4] if (TABLES / name).exists()}


def told() -> list[str]:
    """The README's lines."""
    lines = list(words.lines(studies()))
    if (TABLES / "layers.parquet").exists():
        lines += words.layers(
            pl.read_parquet(TABLES / "layers.parquet"), tomllib.loads((TABLES / "advice.toml").read_text("utf-8"))
        )
    if (TABLES / "inject").exists():
        lines += words.injected(open_study(TABLES / "inject"))
    return lines


def foretold(study: Study) -> dict[str, Any]:
    """How well open-loop numbers ordered the policies by KL: what the report says under its charts."""
    frame = closed_loop.correlations(study).filter(pl.col("outcome") == "kl", pl.col("predictor").str.starts_with("open_"))
    found: dict[str, Any] = {}
    for row in frame.iter_rows(named=True):
        numbers = [None if row[x] is None else round(row[x], 2) for x in ("rho", "low", "high")]
        found.setdefault(row["task"], {})[row["predictor"].removeprefix("open_")] = numbers
    contexts = study.answers.group_by("task").agg(pl.col("context").n_unique()).sort("task")
    model = study.about["source"]["model"].split(" ")[0]
    return {
        "model": model,
        "tokens": 512,
        "policies": len(MANY),
        "contexts": dict(contexts.rows()),
        "rank_correlation_with_kl": found,
    }


def put(page: str, begin: str, text: str) -> str:
    """The page with this text between the mark and the end after it."""
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{text.strip()}\n\n{END}{rest.split(END, 1)[1]}"


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--measure", type=Path, metavar="FOLDER", help="run the studies there first")
    ask.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL", help=f"of {', '.join(CELLS)}")
    ask.add_argument(
        "--condense", type=Path, metavar="FOLDER", help="of studies as far as they are; with --measure: when they are finished"
    )
    ask.add_argument("--write", action="store_true", help="put the numbers into README.md and kvsim/report/foretold.json")
    args = ask.parse_args()
    try:
        if args.measure:
            measure(args.measure, args.only)
        if args.measure or args.condense:
            condense(args.measure or args.condense)
        lines, there = told(), README.read_text("utf-8")
        what = json.dumps(foretold(studies()["512"]), indent=1) + "\n"
    except KvsimError as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
    print(*lines, sep="\n")
    if args.write:
        TOLD.write_text(what, "utf-8")
        README.write_text(put(there, BEGIN, "\n".join(lines)), "utf-8")
        DEFINITIONS.write_text(put(DEFINITIONS.read_text("utf-8"), LINE, facts.foretold()), "utf-8")
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    print(f"wrote {report(TABLES / '512', PAGE)}", file=sys.stderr)
    moved = [line for line in lines if line not in there.splitlines()]
    for line in moved:
        print(f"not in README.md, so a number moved: {line}", file=sys.stderr)
    return 1 if moved or what != TOLD.read_text("utf-8") else 0


if __name__ == "__main__":
    raise SystemExit(main())
