"""`kvsim show`: a run as a table in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from kvsim.cli.parsing import Commands
from kvsim.cli.printing import print_json
from kvsim.errors import WrongUse

Column = tuple[str, str, Callable[[Any], str]]  # heading, name in the frame, how a value is written
NOTHING = "—"


def _three(x: float) -> str:
    return f"{x:.3f}"


def _kib(x: float) -> str:
    return f"{x / 1024:.1f}"


POLICIES: tuple[Column, ...] = (
    ("mass", "mass_recall", _three),
    ("mass p5", "mass_recall_p5", _three),
    ("far", "far_recall", _three),
    ("evidence", "evidence_recall", _three),
    ("error", "rel_l2", _three),
    ("tokens", "read_tokens", "{:.0f}".format),
    ("tokens p99", "read_tokens_p99", "{:.0f}".format),
    ("read KiB", "read_bytes", _kib),
    ("away KiB", "away_bytes", _kib),
    ("held KiB", "resident_bytes", _kib),
)
BUDGETS: tuple[Column, ...] = (
    ("pages", "pages", str),
    ("tokens", "tokens", str),
    ("read KiB", "bytes", _kib),
    ("value", "value", _three),
)
ARRIVALS: tuple[Column, ...] = (
    ("first step", "step", str),
    ("steps", "steps", "{:.0%}".format),
    ("dense mass", "dense", _three),
    ("recall", "recall", _three),
)


def show(args: argparse.Namespace) -> None:
    from kvsim.advise.menus import target
    from kvsim.metrics.run import open_run
    from kvsim.metrics.summary import arrivals, reached, summary
    from kvsim.report.facts import ROLES

    goal, run = target(args.target) if args.target else None, open_run(args.run)
    names = {"mass": "mass_recall", "far": "far_recall", "evidence": "evidence_recall", "rel_l2": "rel_l2"}
    if goal:
        found, by, columns = reached(run, names[goal.measure], goal.x), ["layer"], BUDGETS
        lacks = "no read policy with curves; replay one that ranks pages by a budget, such as quest(read=pages(8))"
    elif args.evidence:
        found, by, columns = arrivals(run), ["layer", "span"], ARRIVALS
        lacks = "no evidence table; replay a trace with evidence spans with --plans"
    else:
        found, by, columns = summary(run, args.by), [args.by] if args.by else [], POLICIES
        lacks = ""
    if found.is_empty():
        raise WrongUse(f"{args.run}: {lacks}")
    if args.json:
        print_json({"rows": found.to_dicts()})
        return
    rows = [r | ({"role": ROLES[r["role"]]} if "role" in r else {}) for r in found.to_dicts()]
    for line in _lines(rows, by, columns):
        print(line)


def _lines(found: list[dict[str, Any]], by: list[str], columns: tuple[Column, ...]) -> Iterator[str]:
    """A heading, then a row a line: the policy's label and `by` to the left, numbers to the right."""
    from kvsim.report.names import labels

    label = labels(r["policy"] for r in found)
    rows = [[label[r["policy"]], *(f"{b} {r[b]}" for b in by)] for r in found]
    told = [[NOTHING if r[name] is None else write(r[name]) for _, name, write in columns] for r in found]
    wide = [max(len(row[i]) for row in rows) for i in range(1 + len(by))]
    heads = [heading for heading, _, _ in columns]
    room = [max(len(x) for x in (heads[i], *(row[i] for row in told))) for i in range(len(heads))]
    left = [" " * sum((*wide, 2 * len(by)))] + ["  ".join(x.ljust(n) for x, n in zip(row, wide, strict=True)) for row in rows]
    for begin, row in zip(left, [heads, *told], strict=True):
        yield "  ".join([begin, *(x.rjust(n) for x, n in zip(row, room, strict=True))])


def _options(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", metavar="RUN")
    what = p.add_mutually_exclusive_group()
    what.add_argument("--by", choices=("layer", "role", "request"), metavar="WHAT", help="a row each: layer, role or request")
    what.add_argument(
        "-t", "--target", metavar="TARGET", help="the smallest read budget of each layer that reaches it: mass=0.95, far=0.99, …"
    )
    what.add_argument(
        "--evidence", action="store_true", help="when each layer first reads evidence, and how much (needs --plans)"
    )
    p.add_argument("--json", action="store_true", help="for programs")


COMMANDS: Commands = {("show",): ("a run as a table: what each policy kept of attention, and its bytes", show, _options)}
