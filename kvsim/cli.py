"""The kvsim command: parse, call, print. Results go to stdout; progress and complaints to stderr, one line each."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from kvsim import __version__
from kvsim.errors import KvsimError, Uncalibrated, WrongUse

CAPTURE_TASKS = (
    "needle, passkey, border, multi-needle, multi-key, variables, two-evidence, few-shot, code, chat, decoded, reversal, "
    "common-words, plain"
)  # kvsim.capture.tasks.TASKS, without loading it
DONE, FAILED, WRONG_USE, UNCALIBRATED, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command -> its exit code."""
    try:
        args = parser().parse_args(argv)
        return int(args.call(args) or DONE)
    except OSError as e:
        if isinstance(e, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        _complain(f"{e.filename}: {e.strerror}" if e.filename else str(e))
        return FAILED
    except KvsimError as e:
        _complain(str(e))
        return WRONG_USE if isinstance(e, WrongUse) else UNCALIBRATED if isinstance(e, Uncalibrated) else FAILED
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def commands() -> list[str]:
    """Every command, with the words that call it."""
    return [" ".join(words) for words in COMMANDS]


# ------------------------------------------------------------------------------------------------ commands
def demo(args: argparse.Namespace) -> None:
    from tempfile import TemporaryDirectory

    from kvsim.replay.demo import bundled, suppliable
    from kvsim.replay.run import replay
    from kvsim.report.page import report
    from kvsim.trace.open import open_trace

    trace = open_trace(args.trace or bundled())
    chosen, why_not = suppliable(trace)
    for line in why_not:
        _complain(f"left out: {line}")
    with TemporaryDirectory(prefix="kvsim-demo-") as folder, _progress() as progress:
        run = replay(trace, chosen, Path(folder) / "demo", plans=True, explain=True, baselines=True, progress=progress)
        print(report(run.path, args.out))


def capture_(args: argparse.Namespace) -> None:
    from dataclasses import fields

    if not sys.stderr.isatty():  # read when tqdm is loaded; transformers' bar over a GGUF file heeds nothing else
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        from kvsim.capture.command import Asked, command
    except ModuleNotFoundError as e:
        raise WrongUse(f"capture needs {e.name}: pip install 'kvsim[capture]'") from None

    for line in command(Asked(**{f.name: getattr(args, f.name) for f in fields(Asked)})):
        print(line, flush=True)


def trace_info(args: argparse.Namespace) -> None:
    from kvsim.trace.info import describe

    found = describe(args.trace, args.allow_partial)
    if args.json:
        _json(found)
        return
    captured = [x for x in found["layers"] if x["captured"]]
    needs = {name: "yes" if need["supplied"] else f"no: capture with {need['option']}" for name, need in found["needs"].items()}
    rows = {f"layers ({len(captured)} of {len(found['layers'])} captured)": captured, "supplies": needs}
    _show({k: v for k, v in found.items() if k not in ("layers", "needs")} | rows)


def trace_check(args: argparse.Namespace) -> int:
    from kvsim.trace.check import check_trace

    sound = True
    for problem in check_trace(args.trace, args.allow_partial):
        print(problem)
        sound = False
    if sound:
        print(f"{args.trace}: sound")
    return DONE if sound else FAILED


def trace_synth(args: argparse.Namespace) -> None:
    from kvsim.synth.generate import synthesize

    given = {k: v for k, v in vars(args).items() if k in (*SYNTH, "dtype", "workload") and v is not None}
    print(synthesize(args.trace, **given).path)


def replay_(args: argparse.Namespace) -> int:
    from kvsim.metrics.diagnostics import write
    from kvsim.places import names_in, place
    from kvsim.replay.folder import partial
    from kvsim.replay.run import replay

    _load(args.policy_file)
    options = {name: getattr(args, name) for name in REPLAY}
    try:
        with _progress() as progress:
            print(replay(args.trace, args.policy, args.out, progress=progress, also=write, **options).path)
    except KeyboardInterrupt:
        kept = partial(place(args.out))
        some = f"{kept} keeps what is finished, and the same command goes on from there"
        _complain(f"interrupted: {some if names_in(kept) else 'nothing was finished'}")
        return INTERRUPTED
    return DONE


def sweep_(args: argparse.Namespace) -> int:
    from kvsim.metrics.diagnostics import write
    from kvsim.replay.sweep import sweep

    options = {name: getattr(args, name) for name in SWEEP}
    try:
        with _progress("sweep") as progress:
            for run in sweep(args.study, args.out, tell=_complain, progress=progress, also=write, **options):
                print(run.path)
    except KeyboardInterrupt:
        _complain(f"interrupted: the same command goes on from what is finished in {args.out}")
        return INTERRUPTED
    return DONE


def calibrate_(args: argparse.Namespace) -> None:
    from kvsim.replay.calibrate import calibrate

    print(calibrate(args.trace, args.policy, args.out, layers=args.layers, requests=args.requests, target=args.target))


def advise_(args: argparse.Namespace) -> None:
    from kvsim.advise.advice import advise, trial
    from kvsim.advise.menus import menus, same_units, target
    from kvsim.advise.told import lines, written

    goal, out = target(args.target), Path(args.out)
    if args.verify:
        raise WrongUse(
            "--verify runs the advice in a live model, which kvsim cannot do yet; without it the advice is tried by replay"
        )
    if out.exists():
        raise WrongUse(f"{out}: exists already, and advice is never overwritten; choose another -o, or remove it")
    with _progress() as progress:
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
        _json({"target": str(goal)} | asdict(advice) | {"pages": units, "goal": asdict(goal), "trial": tried and asdict(tried)})
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


def policies(args: argparse.Namespace) -> None:
    from kvsim.policies.names import names

    _load(args.policy_file)
    what = "index" if args.name in names("index") else "policy"
    found = [_described(what, name) for name in ([args.name] if args.name else sorted(names(what)))]
    if args.json:
        _json(found)
    elif args.presets:
        _print_presets(found)
    elif args.name:
        _show(found[0])
    else:
        for kind in ("keep", "store", "read"):
            print(kind)
            for p in found:
                if p["kind"] == kind:
                    print(f"  {p['name']:16} {p['act']}")


def compare_(args: argparse.Namespace) -> int:
    from kvsim.metrics.compare import compare, lines
    from kvsim.metrics.run import open_run
    from kvsim.report.names import labels

    before, after = (open_run(path) for path in args.runs)
    pair = (_named(before, args.policies[0]), _named(after, args.policies[1])) if args.policies else None
    found = compare(before, after, pair, args.tolerance)
    if args.json:
        _json({"rows": found.to_dicts()})
    else:
        for line in lines(found, labels([p.id for run in (before, after) for p in run.policies])):
            print(line)
    return FAILED if args.gate and found["worse"].any() else DONE


def diff_(args: argparse.Namespace) -> None:
    from kvsim.metrics.difference import by_layer, difference
    from kvsim.metrics.run import open_run

    run = open_run(args.run)
    first, second = (_named(run, policy) for policy in args.policies)
    found = difference(run, first, second, layers=args.layers, requests=args.requests)
    if args.out:
        found.write_parquet(args.out)
    layers = by_layer(found).to_dicts()
    if args.json:
        _json({"first": first, "second": second, "layers": layers})
        return
    print(f"tokens a head reads in a step, means; first: {args.policies[0]}, second: {args.policies[1]}")
    for row in layers:
        print(
            f"  layer {row['layer']:3}  alike {row['alike']:.1%}  both {row['both']:.1f}  only first {row['only_first']:.1f}  only second "
            f"{row['only_second']:.1f}  evidence {row['evidence_first']:.1f} and {row['evidence_second']:.1f}"
        )


def _named(run: Any, policy: str) -> str:
    """The id of a policy of a run, from its id, its file's name or any way to write it."""
    from kvsim.policies.language import parse_policy

    there = [p.id for p in run.policies if p.rows]
    found = [p for p in there if policy in (p, p.partition(":")[0])] or [x for x in [parse_policy(policy).id] if x in there]
    if not found:
        raise WrongUse(f"{run.path}: no policy {policy!r} in this run; it has {', '.join(there)}")
    return found[0]


def report_(args: argparse.Namespace) -> None:
    from kvsim.report.page import report

    print(report(args.runs, args.out, png=args.png, svg=args.svg))


def cost_import(args: argparse.Namespace) -> None:
    from kvsim.cost.load import lines, load
    from kvsim.cost.samples import write_samples

    given = {name: getattr(args, name) for name in ("gpu", "geometry", "classes", "batch", "context", "cache", "pages", "page")}
    found = load(args.files, args.format, **given)
    if args.out:
        write_samples(found.samples, args.out)
    if args.json:
        _json({"files": found.files})
        return
    for line in lines(found):
        print(line)


def cost_measure(args: argparse.Namespace) -> None:
    from kvsim.cost.heads import read_geometry
    from kvsim.cost.measure.choose import device_named, usual
    from kvsim.cost.measure.rounds import measure
    from kvsim.cost.samples import write_samples

    g = read_geometry(args.geometry) if args.geometry else usual(args.device)
    device = device_named(args.device, g, args.largest)
    samples = measure(device, g, args.classes, args.seconds, between=args.between, progress=_complain)
    write_samples(samples, args.out)
    counts = ", ".join(f"{n} {s}" for s, n in sorted(samples["status"].value_counts().iter_rows()))
    print(f"{args.out}: {device.name}: {counts}")


def cost_recipe(args: argparse.Namespace) -> None:
    from kvsim.cost.hardware import named_gpu
    from kvsim.cost.heads import read_geometry
    from kvsim.cost.measure.choose import usual
    from kvsim.cost.measure.recipe import recipe

    g = read_geometry(args.geometry) if args.geometry else usual("cuda")
    print(recipe(named_gpu(args.gpu), g, args.classes, args.between), end="")


def cost_fit(args: argparse.Namespace) -> None:
    from kvsim.cost.model import calibrate, lines, write_model

    model = calibrate(args.samples, args.gpu, halved=args.half, draws=args.draws, seed=args.seed)
    write_model(model, args.out)
    for line in lines(model):
        print(line)


def cost_check(args: argparse.Namespace) -> int:
    from kvsim.cost.check import check, lines
    from kvsim.cost.model import read_model
    from kvsim.cost.samples import read_samples

    found = check(read_model(args.model), read_samples(args.samples), strict=args.strict)
    if args.json:
        _json(found)
    else:
        for line in lines(found):
            print(line)
    return DONE


def cost_predict(args: argparse.Namespace) -> None:
    from kvsim.cost import predict
    from kvsim.cost.model import read_model
    from kvsim.metrics.run import open_run

    run = open_run(args.run)
    asked = predict.Asked(
        batch=args.batch,
        variant=args.variant,
        kernels=_kernels(args),
        how=_how(args),
        weights_bytes=_bytes(args.weights),
        graph=args.graph,
    )
    bill = predict.predict(read_model(args.model), run.about, run.ledger, run.tables["events"], asked)
    if args.strict:
        predict.refuse_uncalibrated(bill.parts, "parts of steps")
    predict.write(bill, args.out)
    if args.json:
        _json({"policies": bill.summary, "notes": bill.notes})
        return
    for line in (*predict.lines(bill), args.out):
        print(line)


def cost_whatif(args: argparse.Namespace) -> None:
    from kvsim.cost import whatif
    from kvsim.cost.heads import geometry
    from kvsim.cost.model import read_model

    asked = whatif.Asked(
        args.policy,
        contexts=args.context,
        batches=args.batch,
        lengths=args.lengths,
        variants=args.variant,
        kernels=_kernels(args),
        how=_how(args),
        devices=args.tp,
        union=args.union_factor,
        weights_bytes=_bytes(args.weights),
        graph=args.graph,
        padded=args.padded,
    )
    rows = whatif.whatif(read_model(args.model), geometry(args.geometry), asked)
    if args.strict:
        whatif.refuse_uncalibrated(rows)
    if args.json:
        _json({"rows": rows})
        return
    for line in whatif.lines(rows):
        print(line)


def cost_serve(args: argparse.Namespace) -> None:
    from kvsim.cost.heads import geometry
    from kvsim.cost.model import read_model
    from kvsim.cost.serve import Asked, lines, serve

    asked = Asked(
        args.policy,
        contexts=args.context,
        batch=args.batch,
        lengths=args.lengths,
        variant=args.variant,
        kernels=_kernels(args),
        how=_how(args),
        union=args.union_factor,
        graph=args.graph,
        memory_share=args.memory_share,
        weights=_bytes(args.weights) or 0,
        workspace=_bytes(args.workspace) or 0,
        prefix=args.prefix,
        bucket=args.bucket,
        span=args.span,
    )
    found = serve(read_model(args.model), geometry(args.geometry), asked)
    if args.json:
        _json(found)
        return
    for line in lines(found):
        print(line)


def cost_explain(args: argparse.Namespace) -> None:
    from kvsim.cost import claims, explain
    from kvsim.cost.fixed import fixed
    from kvsim.cost.heads import geometry
    from kvsim.cost.model import read_model
    from kvsim.cost.prices import priced_for

    if args.claims:
        if args.json:
            _json({"claims": [claims.quest(), claims.qevict()]})
            return
        for line in claims.lines():
            print(line)
        return
    if not (args.model and args.geometry and args.context):
        raise WrongUse("explain needs --model, --geometry and --context, or --claims alone")
    model, heads = read_model(args.model), geometry(args.geometry)
    prices = priced_for(
        model,
        (heads.q_heads, heads.kv_heads, heads.head_dim),
        rest=args.variant,
        kernels=_kernels(args),
        weights_bytes=_bytes(args.weights),
        graph=args.graph,
    )
    found = explain.explain(prices, fixed(args.policy, heads, args.union_factor), heads, [args.context] * args.batch, _how(args))
    if args.json:
        _json({"parts": found, "inputs": model.about["inputs"]})
        return
    for line in explain.lines(found, model.about["inputs"]):
        print(line)


def _how(args: argparse.Namespace) -> Any:
    from kvsim.cost.launches import Kernels

    return Kernels(args.scores, args.scores_at, args.dequant)


def _kernels(args: argparse.Namespace) -> dict[str, str]:
    """CLASS=VARIANT of --kernel."""
    from kvsim.cost.samples import CLASSES

    chosen: dict[str, str] = {}
    for text in args.kernel:
        cls, _, variant = text.partition("=")
        if cls not in CLASSES or not variant:
            raise WrongUse(f"--kernel {text}: expected CLASS=VARIANT, the class one of {', '.join(CLASSES)}")
        chosen[cls] = variant
    return chosen


def _bytes(text: str | None) -> int | None:
    """13.5GB, 4GiB or a number of bytes."""
    if text is None:
        return None
    units = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6, "": 1}
    unit = next(u for u in units if text.endswith(u))
    try:
        size = float(text.removesuffix(unit))
    except ValueError:
        size = -1.0
    if not 0 < size < 1e15:
        raise WrongUse(f"--weights {text}: expected bytes such as 13.5GB, 4GiB or 13476831232")
    return round(size * units[unit])


