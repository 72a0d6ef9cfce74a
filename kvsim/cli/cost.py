"""`kvsim cost`."""

from __future__ import annotations

import argparse
from typing import Any

from kvsim.cli.codes import DONE
from kvsim.cli.parsing import Commands, list_of_numbers, one_number, word_list
from kvsim.cli.printing import complain, print_json
from kvsim.errors import WrongUse


def cost_import(args: argparse.Namespace) -> None:
    from kvsim.cost.load import lines, load
    from kvsim.cost.samples import write_samples

    given = {name: getattr(args, name) for name in ("gpu", "geometry", "classes", "batch", "context", "cache", "pages", "page")}
    found = load(args.files, args.format, **given)
    if args.out:
        write_samples(found.samples, args.out)
    if args.json:
        print_json({"files": found.files})
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
    samples = measure(device, g, args.classes, args.seconds, between=args.between, progress=complain)
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
        print_json(found)
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
        overlap=args.overlap,
    )
    bill = predict.predict(read_model(args.model), run.about, run.ledger, run.tables["events"], asked)
    if args.strict:
        predict.refuse_uncalibrated(bill.parts, "parts of steps")
    predict.write(bill, args.out)
    if args.json:
        print_json({"policies": bill.summary, "notes": bill.notes})
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
        print_json({"rows": rows})
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
        print_json(found)
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
            print_json({"claims": [claims.quest(), claims.qevict()]})
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
        print_json({"parts": found, "inputs": model.about["inputs"]})
        return
    for line in explain.lines(found, model.about["inputs"]):
        print(line)


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
        "--classes", type=word_list, metavar="NAMES", help="of kernels, with commas between (default: all that the device has)"
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
    p.add_argument("--classes", type=word_list, metavar="NAMES", help="of kernels, with commas between (default: all)")
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


def _cost_budget_options(p: argparse.ArgumentParser) -> None:
    """What whatif and serve share: policies without a trace."""
    p.add_argument("--model", required=True, metavar="MODEL.json", help="a cost model, or h100-vllm-0.14, which comes with kvsim")
    p.add_argument(
        "-p", "--policy", nargs="+", action="extend", required=True, metavar="POLICY", help="expressions with fixed budgets"
    )
    p.add_argument(
        "--geometry", required=True, metavar="FILE|MODEL_ID", help="JSON with the heads of the model, or one that kvsim knows"
    )


def _cost_union_option(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--union-factor", type=float, metavar="X", help="pages a group reads over those of one head (default: the most it can be)"
    )


def _cost_variant_option(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--variant", metavar="NAME", help="which steps or rests of steps, where the model has several: a weight format"
    )


def _cost_predict_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", metavar="RUN")
    p.add_argument("--model", required=True, metavar="MODEL.json", help="a cost model, or h100-vllm-0.14, which comes with kvsim")
    p.add_argument("-o", "--out", required=True, metavar="DIR", help="a new folder for the tables")
    p.add_argument(
        "--batch", type=one_number, default=1, metavar="N", help="requests at once, all like the replayed one (default: 1)"
    )
    _cost_variant_option(p)
    p.add_argument(
        "--overlap",
        choices=("none", "next_layer"),
        default="none",
        help="fetches one after the other with the rest (default), or behind the layer before",
    )
    p.add_argument("--strict", action="store_true", help="exit 3 unless every part of every step is calibrated")
    _cost_price_options(p)


def _cost_whatif_options(p: argparse.ArgumentParser) -> None:
    _cost_budget_options(p)
    p.add_argument("--context", type=list_of_numbers, default=[], metavar="LIST", help="tokens of a request: 8192,32768")
    p.add_argument("--batch", type=list_of_numbers, default=[1], metavar="LIST", help="requests: 1,8 (default: 1)")
    p.add_argument(
        "--lengths",
        type=list_of_numbers,
        default=[],
        metavar="LIST",
        help="tokens of each request of one batch, in place of both",
    )
    p.add_argument("--padded", action="store_true", help="every request costs what the longest does")
    p.add_argument(
        "--variant", action="append", default=[], metavar="NAME", help="only these steps or rests of steps: a weight format"
    )
    p.add_argument("--tp", type=one_number, default=1, metavar="N", help="devices that share the heads (default: 1)")
    _cost_union_option(p)
    p.add_argument("--strict", action="store_true", help="exit 3 unless every row is calibrated")
    _cost_price_options(p)


def _cost_serve_options(p: argparse.ArgumentParser) -> None:
    _cost_budget_options(p)
    p.add_argument("--context", type=list_of_numbers, required=True, metavar="LIST", help="tokens of requests alike: 8192,32768")
    p.add_argument("--batch", type=one_number, default=1, metavar="N", help="requests, for the latency (default: 1)")
    p.add_argument(
        "--lengths", type=list_of_numbers, default=[], metavar="LIST", help="a mix: tokens of each request of one batch"
    )
    p.add_argument(
        "--bucket", type=one_number, default=1024, metavar="N", help="lengths of the mix rounded up to it (default: 1024)"
    )
    p.add_argument("--prefix", type=int, default=0, metavar="N", help="first tokens that all requests share (default: 0)")
    p.add_argument("--span", type=int, default=0, metavar="N", help="evicted tokens that are wanted again")
    p.add_argument(
        "--memory-share", type=float, default=0.9, metavar="X", help="of the device's memory that may be used (default: 0.9)"
    )
    p.add_argument("--workspace", metavar="SIZE", help="bytes that activations and graphs take, 2GB")
    _cost_variant_option(p)
    _cost_union_option(p)
    _cost_price_options(p)


def _cost_explain_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--claims", action="store_true", help="published times that bytes contradict")
    p.add_argument("--model", metavar="MODEL.json", help="a cost model")
    p.add_argument(
        "-p", "--policy", default="full()", metavar="POLICY", help="an expression with a fixed budget (default: full())"
    )
    p.add_argument("--geometry", metavar="FILE|MODEL_ID", help="JSON with the heads of the model, or one that kvsim knows")
    p.add_argument("--context", type=one_number, metavar="N", help="tokens of a request")
    p.add_argument("--batch", type=one_number, default=1, metavar="N", help="requests (default: 1)")
    _cost_variant_option(p)
    _cost_union_option(p)
    _cost_price_options(p)


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


COMMANDS: Commands = {
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
}
