"""How a command line is read: complaints of one line, the nearest name to a wrong one, lists of numbers."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from kvsim.errors import WrongUse

Options = Callable[[argparse.ArgumentParser], Any]
Commands = dict[
    tuple[str, ...], tuple[str, Callable[[argparse.Namespace], Any], Options]
]  # words -> what it is for, call, options


MOST = 1_000_000  # numbers in a list


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, and which knows the nearest option or command to a wrong one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise WrongUse(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in words if self.get_default("call") else words[:1]:  # those after a command are its own
            name = word.split("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                self._unknown("option", name, self._option_string_actions)
        return super().parse_known_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self._unknown(action.metavar or action.dest, value, map(str, action.choices))

    def _unknown(self, what: Any, word: str, known: Iterable[str]) -> NoReturn:
        near = difflib.get_close_matches(word, names := list(known), 1)
        self.error(f"unknown {what} {word!r}" + (f", did you mean {near[0]!r}?" if near else f": one of {', '.join(names)}"))


def word_list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def layer_list(text: str) -> list[int] | None:
    return None if text == "all" else list_of_numbers(text)


def one_number(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def list_of_numbers(text: str) -> list[int]:
    """0,3 or 4-9 -> numbers, ends included."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        plain = all(x.isascii() and x.isdigit() and len(x) < 9 for x in (first, last or first))
        if not plain or not 0 <= int(last or first) - int(first) < MOST:
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 3, 0,1 or 4-9, at most {MOST} of them")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def policy_file_option(p: argparse.ArgumentParser) -> None:
    p.add_argument("--policy-file", action="append", default=[], metavar="FILE", help="a Python file with policies of your own")


def policy_named(run: Any, policy: str) -> str:
    """The id of a policy of a run, from its id, its file's name, its label on a page or any way to write it."""
    from kvsim.policies.language import parse_policy
    from kvsim.report.names import labels

    label = labels([p.id for p in run.policies if p.rows])
    found = [p for p, said in label.items() if policy in (p, p.partition(":")[0], said)]
    if not found and "(" in policy:
        found = [x for x in [parse_policy(policy).id] if x in label]
    if not found:
        raise WrongUse(f"{run.path}: no policy {policy!r} in this run; it has {'; '.join(label.values())}")
    return found[0]