# ------------------------------------------------------------------------------------------------ options
Options = Callable[[argparse.ArgumentParser], Any]
REPLAY = ("layers", "requests", "steps", "workers", "memory", "plans", "explain", "baselines", "kv_dtype", "allocator", "strict")
SWEEP = ("workers", "memory", "engine", "scheduler", "max_tasks", "strict", "dry_run")
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
    "swing": "steps that the answer looks at every other needle before it turns to the rest, and back (0: at all)",
}


def _demo_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", nargs="?", metavar="TRACE", help="another trace than the bundled one")
    p.add_argument("-o", "--out", default="demo.html", metavar="FILE", help="the page (default: demo.html)")


def _capture_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help="a hub id, a folder, a .gguf file, or pkg:PACKAGE that ships one")
    p.add_argument("-o", "--out", required=True, metavar="TRACE", help="a new folder")
    what = p.add_argument_group("what the model reads")
    what.add_argument("--prompt", metavar="FILE", help="a text")
    what.add_argument("--question", metavar="TEXT", help="asked after --prompt, fed token by token")
    what.add_argument(
        "--task", metavar="NAME", help=f"a prompt made from a long text: {CAPTURE_TASKS}; or FILE.jsonl of your own"
    )
    what.add_argument("--text", metavar="FILE", help="that long text (default: Python's own language reference, or its code)")
    what.add_argument(
        "--context", type=int, metavar="N", help="tokens of a task's prompt, at most (default: 1024; of a row: its own)"
    )
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of a task; the next request has the next seed")
    what.add_argument("--requests", type=int, metavar="N", help="how many in this trace (default: 1; of a file: every row)")
    what.add_argument("--id", type=int, default=0, metavar="N", help="of the first request in the trace (default: 0)")
    what.add_argument("--depth", type=float, metavar="X", help="where in the prompt the needle is, 0 to 1 (default: drawn)")
    what.add_argument(
        "--at", choices=("start", "middle", "end", "border"), help="where on a page the needle is: border, half on each side"
    )
    what.add_argument("--page", type=int, metavar="N", help="tokens of that page (default: 16)")
    what.add_argument("--order", type=int, metavar="N", help="which order of its facts or documents (default: 0, as they are)")
    what.add_argument("--mode", choices=("greedy", "teacher_forced", "question_fed"), help="who says what follows the prompt")
    what.add_argument("--seen", action="store_true", help="the question is part of the prompt")
    what.add_argument("--steps", type=int, metavar="N", help="decode steps, those of fed tokens included")
    what.add_argument("--max-steps", type=int, metavar="N", help="at most so many, and none after the end of the text")
    what.add_argument("--sample", type=float, metavar="X", help="capture this part of the requests, drawn by --seed")
    keep = p.add_argument_group("what is recorded")
    keep.add_argument("--layers", type=_layers, metavar="LIST", help="0,3 or 4-9, ends included, or all (default)")
    keep.add_argument("--every", type=int, default=1, metavar="N", help="queries of one decode step in N (default: 1, all)")
    keep.add_argument("--window-rows", type=int, default=64, metavar="N", help="queries of the last prompt tokens (default: 64)")
    for name, kept in {
        "prefill-mass": "attention summed over the prompt",
        "k-pre": "keys before RoPE",
        "wo-norm": "value norms",
    }.items():
        keep.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=kept)
    keep.add_argument("--compression", choices=("none", "zstd"), default="none", help="zstd for archives")
    how = p.add_argument_group("how it runs")
    how.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="of the model (default: its own; GGUF: float32)")
    how.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    how.add_argument("--attention", choices=("eager", "sdpa"), help="implementation (default: the model's)")
    how.add_argument("--chunk", type=int, metavar="N", help="prompt tokens of a forward (default: all at once)")
    how.add_argument("--verify", action="store_true", help="attend again in float64 and with the model's own function")
    how.add_argument("--dry-run", action="store_true", help="print bytes and memory, and stop")
    how.add_argument("--restart", action="store_true", help="replace what an unfinished capture left")
    how.add_argument("--append", action="store_true", help="go on with the trace there: requests that it has are left out")


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
    p.add_argument(
        "--workload", metavar="NAME", help="who looks at the needles, and when: needle (default), anchors, drift, reversal, ..."
    )
    p.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="of keys, values and queries")


