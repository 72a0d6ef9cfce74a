"""`kvsim capture` and `kvsim trace`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from kvsim.cli.codes import DONE, FAILED
from kvsim.cli.parsing import Commands, layer_list
from kvsim.cli.printing import complain, print_json, print_plain
from kvsim.errors import WrongUse

CAPTURE_TASKS = (
    "needle, passkey, border, multi-needle, multi-key, variables, two-evidence, few-shot, code, chat, decoded, reversal, "
    "common-words, plain"
)  # kvsim.capture.tasks.TASKS, without loading it


ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")


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
    "index_heads": "heads of a learned indexer beside (0: none)",
    "swing": "steps that the answer looks at every other needle before it turns to the rest, and back (0: at all)",
}


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
        print_json(found)
        return
    captured = [x for x in found["layers"] if x["captured"]]
    needs = {
        name: "yes" if need["supplied"] else f"no: capture with {need['option']}" if need["option"] else "no"
        for name, need in found["needs"].items()
    }
    requests = [r | {"evidence": ", ".join(map(_span, r["evidence"])) or None} for r in found["requests"]]
    rows = {"requests": requests, f"layers ({len(captured)} of {len(found['layers'])} captured)": captured, "supplies": needs}
    print_plain({k: v for k, v in found.items() if k not in ("layers", "needs")} | rows)


def _span(span: dict[str, Any]) -> str:
    return f"{span['label']} {span['start']} to {span['stop'] - 1}"


def trace_check(args: argparse.Namespace) -> int:
    from kvsim.trace.check import check_trace

    sound = True
    for problem in check_trace(args.trace, args.allow_partial, tell=complain):
        print(problem)
        sound = False
    if sound:
        print(f"{args.trace}: sound")
    return DONE if sound else FAILED


def trace_synth(args: argparse.Namespace) -> None:
    from kvsim.synth.generate import synthesize

    given = {k: v for k, v in vars(args).items() if k in (*SYNTH, "dtype", "workload") and v is not None}
    print(synthesize(args.trace, **given).path)


def trace_convert(args: argparse.Namespace) -> None:
    from kvsim.trace.convert import convert

    print(convert(args.dumps, args.out, args.compression))


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
    keep.add_argument("--layers", type=layer_list, metavar="LIST", help="0,3 or 4-9, ends included, or all (default)")
    keep.add_argument("--every", type=int, default=1, metavar="N", help="queries of one decode step in N (default: 1, all)")
    keep.add_argument("--window-rows", type=int, default=64, metavar="N", help="queries of the last prompt tokens (default: 64)")
    for name, kept in {
        "prefill-mass": "attention summed over the prompt",
        "k-pre": "keys before RoPE",
        "wo-norm": "value norms",
    }.items():
        keep.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=kept)
    keep.add_argument("--q-stats", action="store_true", help="mean and covariance of the prompt queries before RoPE")
    keep.add_argument("--compression", choices=("none", "zstd"), default="none", help="zstd for archives")
    how = p.add_argument_group("how it runs")
    how.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="of the model (default: its own; GGUF: float32)")
    how.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    how.add_argument("--attention", choices=ATTENTION, help="implementation (default: the model's)")
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


def _convert_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("dumps", nargs="+", metavar="DUMP", help=".npz or .safetensors, or a folder of them: a request each")
    p.add_argument("-o", "--out", required=True, metavar="TRACE", help="a new folder")
    p.add_argument("--compression", choices=("none", "zstd"), default="none", help="of the trace (default: none)")


COMMANDS: Commands = {
    ("capture",): ("capture a trace from a running transformers model", capture_, _capture_options),
    ("trace", "info"): ("what is in a trace, and which needs of policies it can supply", trace_info, _info_options),
    ("trace", "check"): ("sizes, hashes, positions and values of a trace", trace_check, _trace_options),
    ("trace", "synth"): ("write a seeded synthetic trace with a known answer", trace_synth, _synth_options),
    ("trace", "convert"): ("write a trace of arrays that another tool saved", trace_convert, _convert_options),
}
