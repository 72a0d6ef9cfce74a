"""`kvsim advise`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvsim.cli.parsing import Commands, list_of_numbers
from kvsim.cli.printing import print_json, progress_bar
from kvsim.errors import WrongUse


def advise_(args: argparse.Namespace) -> None:
    from kvsim.advise.advice import advise, trial
    from kvsim.advise.menus import menus, same_units, target
    from kvsim.advise.told import lines, written

    goal, out = target(args.target), Path(args.out)
    if args.verify:
        raise WrongUse(
            "--verify runs the advice in a live model, which advise does not do itself: give the policy file to kvsim live -p @FILE"
        )
    if out.exists():
        raise WrongUse(f"{out}: exists already, and advice is never overwritten; choose another -o, or remove it")
    with progress_bar() as progress:
        sides = [[menus(run, goal) for run in _curves(args, paths, progress)] for paths in (args.traces, args.test)]
    if len(chains := {chain for side in sides for chain, _ in side}) > 1:
        raise WrongUse(f"runs of {len(chains)} policies; advise on curves of one")
    fit, test = ([menu for _, of in side for menu in of] for side in sides)
    every = same_units(fit + test)
    fit, test = (every[: len(fit)], every[len(fit) :]) if test else (every[::2], every[1::2])
    advice = advise(fit, goal)
    tried = trial(advice, test) if test else None
    out.write_text(written(advice, next(iter(chains)), out.stem, tried), "utf-8")
    if args.json:
        from dataclasses import asdict

        units = [{"layer": n, "kv_head": h, "pages": b} for (n, h), b in advice.pages.items()]
        print_json(
            {"target": str(goal)} | asdict(advice) | {"pages": units, "goal": asdict(goal), "trial": tried and asdict(tried)}
        )
        return
    for line in (*lines(advice, tried), str(out)):
        print(line)


def _curves(args: argparse.Namespace, paths: Sequence[str], progress: Any) -> Iterator[Any]:
    """Runs as they are; traces are replayed for their curves, with the oracle at some budgets beside, into folders that do not stay."""
    from kvsim.advise.menus import LADDER
    from kvsim.metrics.run import open_run
    from kvsim.policies.language import parse
    from kvsim.replay.run import replay

    for path in paths:
        if (Path(path) / "run.json").is_file():
            yield open_run(path)
        else:
            page = parse(args.policy).part("read").page
            ladder = [f"oracle(read=pages({n}), page={page})" for n in LADDER]
            run = replay(path, [args.policy, *ladder], layers=args.layers, workers=args.workers, progress=progress)
            yield open_run(run.path)


def _advise_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("traces", nargs="+", metavar="TRACE", help="to learn from: traces, or runs of them that have curves")
    p.add_argument("-t", "--target", required=True, metavar="TARGET", help="mass=0.95, far=0.9, evidence=0.9 or rel_l2=0.1")
    p.add_argument("-o", "--out", required=True, metavar="POLICY.toml", help="a new policy file")
    p.add_argument(
        "--test", nargs="+", default=[], metavar="TRACE", help="contexts to try it on (default: every other one of those given)"
    )
    p.add_argument(
        "-p", "--policy", default="quest(read=pages(1))", metavar="POLICY", help="whose budgets (default: quest(read=pages(1)))"
    )
    p.add_argument("--layers", type=list_of_numbers, metavar="LIST", help="only these layers: 0,3 or 4-9, ends included")
    p.add_argument("--workers", type=int, metavar="N", help="processes of the replays")
    p.add_argument("--verify", action="store_true", help="refused: kvsim live -p @FILE runs the advice in a live model")
    p.add_argument("--json", action="store_true", help="for programs")


COMMANDS: Commands = {
    ("advise",): ("budgets per layer and kv head that reach a target at least bytes", advise_, _advise_options),
}