def _replay_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("trace", metavar="TRACE")
    p.add_argument(
        "-p", "--policy", nargs="+", action="extend", required=True, metavar="POLICY", help="expressions, or @FILE.toml"
    )
    p.add_argument("-o", "--out", required=True, metavar="RUN", help="the run directory; must not exist")
    for name in ("layers", "requests", "steps"):
        p.add_argument(f"--{name}", type=_numbers, metavar="LIST", help=f"only these {name}: 0,3 or 4-9, ends included")
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
    _policy_file(p)


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
        p.add_argument(f"--{name}", type=_numbers, metavar="LIST", help=f"only these {name}: 0,3 or 4-9, ends included")


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
    p.add_argument("--layers", type=_numbers, metavar="LIST", help="only these layers: 0,3 or 4-9, ends included")
    p.add_argument("--workers", type=int, metavar="N", help="processes of the replays")
    p.add_argument("--verify", action="store_true", help="run the advice in a live model (not yet)")
    p.add_argument("--json", action="store_true", help="for programs")


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


def _compare_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "runs", nargs=2, metavar="RUN", help="before and after, of one trace; twice the same to compare two of its policies"
    )
    p.add_argument("--policies", nargs=2, metavar="POLICY", help="one of each run (default: every policy that both have)")
    p.add_argument("--gate", action="store_true", help="exit 1 when anything got worse")
    p.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="relative change that counts for nothing (default: 0.001)"
    )
    p.add_argument("--json", action="store_true", help="for programs")


