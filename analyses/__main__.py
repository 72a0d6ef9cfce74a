"""python -m analyses [QUESTION ...] [--trace PATH ...] [--write | --words | --whole] [--fresh] [--png DIR] [-o PAGE]: the questions, answered.

Without options: of every question (or those named) a stated part is measured again, its page is written to build/QUESTION.html, and the exit
is 1 when a number moved or the README says something else. --whole measures all contexts of the study that are captured here; --write,
too, and keeps the numbers and rewrites the README: those of cells that are not captured here stay as they were. --trace: the same figures
on your own traces; nothing is compared."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from analyses import words
from analyses.contexts import ROOT, forget, of_paths
from analyses.page import write
from analyses.question import Numbers, Question, contexts_of, measured_again, part_of, strayed
from analyses.reckoning import Reckoning
from kvsim.errors import KvsimError, WrongUse


def questions(names: Sequence[str]) -> list[Question | Reckoning]:
    """By the folders' names; all without one. Raises WrongUse."""
    there = sorted(f.parent.name for f in (ROOT / "analyses").glob("*/question.py"))
    if lost := [n for n in names if n not in there]:
        raise WrongUse(f"no question {lost[0]!r}; there are {', '.join(there)}")
    return [import_module(f"analyses.{n}.question").QUESTION for n in names or there]


def main(argv: Sequence[str]) -> int:
    ask = argparse.ArgumentParser("python -m analyses", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("question", nargs="*", help="folders under analyses/ (default: all)")
    ask.add_argument("--trace", nargs="+", type=Path, metavar="PATH", help="your own traces instead of the study's")
    ask.add_argument("--whole", action="store_true", help="measure all contexts again, not a part")
    ask.add_argument("--write", action="store_true", help="measure all contexts, keep the numbers, rewrite the README")
    ask.add_argument("--words", action="store_true", help="rewrite the README from the numbers that are kept, measure nothing")
    ask.add_argument("--fresh", action="store_true", help="forget the runs kept in build/runs first")
    ask.add_argument("--png", type=Path, help="a folder for the charts as images")
    ask.add_argument("-o", "--out", type=Path, help="the page of one question (default: build/QUESTION.html)")
    args = ask.parse_args(argv)
    if args.fresh:
        forget()
    try:
        return max(reckon(q, args) if isinstance(q, Reckoning) else answer(q, args) for q in questions(args.question))
    except KvsimError as e:
        print(f"analyses: {e}", file=sys.stderr)
        return 2 if isinstance(e, WrongUse) else 1


def answer(q: Question, args: argparse.Namespace) -> int:
    began = sum(os.times()[:4])
    shown, moved = bool(args.trace), list[str]()
    if args.trace:
        mine = Numbers.measured(q, of_paths(args.trace), say)
    elif args.write or args.words:
        mine = measured_again(q, say) if args.write else q.kept
        if args.write:
            mine.write(q.folder / "numbers.parquet", f"{q.command} --write")
        readme = q.folder / "README.md"
        readme.write_text(words.rewritten(readme.read_text("utf-8"), words.block(q, mine.figures())), encoding="utf-8")
    else:
        again = Numbers.measured(q, contexts_of(q, say) if args.whole else part_of(q, say), say)
        mine, moved = q.kept, q.kept.moved(again) + strayed(q, again)
        if words.block(q, mine.figures()) not in (q.folder / "README.md").read_text("utf-8"):
            moved.append(f"{q.folder / 'README.md'} does not say what numbers.parquet says; {q.command} --words")
    out = args.out or ROOT / "build" / f"{q.name}.html"
    write(
        q,
        mine,
        out,
        " ".join([q.command, *(["--trace", *map(str, args.trace)] if args.trace else [])]),
        every=shown,
        png=args.png,
    )
    print(words.block(q, mine.figures(shown)))
    print(f"wrote {out}; {sum(os.times()[:4]) - began:.0f} CPU seconds", *moved[:20], sep="\n", file=sys.stderr)
    if len(moved) > 20:
        print(f"and {len(moved) - 20} more", file=sys.stderr)
    return 1 if moved else 0


def reckon(q: Reckoning, args: argparse.Namespace) -> int:
    """Worked out again and held against its README, or written to it."""
    if args.trace:
        say(f"{q.name}: needs no trace")
        return 0
    readme, text = q.folder / "README.md", q.block()
    if args.write:
        readme.write_text(words.rewritten(readme.read_text("utf-8"), text), encoding="utf-8")
    out = args.out or ROOT / "build" / f"{q.name}.html"
    q.page(out, png=args.png)
    print(text)
    say(f"wrote {out}")
    if text in readme.read_text("utf-8"):
        return 0
    say(f"{readme} does not say what is worked out today; {q.command} --write")
    return 1


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
