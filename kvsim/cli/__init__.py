"""The kvsim command: parse, call, print. Results go to stdout; progress and complaints to stderr, one line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from kvsim import __version__
from kvsim.cli import advice, author, cost, live, policies, reading, runs, show, traces
from kvsim.cli.codes import DONE, FAILED, INTERRUPTED, UNCALIBRATED, WRONG_USE
from kvsim.cli.parsing import Commands, Parser
from kvsim.cli.printing import complain
from kvsim.errors import KvsimError, Uncalibrated, WrongUse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command -> its exit code."""
    try:
        args = parser().parse_args(argv)
        return int(args.call(args) or DONE)
    except OSError as e:
        if isinstance(e, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        complain(f"{e.filename}: {e.strerror}" if e.filename else str(e))
        return FAILED
    except KvsimError as e:
        complain(str(e))
        return WRONG_USE if isinstance(e, WrongUse) else UNCALIBRATED if isinstance(e, Uncalibrated) else FAILED
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED


def commands() -> list[str]:
    """Every command, with the words that call it."""
    return [" ".join(words) for words in COMMANDS]


COMMANDS: Commands = {
    words: command
    for module in (runs, traces, live, show, reading, advice, policies, author, cost)
    for words, command in module.COMMANDS.items()
}


GROUPS = {
    "trace": ("info, check, synth, convert", "Traces."),
    "cost": (
        "recipe, measure, import, fit, check, predict, whatif, serve, explain",
        "Time from counted bytes, on a GPU that was measured.",
    ),
}


def parser() -> Parser:
    top = Parser(prog="kvsim", description="Replay KV-cache policies on captured attention traces.")
    top.add_argument("--version", action="version", version=f"kvsim {__version__}")
    groups: dict[tuple[str, ...], Any] = {
        (): top.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)
    }
    for words, (what, call, options) in COMMANDS.items():
        head = words[:-1]
        if head not in groups:
            verbs, about = GROUPS[head[0]]
            inner = groups[()].add_parser(head[0], help=verbs, description=about)
            groups[head] = inner.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)
        p = groups[head].add_parser(words[-1], help=what, description=f"{what[0].upper()}{what[1:]}.")
        options(p)
        p.set_defaults(call=call, parser=p)
    return top
