"""The kvsim command: parse, call, print. Results go to stdout; progress and complaints to stderr, one line each."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from kvsim import __version__
from kvsim.errors import KvsimError, WrongUse

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command -> its exit code."""
    try:
        args = parser().parse_args(argv)
        return int(args.call(args) or DONE)
    except KvsimError as e:
        _complain(str(e))
        return WRONG_USE if isinstance(e, WrongUse) else FAILED
    except KeyboardInterrupt:
        _complain("interrupted; what is finished is kept in OUT.partial, and the same command goes on from there")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def commands() -> list[str]:
    """Every command, with the words that call it."""
    return [" ".join(words) for words in COMMANDS]


# ------------------------------------------------------------------------------------------------ commands
def demo(args: argparse.Namespace) -> None:
    from tempfile import TemporaryDirectory

    from kvsim.replay.demo import POLICIES, bundled
    from kvsim.replay.run import replay
    from kvsim.report.page import report

    with TemporaryDirectory(prefix="kvsim-demo-") as folder, _progress() as progress:
        run = replay(args.trace or bundled(), POLICIES, Path(folder) / "demo", plans=True, baselines=True, progress=progress)
        print(report(run.path, args.out))


def trace_info(args: argparse.Namespace) -> None:
    from kvsim.trace.info import describe

    found = describe(args.trace, args.allow_partial)
    _show(found) if not args.json else _json(found)


def trace_check(args: argparse.Namespace) -> int:
    from kvsim.trace.check import check_trace

    problems = 0
    for problems, line in enumerate(check_trace(args.trace, args.allow_partial), 1):
        print(line)
    print(f"{args.trace}: {problems or 'no'} problem{'' if problems == 1 else 's'}")
    return FAILED if problems else DONE


def trace_synth(args: argparse.Namespace) -> None:
    from kvsim.synth.generate import synthesize

    given = {k: v for k, v in vars(args).items() if k in SYNTH and v is not None}
    print(synthesize(args.trace, **given).path)


def replay_(args: argparse.Namespace) -> None:
    from kvsim.replay.run import replay

    _load(args.policy_file)
    with _progress() as progress:
        run = replay(
            args.trace,
            args.policy,
            args.out,
            layers=args.layers,
            requests=args.requests,
            steps=args.steps,
            workers=args.workers,
            memory=args.memory,
            plans=args.plans,
            baselines=args.baselines,
            kv_dtype=args.kv_dtype,
            allocator=args.allocator,
            strict=args.strict,
            progress=progress,
        )
    print(run.path)


def policies(args: argparse.Namespace) -> None:
    from kvsim.policies.catalogue import catalogue

    _load(args.policy_file)
    found = catalogue(args.name)
    _json(found) if args.json else print("\n".join(found))


def report_(args: argparse.Namespace) -> None:
    from kvsim.report.page import report

    print(report(args.runs, args.out, png=args.png, svg=args.svg))


# ------------------------------------------------------------------------------------------------ options
Options = Callable[[argparse.ArgumentParser], Any]
SYNTH = {
    "seed": "of everything that is drawn",
    "requests": "prompts",
    "layers": "attention layers",
    "q_heads": "query heads of a layer",
    "kv_heads": "kv heads of a layer",
    "head_dim": "numbers in a key",
    "prompt": "prompt tokens",
    "steps": "decode steps",
    "stride": "queries of every stride-th step only",
    "needles": "spans that the answer needs",
}


def _demo_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", nargs="?", metavar="TRACE", help="another trace than the bundled one")
    p.add_argument("-o", "--out", default="demo.html", metavar="FILE", help="the page (default: demo.html)")


def _trace_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", metavar="TRACE")
    p.add_argument("--allow-partial", action="store_true", help="read the closed segments of a capture that did not complete")


def _info_options(p: argparse.ArgumentParser) -> None:
    _trace_options(p)
    p.add_argument("--json", action="store_true", help="for programs")


def _synth_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", metavar="TRACE", help="a new folder")
    for name, what in SYNTH.items():
        p.add_argument(f"--{name.replace('_', '-')}", dest=name, type=int, metavar="N", help=what)
    p.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="of keys, values and queries")


