"""What `kvsim capture` does, as lines: the prompts, what they will take, what they took, whether it is true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.capture import tasks
from kvsim.capture.check import summary, verify
from kvsim.capture.decode import STEPS
from kvsim.capture.estimate import Plan
from kvsim.capture.load import load
from kvsim.capture.prompt import Prompt
from kvsim.capture.recorder import Keep
from kvsim.capture.run import capture_all, planned
from kvsim.capture.sample import drawn
from kvsim.capture.session import How, Report, check_place
from kvsim.errors import KvsimError, WrongUse

ROWS = ".jsonl"  # a task that is a file
CONTEXT = 1024


@dataclass(frozen=True)
class Asked:
    """The options of the command. prompt: a file that the model reads; task: one of tasks.TASKS, from `text` or Python's own, or a
    file of rows."""

    model: str
    out: str
    prompt: str | None = None
    question: str | None = None
    task: str | None = None
    text: str | None = None
    context: int | None = None
    seed: int = 0
    requests: int | None = None
    id: int = 0
    depth: float | None = None
    at: str | None = None
    page: int | None = None
    order: int | None = None
    mode: str | None = None
    seen: bool = False
    steps: int | None = None
    sample: float | None = None
    max_steps: int | None = None
    layers: Sequence[int] | None = None
    every: int = 1
    window_rows: int = 64
    prefill_mass: bool = True
    k_pre: bool = True
    wo_norm: bool = True
    q_stats: bool = False
    chunk: int | None = None
    dtype: str | None = None
    device: str = "cpu"
    attention: str | None = None
    compression: str = "none"
    verify: bool = False
    dry_run: bool = False
    restart: bool = False
    append: bool = False

    @property
    def own(self) -> bool:
        """The task is a file of rows."""
        return self.task is not None and self.task.endswith(ROWS)

    @property
    def asks(self) -> bool:
        return self.question is not None or self.task not in (None, "plain")


def command(asked: Asked) -> Iterator[str]:
    """Lines to print, while it goes on. Raises WrongUse; KvsimError when writing fails or the capture is not what the model did."""
    _check(asked)
    given = _read(asked)
    loaded = load(asked.model, asked.dtype, asked.device, asked.attention)
    prompts = prompts_for(asked, given, loaded.tokenizer)
    keep = Keep(asked.window_rows, asked.prefill_mass, asked.k_pre, asked.wo_norm, asked.every, asked.q_stats)
    sampled = None if asked.sample is None else {"rate": asked.sample, "seed": asked.seed}
    how = How(asked.steps, asked.layers, keep, asked.dtype, asked.chunk, asked.compression, asked.max_steps, sampled)
    yield from _planned(list(prompts.values()), planned(loaded.model, list(prompts.values()), how=how), asked)
    if asked.dry_run:
        return
    place = {"source": loaded.source, "tokenizer": loaded.tokenizer, "restart": asked.restart, "append": asked.append}
    for report in capture_all(loaded.model, prompts, asked.out, how, **place):
        yield from _done(report, len(prompts))
    if asked.verify:
        found = verify(asked.out, loaded.model)
        if not all(x.sound for x in found):
            raise KvsimError(f"{asked.out}: {summary(found)}")
        yield summary(found)


def prompts_for(asked: Asked, given: Any, tokenizer: Any) -> dict[int, Prompt]:
    """The prompts that a task or a text makes, by the id of their request. Raises WrongUse."""
    forced, seen = asked.mode == "teacher_forced", asked.seen or asked.mode == "greedy"
    if asked.task is None:
        steps = (asked.steps or STEPS) if forced else 0
        return {asked.id: tasks.document(tokenizer, given, asked.question, seen, steps)}
    n = len(given) if asked.own else asked.requests or 1
    some = drawn(range(n), 1 if asked.sample is None else asked.sample, asked.seed)
    if not some:
        raise WrongUse(f"--sample {asked.sample}: none of {n} requests is drawn; take a larger part, or more requests")
    where: dict[str, Any] = {"depth": asked.depth, "at": asked.at, "page": asked.page, "order": asked.order, "steps": asked.steps}
    where |= {"seen": seen or None, "forced": forced or None, "tokens": asked.context}
    where = {k: v for k, v in where.items() if v is not None}
    if asked.own:
        place = tasks.Where(**where)
        return {asked.id + i: tasks.row_prompt(tokenizer, given[i], place, asked.context) for i in some}
    return {asked.id + i: tasks.make(str(asked.task), tokenizer, given, asked.seed + i, **where) for i in some}


def _read(asked: Asked) -> Any:
    """A text, or the rows of a file. Raises WrongUse."""
    if asked.task is None:
        return tasks.read_text(asked.prompt)
    if asked.own:
        return tasks.read_rows(asked.task)[: asked.requests]
    return tasks.long_text(asked.task, asked.text)


def _check(asked: Asked) -> None:
    """Raises WrongUse: options that contradict each other."""
    if (asked.prompt is None) == (asked.task is None):
        raise WrongUse(f"--prompt FILE or --task {'|'.join(tasks.TASKS)}|FILE{ROWS}: expected one of them")
    if asked.task is not None and not asked.own:
        tasks.check(asked.task)
    made = asked.task is not None and not asked.own
    for given, wanted, line in (
        (asked.question is not None, asked.task is None, "--question belongs to --prompt; a task asks its own"),
        (asked.text is not None, made, "--text belongs to a task that is made; a text of your own is --prompt"),
        (asked.depth is not None, made and asked.asks, "--depth belongs to a task that hides something"),
        (asked.at is not None, made and asked.asks, "--at belongs to a task that hides something"),
        (asked.page is not None, asked.at is not None or asked.task == "border", "--page belongs to --at"),
        (
            asked.order is not None,
            asked.task is not None and asked.asks,
            "--order belongs to a task of several documents or facts",
        ),
        (asked.requests is not None, asked.task is not None, "--requests belongs to --task"),
        (asked.sample is not None, asked.task is not None, "--sample belongs to --task: a part of its requests"),
        (asked.seen, asked.asks, "--seen belongs to a question: --question, or a task that asks"),
        (asked.mode == "question_fed", asked.asks and not asked.seen, "--mode question_fed: expected a question, and no --seen"),
        (asked.mode == "teacher_forced", asked.question is None, "--mode teacher_forced: the answer to --question is not known"),
        (
            asked.mode == "greedy",
            asked.task != "plain",
            "--mode greedy: the text of --task plain is forced; give it with --prompt",
        ),
    ):
        if given and not wanted:
            raise WrongUse(line)
    for name, n, least in (("steps", asked.steps, 1), ("requests", asked.requests, 1), ("id", asked.id, 0)):
        if n is not None and n < least:
            raise WrongUse(f"--{name} {n}: expected {least} or more")
    if not asked.dry_run:
        check_place(Path(asked.out), asked.restart, asked.append)


def _done(report: Report, requests: int) -> Iterator[str]:
    which = f"{report.path}: " if requests == 1 else f"request {report.request}: "
    yield (
        f"{which}{report.steps} decode steps, {report.bytes:,} bytes in {report.seconds:.1f} s, of which the model waited "
        f"{report.stalled_seconds:.1f} s for the disk"
    )
    if report.said:
        partly = f", which scores {report.score:.2f}" if report.score else ", which does not answer the question"
        answers = {None: "", True: ", which answers the question", False: partly}
        yield f"the model said {report.said!r}{answers[report.solved]}"


def _planned(prompts: Sequence[Prompt], plan: Plan, asked: Asked) -> Iterator[str]:
    for p in prompts if len(prompts) == 1 else ():
        spans = ", ".join(f"{s.label} at {s.start}-{s.stop - 1}" for s in p.spans)
        yield f"prompt {p.prefill:,} tokens, {p.mode}, {len(p.fed)} fed" + (f"; {spans}" if spans else "")
    if len(prompts) > 1:
        lengths = [p.prefill for p in prompts]
        yield f"{len(prompts)} requests, prompts of {min(lengths):,} to {max(lengths):,} tokens"
    most = "at most " if asked.compression != "none" else ""
    yield f"disk {most}{plan.total_bytes:,} bytes ({_listed(plan.bytes)})"
    yield f"memory about {sum(plan.memory.values()):,} bytes ({_listed(plan.memory)})"


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{k} {v:,}" for k, v in sizes.items() if v)