def _diff_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", metavar="RUN", help="replayed with --plans")
    p.add_argument("--policies", nargs=2, required=True, metavar="POLICY", help="the two of them")
    for name in ("layers", "requests"):
        p.add_argument(f"--{name}", type=_numbers, metavar="LIST", help=f"only these {name}: 0,3 or 4-9, ends included")
    p.add_argument("-o", "--out", metavar="FILE", help="also write a row a head and step, with the positions, as Parquet")
    p.add_argument("--json", action="store_true", help="for programs")


def _cost_import_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("files", nargs="+", metavar="FILE", help="exports of profilers, tables of timings, samples")
    p.add_argument("-o", "--out", metavar="SAMPLES.csv", help="write the samples there (default: only count)")
    p.add_argument(
        "--format", default="auto", metavar="NAME", help="ncu, nsys, nsys-sqlite, kineto, proton, aic, llmservingsim, samples"
    )
    p.add_argument("--gpu", metavar="NAME", help="whose limits the rows are held against (default: the one the file names)")
    p.add_argument("--geometry", metavar="FILE", help="JSON with the heads of the model, for exports that hold none")
    p.add_argument("--classes", metavar="FILE", help="TOML with rules of your own, kernel names to classes")
    p.add_argument("--batch", type=int, metavar="N", help="requests, where the file does not say")
    p.add_argument("--context", type=int, metavar="N", help="tokens of a request, where the file does not say")
    p.add_argument(
        "--pages", type=int, metavar="N", help="pages that a kv head reads, all requests together, of kernels that read pages"
    )
    p.add_argument("--page", type=int, metavar="N", help="tokens of a page")
    p.add_argument("--cache", choices=("cold", "hot", "unknown"), help="what the measurement left in the caches")
    p.add_argument("--json", action="store_true", help="for programs")


