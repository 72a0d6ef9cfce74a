"""`kvsim compare` and `diff`: what is in runs that are there."""

from __future__ import annotations

import argparse

from kvsim.cli.codes import DONE, FAILED
from kvsim.cli.parsing import Commands, list_of_numbers, policy_named
from kvsim.cli.printing import print_json


def compare_(args: argparse.Namespace) -> int:
    from kvsim.metrics.compare import compare, lines
    from kvsim.metrics.run import open_run
    from kvsim.report.names import labels

    before, after = (open_run(path) for path in args.runs)
    pair = (policy_named(before, args.policies[0]), policy_named(after, args.policies[1])) if args.policies else None
    found = compare(before, after, pair, args.tolerance)
    if args.out:
        from kvsim.report.comparison import comparison

        comparison(before, after, found, args.out, args.tolerance)
    if args.json:
        print_json({"rows": found.to_dicts()})
    else:
        for line in lines(found, labels([p.id for run in (before, after) for p in run.policies])):
            print(line)
    return FAILED if args.gate and found["worse"].any() else DONE


def diff_(args: argparse.Namespace) -> None:
    from kvsim.metrics.difference import by_layer, difference
    from kvsim.metrics.run import open_run

    run = open_run(args.run)
    first, second = (policy_named(run, policy) for policy in args.policies)
    found = difference(run, first, second, layers=args.layers, requests=args.requests)
    if args.out:
        found.write_parquet(args.out)
    layers = by_layer(found).to_dicts()
    if args.json:
        print_json({"first": first, "second": second, "layers": layers})
        return
    print(f"tokens a head reads in a step, means; first: {args.policies[0]}, second: {args.policies[1]}")
    for row in layers:
        print(
            f"  layer {row['layer']:3}  alike {row['alike']:.1%}  both {row['both']:.1f}  only first {row['only_first']:.1f}  only second "
            f"{row['only_second']:.1f}  evidence {row['evidence_first']:.1f} and {row['evidence_second']:.1f}"
        )


def _compare_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "runs", nargs=2, metavar="RUN", help="before and after, of one trace; twice the same to compare two of its policies"
    )
    p.add_argument("--policies", nargs=2, metavar="POLICY", help="one of each run (default: every policy that both have)")
    p.add_argument("-o", "--out", metavar="FILE", help="also a page of it: every difference with its interval")
    p.add_argument("--gate", action="store_true", help="exit 1 when anything got worse")
    p.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="relative change that counts for nothing (default: 0.001)"
    )
    p.add_argument("--json", action="store_true", help="for programs")


def _diff_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", metavar="RUN", help="replayed with --plans")
    p.add_argument("--policies", nargs=2, required=True, metavar="POLICY", help="the two of them")
    for name in ("layers", "requests"):
        p.add_argument(f"--{name}", type=list_of_numbers, metavar="LIST", help=f"only these {name}: 0,3 or 4-9, ends included")
    p.add_argument("-o", "--out", metavar="FILE", help="also write a row a head and step, with the positions, as Parquet")
    p.add_argument("--json", action="store_true", help="for programs")


COMMANDS: Commands = {
    ("compare",): ("paired differences of two runs, with intervals over contexts", compare_, _compare_options),
    ("diff",): ("which tokens two policies of a run read differently, by layer, head and step", diff_, _diff_options),
}
