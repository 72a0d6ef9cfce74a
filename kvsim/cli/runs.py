"""`kvsim demo`, `replay`, `sweep`, `calibrate`, `report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvsim.cli.codes import DONE, INTERRUPTED
from kvsim.cli.parsing import Commands, list_of_numbers, policy_file_option, policy_named
from kvsim.cli.printing import complain, load_files, progress_bar

REPLAY = ("layers", "requests", "steps", "workers", "memory", "plans", "explain", "baselines", "kv_dtype", "allocator", "strict")


SWEEP = ("workers", "memory", "engine", "scheduler", "max_tasks", "strict", "dry_run")


def demo(args: argparse.Namespace) -> None:
    from tempfile import TemporaryDirectory

    from kvsim.replay.demo import suppliable
    from kvsim.replay.run import replay
    from kvsim.report.page import report
    from kvsim.trace.bundled import bundled
    from kvsim.trace.open import open_trace

    trace = open_trace(args.trace or bundled())
    chosen, why_not = suppliable(trace)
    for line in why_not:
        complain(f"left out: {line}")
    with TemporaryDirectory(prefix="kvsim-demo-") as folder, progress_bar() as progress:
        run = replay(trace, chosen, Path(folder) / "demo", plans=True, explain=True, baselines=True, progress=progress)
        print(report(run.path, args.out, png=args.png))


def replay_(args: argparse.Namespace) -> int:
    from kvsim.metrics.diagnostics import write
    from kvsim.places import names_in, place
    from kvsim.replay.folder import partial
    from kvsim.replay.run import replay

    load_files(args.policy_file)
    options = {name: getattr(args, name) for name in REPLAY}
    try:
        with progress_bar() as progress:
            print(replay(args.trace, args.policy, args.out, progress=progress, also=write, **options).path)
    except KeyboardInterrupt:
        kept = partial(place(args.out))
        some = f"{kept} keeps what is finished, and the same command goes on from there"
        complain(f"interrupted: {some if names_in(kept) else 'nothing was finished'}")
        return INTERRUPTED
    return DONE


def sweep_(args: argparse.Namespace) -> int:
    from kvsim.metrics.diagnostics import write
    from kvsim.replay.sweep import sweep

    options = {name: getattr(args, name) for name in SWEEP}
    try:
        with progress_bar("sweep") as progress:
            for run in sweep(args.study, args.out, tell=complain, progress=progress, also=write, **options):
                print(run.path)
    except KeyboardInterrupt:
        complain(f"interrupted: the same command goes on from what is finished in {args.out}")
        return INTERRUPTED
    return DONE


def calibrate_(args: argparse.Namespace) -> None:
    from kvsim.replay.calibrate import calibrate

    print(calibrate(args.trace, args.policy, args.out, layers=args.layers, requests=args.requests, target=args.target))


def report_(args: argparse.Namespace) -> None:
    from kvsim.metrics.run import open_run, part
    from kvsim.report.page import report

    runs = args.runs
    if args.policies or args.layers or args.requests:  # of runs; a study of the closed loop is shown whole
        opened = [open_run(run) for run in runs]
        named = [args.policies and [policy_named(run, policy) for policy in args.policies] for run in opened]
        runs = [part(run, policies, args.layers, args.requests) for run, policies in zip(opened, named, strict=True)]
    print(report(runs, args.out, png=args.png, svg=args.svg, costs=_costs(args)))


def _costs(args: argparse.Namespace) -> Any:
    from kvsim.cost.model import read_model
    from kvsim.cost.predict import read_bill
    from kvsim.cost.samples import read_samples
    from kvsim.report.sections.cost import Costs

    if not (args.bill or args.model or args.samples):
        return None
    return Costs(
        read_bill(args.bill) if args.bill else None,
        read_model(args.model) if args.model else None,
        read_samples(args.samples) if args.samples else None,
    )


def _demo_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", nargs="?", metavar="TRACE", help="another trace than the bundled one")
    p.add_argument("-o", "--out", default="demo.html", metavar="FILE", help="the page (default: demo.html)")
    p.add_argument("--png", metavar="DIR", help="also write every chart as an image there")


def _replay_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", metavar="TRACE")
    p.add_argument(
        "-p", "--policy", nargs="+", action="extend", required=True, metavar="POLICY", help="expressions, or @FILE.toml"
    )
    p.add_argument("-o", "--out", required=True, metavar="RUN", help="the run directory; must not exist")
    for name in ("layers", "requests", "steps"):
        p.add_argument(f"--{name}", type=list_of_numbers, metavar="LIST", help=f"only these {name}: 0,3 or 4-9, ends included")
    p.add_argument("--workers", type=int, metavar="N", help="processes (default: as many as cores, fewer for little work)")
    p.add_argument("--memory", metavar="SIZE", help="lowers the number of workers until they fit, for example 8GiB")
    p.add_argument("--plans", action="store_true", help="also write which pages were read")
    p.add_argument("--explain", action="store_true", help="also write counterfactuals beside every step, and diagnostics")
    p.add_argument("--baselines", action="store_true", help="add full, oracle, recency and random at the same budgets")
    p.add_argument(
        "--kv-dtype", metavar="DTYPE", help="bytes are billed in this (default: the trace's 16-bit dtype, else bfloat16)"
    )
    p.add_argument("--allocator", choices=("head", "layer"), default="head", help="whose rows keep a physical page")
    p.add_argument("--strict", action="store_true", help="check the laws that every table obeys")
    policy_file_option(p)


def _sweep_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("study", metavar="STUDY.toml", help="traces, policies and the grid of their parameters")
    p.add_argument("-o", "--out", required=True, metavar="RUN", help="a folder: a run directory for each trace")
    p.add_argument("--workers", type=int, metavar="N", help="processes (default: as many as cores, fewer for little work)")
    p.add_argument("--memory", metavar="SIZE", help="of all workers together, or of one in a cluster, for example 8GiB")
    p.add_argument(
        "--engine", choices=("local", "dask"), default="local", help="who does it: this machine (default), or a cluster"
    )
    p.add_argument(
        "--scheduler", metavar="ADDRESS", help="of a Dask cluster: tcp://HOST:PORT, or the file that its scheduler wrote"
    )
    p.add_argument(
        "--max-tasks",
        type=int,
        default=1_000_000,
        metavar="N",
        help="refuse a study of more layers x policies (default: 1000000)",
    )
    p.add_argument("--dry-run", action="store_true", help="print tasks, time, memory and size, and stop")
    p.add_argument("--strict", action="store_true", help="check the laws that every table obeys")


def _calibrate_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", nargs="+", metavar="TRACE", help="not the one to be replayed; several for gap() alone")
    p.add_argument("-p", "--policy", required=True, metavar="POLICY", help='what it is for, for example "kvquant(bits=3)"')
    p.add_argument("-o", "--out", required=True, metavar="FILE", help="a new file")
    p.add_argument(
        "--target", type=float, metavar="X", help="of gap(): the mass recall below which a query is missed (default: 0.9)"
    )
    for name in ("layers", "requests"):
        p.add_argument(f"--{name}", type=list_of_numbers, metavar="LIST", help=f"only these {name}: 0,3 or 4-9, ends included")


def _report_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("runs", nargs="+", metavar="RUN", help="of kvsim replay, or a study of kvsim live")
    p.add_argument("-o", "--out", default="report.html", metavar="FILE", help="the page (default: report.html)")
    p.add_argument("--policies", nargs="+", metavar="POLICY", help="only these, by label, id or any way to write them")
    for name in ("layers", "requests"):
        p.add_argument(f"--{name}", type=list_of_numbers, metavar="LIST", help=f"only these {name}: 0,3 or 4-9, ends included")
    p.add_argument("--bill", metavar="DIR", help="what cost predict wrote of this run: a section on time")
    p.add_argument("--model", metavar="MODEL.json", help="the cost model: how wrong it is")
    p.add_argument("--samples", metavar="SAMPLES.csv", help="measurements that the model is held against")
    p.add_argument("--png", metavar="DIR", help="also write every chart as an image there")
    p.add_argument("--svg", metavar="DIR", help="also write every chart as a drawing there")


COMMANDS: Commands = {
    ("demo",): ("replay the bundled trace, or yours, and write one page", demo, _demo_options),
    ("replay",): ("replay policies on a trace", replay_, _replay_options),
    ("sweep",): ("a grid of policies on several traces, resumable", sweep_, _sweep_options),
    ("calibrate",): ("learn what a codec needs beforehand from another trace", calibrate_, _calibrate_options),
    ("report",): ("one self-contained page of one or several runs", report_, _report_options),
}