def _cost_measure_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--out", required=True, metavar="SAMPLES.csv", help="the samples")
    p.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda (default): a GPU through torch, ROCm too; cpu: one thread of this machine",
    )
    p.add_argument(
        "--classes", type=_words, metavar="NAMES", help="of kernels, with commas between (default: all that the device has)"
    )
    p.add_argument("--geometry", metavar="FILE", help="JSON with the heads of the model (default: those of Llama-3.1-8B)")
    p.add_argument(
        "--seconds", type=float, default=60, metavar="N", help="of rounds, five of which are made in any case (default: 60)"
    )
    p.add_argument(
        "--largest", type=int, metavar="MIB", help="K and V of the largest launch (default: 2048 at most, on a CPU 256)"
    )
    p.add_argument("--between", action="store_true", help="shapes inside the box of the usual ones, for cost check")


def _cost_recipe_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--gpu", default="h100", metavar="NAME", help="whose memory bounds the shapes (default: h100)")
    p.add_argument("--geometry", metavar="FILE", help="JSON with the heads of the model (default: those of Llama-3.1-8B)")
    p.add_argument("--classes", type=_words, metavar="NAMES", help="of kernels, with commas between (default: all)")
    p.add_argument("--between", action="store_true", help="shapes inside the box of the usual ones, for cost check")