def _replay_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", metavar="TRACE")
    p.add_argument("-p", "--policy", nargs="+", action="extend", required=True, metavar="POLICY", help="expressions, or @FILE.toml")
    p.add_argument("-o", "--out", required=True, metavar="RUN", help="the run directory; must not exist")
    for name in ("layers", "requests", "steps"):
        p.add_argument(f"--{name}", type=_numbers, metavar="LIST", help=f"only these {name}: 0,3 or 4-9, ends included")
    p.add_argument("--workers", type=int, metavar="N", help="processes (default: as many as cores, fewer for little work)")
    p.add_argument("--memory", metavar="SIZE", help="lowers the number of workers until they fit, for example 8GiB")
    p.add_argument("--plans", action="store_true", help="also write which pages were read")
    p.add_argument("--baselines", action="store_true", help="add full, oracle, recency and random at the same budgets")
    p.add_argument("--kv-dtype", metavar="DTYPE", help="bytes are billed in this (default: the trace's 16-bit dtype, else bfloat16)")
    p.add_argument("--allocator", choices=("head", "layer"), default="head", help="whose rows keep a physical page")
    p.add_argument("--strict", action="store_true", help="check the laws that every table obeys")
    _policy_file(p)


def _policies_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("name", nargs="?", metavar="NAME")
    p.add_argument("--presets", action="store_true", help="official defaults with their sources")
    p.add_argument("--json", action="store_true", help="for programs")
    _policy_file(p)


def _report_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("runs", nargs="+", metavar="RUN")
    p.add_argument("-o", "--out", default="report.html", metavar="FILE", help="the page (default: report.html)")
    p.add_argument("--png", metavar="DIR", help="also write every chart as an image there")
    p.add_argument("--svg", metavar="DIR", help="also write every chart as a drawing there")


def _policy_file(p: argparse.ArgumentParser) -> None:
    p.add_argument("--policy-file", action="append", default=[], metavar="FILE", help="a Python file with policies of your own")


COMMANDS: dict[tuple[str, ...], tuple[str, Callable[[argparse.Namespace], Any], Options]] = {
    ("demo",): ("replay the bundled trace, or yours, and write one page", demo, _demo_options),
    ("trace", "info"): ("what is in a trace, and which needs of policies it can supply", trace_info, _info_options),
    ("trace", "check"): ("sizes, hashes, positions and values of a trace", trace_check, _trace_options),
    ("trace", "synth"): ("write a seeded synthetic trace with a known answer", trace_synth, _synth_options),
    ("replay",): ("replay policies on a trace", replay_, _replay_options),
    ("policies",): ("what exists: paper, needs, parameters, presets", policies, _policies_options),
    ("report",): ("one self-contained page of one or several runs", report_, _report_options),
}


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, and which knows the nearest option or command to a wrong one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise WrongUse(f"{message}; see {self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            found.parser.unknown(rest[0])
        return found

    def unknown(self, word: str) -> NoReturn:
        options = [o for action in self._actions for o in action.option_strings]
        near = difflib.get_close_matches(word.split("=")[0], options, 1)
        what = "unknown option" if word.startswith("-") else "unexpected argument"
        self.error(f"{what} {word!r}" + (f", did you mean {near[0]!r}?" if near else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            near = difflib.get_close_matches(str(value), known, 1)
            self.error(f"unknown {action.metavar or action.dest} {value!r}" + (f", did you mean {near[0]!r}?" if near else f": one of {', '.join(known)}"))


def parser() -> Parser:
    top = Parser(prog="kvsim", description="Replay KV-cache policies on captured attention traces.")
    top.add_argument("--version", action="version", version=f"kvsim {__version__}")
    groups = {(): top.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)}
    for words, (what, call, options) in COMMANDS.items():
        head = words[:-1]
        if head not in groups:
            inner = groups[()].add_parser(head[0], help="info, check, synth", description="Traces.")
            groups[head] = inner.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)
        p = groups[head].add_parser(words[-1], help=what, description=f"{what[0].upper()}{what[1:]}.")
        options(p)
        p.set_defaults(call=call, parser=p)
    return top


def _numbers(text: str) -> list[int]:
    """0,3 or 4-9 -> numbers, ends included."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(first) > int(last or first):
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 3, 0,1 or 4-9")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


# ------------------------------------------------------------------------------------------------ printing
def _complain(line: str) -> None:
    print(f"kvsim: {' '.join(line.split())}", file=sys.stderr)


def _json(found: Any) -> None:
    print(json.dumps(found, indent=1, ensure_ascii=False))


def _show(found: dict[str, Any], indent: str = "") -> None:
    """Plain data as lines."""
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{indent}{key}")
            _show(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"{indent}{key}")
            for row in value:
                print(f"{indent}  " + "  ".join(f"{k} {v}" for k, v in row.items() if v is not None))
        else:
            print(f"{indent}{key:16} {'—' if value is None else value}")


def _load(files: Sequence[str]) -> None:
    from kvsim.policies.language import load_file

    for file in files:
        load_file(file)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr when a person is looking."""
    if not sys.stderr.isatty():
        yield lambda done, tasks: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay")
        yield lambda done, tasks: bar.update(task, completed=done, total=tasks)
