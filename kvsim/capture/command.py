"""What `kvsim capture` does, as lines: the prompt, what it will take, what it took, whether it is true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.capture import tasks
from kvsim.capture.check import summary, verify
from kvsim.capture.estimate import Plan
from kvsim.capture.load import load
from kvsim.capture.prompt import Prompt
from kvsim.capture.recorder import Keep
from kvsim.capture.run import STEPS, capture, check_place, planned
from kvsim.errors import KvsimError, WrongUse

TASKS = ("needle", "reversal", "plain")


@dataclass(frozen=True)
class Asked:
    """The options of the command. prompt: a file that the model reads; task: one of TASKS, from `text` or Python's own."""

    model: str
    out: str
    prompt: str | None = None
    question: str | None = None
    task: str | None = None
    text: str | None = None
    context: int = 1024
    seed: int = 0
    depth: float | None = None
    mode: str | None = None
    seen: bool = False
    steps: int | None = None
    layers: Sequence[int] | None = None
    window_rows: int = 64
    prefill_mass: bool = True
    k_pre: bool = True
    wo_norm: bool = True
    chunk: int | None = None
    dtype: str | None = None
    device: str = "cpu"
    attention: str | None = None
    compression: str = "none"
    verify: bool = False
    dry_run: bool = False
    restart: bool = False


def command(asked: Asked) -> Iterator[str]:
    """Lines to print, while it goes on. Raises WrongUse; KvsimError when writing fails or the capture is not what the model did."""
    _check(asked)
    text = tasks.read_text(asked.prompt or asked.text)
    loaded = load(asked.model, asked.dtype, asked.device, asked.attention)
    prompt = prompt_for(asked, text, loaded.tokenizer)
    keep = Keep(asked.window_rows, asked.prefill_mass, asked.k_pre, asked.wo_norm)
    plan = planned(loaded.model, prompt, asked.steps, asked.layers, keep, asked.chunk)
    yield from _planned(prompt, plan, asked)
    if asked.dry_run:
        return
    report = capture(
        loaded.model,
        prompt,
        asked.out,
        steps=asked.steps,
        layers=asked.layers,
        window_rows=keep.window_rows,
        prefill_mass=keep.prefill_mass,
        k_pre=keep.k_pre,
        wo_norm=keep.wo_norm,
        dtype=asked.dtype,
        chunk=asked.chunk,
        compression=asked.compression,
        source=loaded.source,
        tokenizer=loaded.tokenizer,
        restart=asked.restart,
    )
    yield (
        f"{report.path}: {report.steps} decode steps, {report.bytes:,} bytes in {report.seconds:.1f} s, of which the model waited "
        f"{report.stalled_seconds:.1f} s for the disk"
    )
    if report.said:
        answers = {None: "", True: ", which answers the question", False: ", which does not answer the question"}
        yield f"the model said {report.said!r}{answers[report.answered]}"
    if asked.verify:
        found = verify(report.path, loaded.model)
        if not all(x.sound for x in found):
            raise KvsimError(f"{report.path}: {summary(found)}")
        yield summary(found)


def prompt_for(asked: Asked, text: str, tokenizer: Any) -> Prompt:
    """The prompt of a task, or the text itself. Raises WrongUse."""
    forced, seen = asked.mode == "teacher_forced", asked.seen or asked.mode == "greedy"
    if asked.task is None:
        steps = (asked.steps or STEPS) if forced else 0
        return tasks.document(tokenizer, text, asked.question, seen, steps)
    if asked.task == "plain":
        return tasks.plain(tokenizer, text, asked.seed, asked.context, asked.steps or STEPS)
    make = tasks.needle if asked.task == "needle" else tasks.reversal
    return make(tokenizer, text, asked.seed, tokens=asked.context, depth=asked.depth, seen=seen, forced=forced)


def _check(asked: Asked) -> None:
    """Raises WrongUse: options that contradict each other."""
    if (asked.prompt is None) == (asked.task is None):
        raise WrongUse(f"--prompt FILE or --task {'|'.join(TASKS)}: expected one of them")
    asks = asked.question is not None or asked.task in ("needle", "reversal")
    for given, wanted, line in (
        (asked.question is not None, asked.task is None, "--question belongs to --prompt; a task asks its own"),
        (asked.text is not None, asked.task is not None, "--text belongs to --task; a text of your own is --prompt"),
        (asked.depth is not None, asks and asked.task is not None, "--depth belongs to --task needle and reversal"),
        (asked.seen, asks, "--seen belongs to a question: --question, --task needle or reversal"),
        (asked.mode == "question_fed", asks and not asked.seen, "--mode question_fed: expected a question, and no --seen"),
        (asked.mode == "teacher_forced", asked.question is None, "--mode teacher_forced: the answer to --question is not known"),
        (
            asked.mode == "greedy",
            asked.task != "plain",
            "--mode greedy: the text of --task plain is forced; give it with --prompt",
        ),
    ):
        if given and not wanted:
            raise WrongUse(line)
    if asked.steps is not None and asked.steps < 1:
        raise WrongUse(f"--steps {asked.steps}: expected 1 or more")
    if not asked.dry_run:
        check_place(Path(asked.out), asked.restart)


def _planned(prompt: Prompt, plan: Plan, asked: Asked) -> Iterator[str]:
    spans = ", ".join(f"{s.label} at {s.start}-{s.stop - 1}" for s in prompt.spans)
    yield f"prompt {prompt.prefill:,} tokens, {prompt.mode}, {len(prompt.fed)} fed" + (f"; {spans}" if spans else "")
    most = "at most " if asked.compression != "none" else ""
    yield f"disk {most}{plan.total_bytes:,} bytes ({', '.join(f'{k} {v:,}' for k, v in plan.bytes.items() if v)})"
    yield f"memory about {sum(plan.memory.values()):,} bytes ({', '.join(f'{k} {v:,}' for k, v in plan.memory.items() if v)})"