def _cost_fit_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("samples", nargs="+", metavar="SAMPLES.csv")
    p.add_argument("-o", "--out", required=True, metavar="MODEL.json", help="the cost model")
    p.add_argument("--gpu", metavar="NAME", help="where the samples name none")
    p.add_argument("--half", action="store_true", help="fit half of the shapes and leave the others to cost check")
    p.add_argument("--draws", type=int, default=200, metavar="N", help="resamples behind the intervals (default: 200)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the resamples")


def _cost_check_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL.json")
    p.add_argument("samples", metavar="SAMPLES.csv")
    p.add_argument("--strict", action="store_true", help="refuse samples that the model is not calibrated for")
    p.add_argument("--json", action="store_true", help="for programs")


def _cost_price_options(p: argparse.ArgumentParser) -> None:
    """What predict, whatif and explain share: which fits, and what an engine does where it has a choice."""
    p.add_argument(
        "--kernel", action="append", default=[], metavar="CLASS=VARIANT", help="whose fit, where the model has several"
    )
    p.add_argument("--graph", choices=("eager", "piecewise", "full"), help="only fits of steps launched so")
    p.add_argument(
        "--weights", metavar="SIZE", help="bytes of the model's weights, 13.5GB: memory, and a floor of the rest of a step"
    )
    p.add_argument(
        "--scores",
        choices=("fused_lse", "second_pass", "sdpa_fallback"),
        default="second_pass",
        help="how probabilities are had (default: second_pass)",
    )
    p.add_argument(
        "--scores-at", choices=("steps", "events"), default="steps", help="at every step (default), or only at those that cut"
    )
    p.add_argument(
        "--dequant", choices=("separate", "fused"), default="separate", help="a kernel of its own (default), or inside attention"
    )
    p.add_argument("--json", action="store_true", help="for programs")


def _cost_predict_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", metavar="RUN")
    p.add_argument("--model", required=True, metavar="MODEL.json", help="a cost model")
    p.add_argument("-o", "--out", required=True, metavar="DIR", help="a new folder for the tables")
    p.add_argument(
        "--batch", type=_number, default=1, metavar="N", help="requests at once, all like the replayed one (default: 1)"
    )
    p.add_argument(
        "--variant", metavar="NAME", help="which steps or rests of steps, where the model has several: a weight format"
    )
    p.add_argument("--strict", action="store_true", help="exit 3 unless every part of every step is calibrated")
    _cost_price_options(p)


def _cost_whatif_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", required=True, metavar="MODEL.json", help="a cost model")
    p.add_argument(
        "-p", "--policy", nargs="+", action="extend", required=True, metavar="POLICY", help="expressions with fixed budgets"
    )
    p.add_argument(
        "--geometry", required=True, metavar="FILE|MODEL_ID", help="JSON with the heads of the model, or one that kvsim knows"
    )
    p.add_argument("--context", type=_numbers, default=[], metavar="LIST", help="tokens of a request: 8192,32768")
    p.add_argument("--batch", type=_numbers, default=[1], metavar="LIST", help="requests: 1,8 (default: 1)")
    p.add_argument(
        "--lengths", type=_numbers, default=[], metavar="LIST", help="tokens of each request of one batch, in place of both"
    )
    p.add_argument("--padded", action="store_true", help="every request costs what the longest does")
    p.add_argument(
        "--variant", action="append", default=[], metavar="NAME", help="only these steps or rests of steps: a weight format"
    )
    p.add_argument("--tp", type=_number, default=1, metavar="N", help="devices that share the heads (default: 1)")
    p.add_argument(
        "--union-factor", type=float, metavar="X", help="pages a group reads over those of one head (default: the most it can be)"
    )
    p.add_argument("--strict", action="store_true", help="exit 3 unless every row is calibrated")
    _cost_price_options(p)


