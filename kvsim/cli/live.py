"""`kvsim live`."""

from __future__ import annotations

import argparse
import os
import sys

from kvsim.cli.parsing import Commands, list_of_numbers, policy_file_option
from kvsim.cli.printing import load_files
from kvsim.errors import WrongUse


def live_(args: argparse.Namespace) -> None:
    from dataclasses import fields

    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        from kvsim.live.command import Asked, command
    except ModuleNotFoundError as e:
        raise WrongUse(f"live needs {e.name}: pip install 'kvsim[capture]'") from None

    load_files(args.policy_file)
    for line in command(Asked(**{f.name: getattr(args, f.name) for f in fields(Asked)})):
        print(line, flush=True)


def _live_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help="a hub id, a folder, a .gguf file, or pkg:PACKAGE that ships one")
    p.add_argument(
        "-p", "--policy", nargs="+", action="extend", required=True, metavar="POLICY", help="expressions, or @FILE.toml"
    )
    p.add_argument("-o", "--out", required=True, metavar="STUDY", help="a new folder; a study that stopped there goes on")
    what = p.add_argument_group("what the model reads")
    what.add_argument(
        "--task",
        nargs="+",
        default=["needle"],
        metavar="NAME",
        help="as kvsim capture names them, FILE.jsonl too (default: needle)",
    )
    what.add_argument("-n", type=int, default=5, metavar="N", help="prompts of each task (default: 5)")
    what.add_argument("--context", type=int, default=512, metavar="N", help="tokens of a prompt, at most (default: 512)")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of the first prompt (default: 0)")
    what.add_argument("--depth", type=float, metavar="X", help="where in the prompt the needle is, 0 to 1 (default: drawn)")
    what.add_argument("--text", metavar="FILE", help="a long text (default: Python's own language reference)")
    what.add_argument("--seen", action="store_true", help="the question is part of the prompt, so that a cut after it knows it")
    what.add_argument("--answer", type=int, default=12, metavar="N", help="tokens of an answer (default: 12)")
    what.add_argument("--steps", type=int, default=40, metavar="N", help="tokens of plain text that are fed (default: 40)")
    how = p.add_argument_group("how it runs")
    how.add_argument("--free", action="store_true", help="also let every policy say its own answer to the end")
    how.add_argument(
        "--samples", type=int, default=0, metavar="N", help="drawn answers instead of the likeliest, of so many seeds"
    )
    how.add_argument("--temperature", type=float, default=1.0, metavar="X", help="of --samples (default: 1)")
    how.add_argument(
        "--open-loop",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replay the policies beside, on what full attention saw",
    )
    how.add_argument(
        "--inject", type=list_of_numbers, metavar="LIST", help="each policy again, its reads in these layers given the evidence"
    )
    how.add_argument(
        "--by-layer", type=int, metavar="N", help="each policy in N neighbouring layers alone, full attention elsewhere"
    )
    how.add_argument(
        "--kv-dtype", metavar="DTYPE", help="budgets in bytes and bounds count this (default: the model's, else bfloat16)"
    )
    how.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="of the model (default: its own; GGUF: float32)")
    how.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    how.add_argument("--attention", choices=("eager", "sdpa"), help="implementation of the prompt's (default: the model's)")
    how.add_argument("--chunk", type=int, metavar="N", help="prompt tokens of a forward (default: all at once)")
    policy_file_option(p)


COMMANDS: Commands = {
    ("live",): ("policies inside a running model: what they answer, not only what they miss", live_, _live_options),
}