def _cost_serve_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", required=True, metavar="MODEL.json", help="a cost model")
    p.add_argument(
        "-p", "--policy", nargs="+", action="extend", required=True, metavar="POLICY", help="expressions with fixed budgets"
    )
    p.add_argument(
        "--geometry", required=True, metavar="FILE|MODEL_ID", help="JSON with the heads of the model, or one that kvsim knows"
    )
    p.add_argument("--context", type=_numbers, required=True, metavar="LIST", help="tokens of requests alike: 8192,32768")
    p.add_argument("--batch", type=_number, default=1, metavar="N", help="requests, for the latency (default: 1)")
    p.add_argument("--lengths", type=_numbers, default=[], metavar="LIST", help="a mix: tokens of each request of one batch")
    p.add_argument(
        "--bucket", type=_number, default=1024, metavar="N", help="lengths of the mix rounded up to it (default: 1024)"
    )
    p.add_argument("--prefix", type=int, default=0, metavar="N", help="first tokens that all requests share (default: 0)")
    p.add_argument("--span", type=int, default=0, metavar="N", help="evicted tokens that are wanted again")
    p.add_argument(
        "--memory-share", type=float, default=0.9, metavar="X", help="of the device's memory that may be used (default: 0.9)"
    )
    p.add_argument("--workspace", metavar="SIZE", help="bytes that activations and graphs take, 2GB")
    p.add_argument(
        "--variant", metavar="NAME", help="which steps or rests of steps, where the model has several: a weight format"
    )
    p.add_argument(
        "--union-factor", type=float, metavar="X", help="pages a group reads over those of one head (default: the most it can be)"
    )
    _cost_price_options(p)


def _cost_explain_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--claims", action="store_true", help="published times that bytes contradict")
    p.add_argument("--model", metavar="MODEL.json", help="a cost model")
    p.add_argument(
        "-p", "--policy", default="full()", metavar="POLICY", help="an expression with a fixed budget (default: full())"
    )
    p.add_argument("--geometry", metavar="FILE|MODEL_ID", help="JSON with the heads of the model, or one that kvsim knows")
    p.add_argument("--context", type=_number, metavar="N", help="tokens of a request")
    p.add_argument("--batch", type=_number, default=1, metavar="N", help="requests (default: 1)")
    p.add_argument(
        "--variant", metavar="NAME", help="which steps or rests of steps, where the model has several: a weight format"
    )
    p.add_argument(
        "--union-factor", type=float, metavar="X", help="pages a group reads over those of one head (default: the most it can be)"
    )
    _cost_price_options(p)


def _policy_file(p: argparse.ArgumentParser) -> None:
    p.add_argument("--policy-file", action="append", default=[], metavar="FILE", help="a Python file with policies of your own")


COMMANDS: dict[tuple[str, ...], tuple[str, Callable[[argparse.Namespace], Any], Options]] = {
    ("demo",): ("replay the bundled trace, or yours, and write one page", demo, _demo_options),
    ("capture",): ("capture a trace from a running transformers model", capture_, _capture_options),
    ("trace", "info"): ("what is in a trace, and which needs of policies it can supply", trace_info, _info_options),
    ("trace", "check"): ("sizes, hashes, positions and values of a trace", trace_check, _trace_options),
    ("trace", "synth"): ("write a seeded synthetic trace with a known answer", trace_synth, _synth_options),
    ("replay",): ("replay policies on a trace", replay_, _replay_options),
    ("sweep",): ("a grid of policies on several traces, resumable", sweep_, _sweep_options),
    ("calibrate",): ("learn what a codec needs beforehand from another trace", calibrate_, _calibrate_options),
    ("advise",): ("budgets per layer and kv head that reach a target at least bytes", advise_, _advise_options),
    ("policies",): ("what exists: paper, needs, parameters, presets", policies, _policies_options),
    ("cost", "recipe"): ("which shapes to measure, and how with a profiler", cost_recipe, _cost_recipe_options),
    ("cost", "measure"): ("the kernels of a device -> samples", cost_measure, _cost_measure_options),
    ("cost", "import"): ("profilers' exports -> samples, with an account of every row", cost_import, _cost_import_options),
    ("cost", "fit"): ("samples -> a cost model of one GPU", cost_fit, _cost_fit_options),
    ("cost", "check"): ("a cost model against measurements", cost_check, _cost_check_options),
    ("cost", "predict"): ("a run's bytes -> time per output token, by policy and class", cost_predict, _cost_predict_options),
    ("cost", "whatif"): (
        "policies with fixed budgets at any context and batch, without a trace",
        cost_whatif,
        _cost_whatif_options,
    ),
    ("cost", "serve"): (
        "how many requests fit, what their step takes, from which length a policy pays",
        cost_serve,
        _cost_serve_options,
    ),
    ("cost", "explain"): (
        "which fit and term a time comes from; published times that bytes contradict",
        cost_explain,
        _cost_explain_options,
    ),
    ("compare",): ("paired differences of two runs, with intervals over contexts", compare_, _compare_options),
    ("diff",): ("which tokens two policies of a run read differently, by layer, head and step", diff_, _diff_options),
    ("report",): ("one self-contained page of one or several runs", report_, _report_options),
}


GROUPS = {
    "trace": ("info, check, synth", "Traces."),
    "cost": (
        "recipe, measure, import, fit, check, predict, whatif, serve, explain",
        "Time from counted bytes, on a GPU that was measured.",
    ),
}


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


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _layers(text: str) -> list[int] | None:
    return None if text == "all" else _numbers(text)


MOST = 1_000_000  # numbers in a list


def _number(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def _numbers(text: str) -> list[int]:
    """0,3 or 4-9 -> numbers, ends included."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        plain = all(x.isascii() and x.isdigit() and len(x) < 9 for x in (first, last or first))
        if not plain or not 0 <= int(last or first) - int(first) < MOST:
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 3, 0,1 or 4-9, at most {MOST} of them")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


# ------------------------------------------------------------------------------------------------ policies
def _described(what: str, name: str) -> dict[str, Any]:
    """A policy or index as plain data: what it does, its paper, its parameters as they are written, what it needs, its presets."""
    import inspect

    from kvsim.policies.names import named
    from kvsim.policies.parameters import parameters, written

    cls = named(what, name)
    defaults = inspect.signature(cls.__init__).parameters  # type: ignore[misc]  # read from a class, never called
    takes = {n: "required" if required else written(defaults[n].default) for n, (_, required) in parameters(cls).items()}
    told = {
        "name": name,
        "kind": getattr(cls, "kind", what) or what,
        "act": getattr(cls, "act", ""),
        "paper": getattr(cls, "paper", "") or None,
    }
    presets = {
        preset: {n: x if n == "source" else written(x) for n, x in given.items()}
        for preset, given in getattr(cls, "presets", {}).items()
    }
    return told | {"needs": _needs(name, takes), "parameters": takes, "presets": presets}


def _needs(name: str, takes: dict[str, str]) -> dict[str, str]:
    """{need: the capture option that records it} of a policy with its defaults; a budget does not change them."""
    from kvsim.policies.language import parse

    required = ", ".join(f"{n}=share(0.5)" for n, default in takes.items() if default == "required")
    try:
        parts = [part for part in parse(f"{name}({required})").parts if type(part).__name__ == name]
    except WrongUse:  # an index, or a parameter that is no budget
        return {}
    return {str(need): need.option or "any trace" for part in parts for need in sorted(part.needs, key=str)}


def _print_presets(found: Sequence[dict[str, Any]]) -> None:
    for p in found:
        for preset, given in p["presets"].items():
            values = ", ".join(f"{n}={x}" for n, x in given.items() if n != "source")
            print(f'{p["name"]}(preset="{preset}")  {values}\n  {given["source"]}')
            others = {n: d for n, d in p["parameters"].items() if n in given and d not in ("required", given[n])}
            if others:
                print(f"  kvsim's own: {', '.join(f'{n}={d}' for n, d in others.items())}")


# ------------------------------------------------------------------------------------------------ printing
def _complain(line: str) -> None:
    print(f"kvsim: {' '.join(line.split())}", file=sys.stderr)


def _json(found: Any) -> None:
    print(json.dumps(found, indent=1, ensure_ascii=False))


def _show(found: dict[str, Any], indent: str = "") -> None:
    """Plain data as lines: one per entry, rows of a table one per row."""
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{indent}{key}{'' if value else ': none'}")
            _show(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"{indent}{key}")
            for row in value:
                print(f"{indent}  " + "  ".join(f"{k} {v}" for k, v in row.items() if v not in (None, [])))
        else:
            print(f"{indent}{key:16} {'—' if value is None else value}")


def _load(files: Sequence[str]) -> None:
    from kvsim.policies.language import load_file

    for file in files:
        load_file(file)


@contextmanager
def _progress(what: str = "replay") -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr when a person is looking; of a sweep, else, a line now and then."""
    if not sys.stderr.isatty():
        yield _lines() if what == "sweep" else lambda done, tasks: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, tasks: bar.update(task, completed=done, total=tasks)


EVERY = 30.0  # seconds between two lines of progress


def _lines() -> Callable[[int, int], None]:
    from time import monotonic

    from kvsim.replay.estimate import duration

    begun: list[tuple[float, int]] = []  # the time and count of the start, and of the last line

    def tick(done: int, tasks: int) -> None:
        now = monotonic()
        if not begun:
            begun.extend([(now, done)] * 2)
        elif now - begun[1][0] >= EVERY and done < tasks:
            rest = (now - begun[0][0]) / (done - begun[0][1]) * (tasks - done)
            begun[1] = now, done
            _complain(f"{done} of {tasks} layers done, about {duration(rest)} left")

    return tick
