"""What `kvsim live` does, as lines: the prompts, each answer as it comes, and what it all says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from kvsim.capture import tasks
from kvsim.capture.command import ROWS
from kvsim.capture.load import load
from kvsim.capture.prompt import Prompt
from kvsim.errors import WrongUse
from kvsim.live.by_layer import one_at_a_time
from kvsim.live.needs import attended
from kvsim.live.study import How, bench, running
from kvsim.metrics import closed_loop, sensitivity
from kvsim.policies.language import Policy, parse_policy

STEPS = 40  # of plain text that are fed
WIDTH = 60  # characters of a policy in a printed table
SHOWN = 2  # pairs that mislead, of each open-loop number


@dataclass(frozen=True)
class Asked:
    """The options of the command. task: of tasks.TASKS, or files of rows; n: prompts of each, of seeds `seed` and following; by_layer: layers
    of a group, each tried alone."""

    model: str
    policy: Sequence[str]
    out: str
    task: Sequence[str] = ("needle",)
    n: int = 5
    context: int = 512
    seed: int = 0
    depth: float | None = None
    text: str | None = None
    seen: bool = False
    answer: int = 12
    steps: int = STEPS
    free: bool = False
    samples: int = 0
    temperature: float = 1.0
    open_loop: bool = True
    inject: Sequence[int] | None = None
    by_layer: int | None = None
    kv_dtype: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    attention: str | None = None
    chunk: int | None = None


def command(asked: Asked) -> Iterator[str]:
    """Lines to print, while it goes on. Raises WrongUse."""
    _check(asked)
    loaded = load(asked.model, asked.dtype, asked.device, asked.attention)
    how = How(
        answer=asked.answer,
        free=asked.free,
        samples=tuple(range(asked.samples)),
        temperature=asked.temperature,
        open_loop=asked.open_loop,
        inject=tuple(asked.inject or ()),
        kv_dtype=asked.kv_dtype,
        chunk=asked.chunk,
    )
    policies: list[Policy] = [parse_policy(p) for p in asked.policy]
    found = bench(loaded.model, policies, loaded.tokenizer, how)
    if asked.by_layer is not None:
        ids = [x.id for x in attended(found.anatomy)]
        found = bench(loaded.model, [x for p in policies for x in one_at_a_time(p, ids, asked.by_layer)], loaded.tokenizer, how)
    prompts = prompts_for(asked, loaded.tokenizer)
    yield f"{len(prompts)} prompts, {len(found.rows)} rows: full attention and {len(found.rows) - 1} beside it"
    began = time.process_time()
    for n, made in running(found, prompts, asked.out, loaded.source):
        yield _progress(n, made["answers"], time.process_time() - began)
    yield from summary(Path(asked.out))
    yield asked.out


def prompts_for(asked: Asked, tokenizer: Any) -> list[tuple[str, Prompt]]:
    """`n` prompts of every task, or of the rows of a file. Raises WrongUse."""
    where = {"tokens": asked.context, "depth": asked.depth, "seen": asked.seen, "steps": asked.steps}
    by_task = []
    for task in asked.task:
        if task.endswith(ROWS):
            rows, place = tasks.read_rows(task)[: asked.n], tasks.Where(seen=asked.seen)
            by_task.append([(Path(task).stem, tasks.row_prompt(tokenizer, row, place, asked.context)) for row in rows])
        else:
            text = tasks.long_text(task, asked.text)
            by_task.append([(task, tasks.make(task, tokenizer, text, asked.seed + i, **where)) for i in range(asked.n)])
    return [x for turn in zip_longest(*by_task) for x in turn if x is not None]  # a study that stops early has some of each


def _check(asked: Asked) -> None:
    for task in asked.task:
        if not task.endswith(ROWS):
            tasks.check(task)
    for name, n, least in (
        ("-n", asked.n, 1),
        ("--answer", asked.answer, 1),
        ("--steps", asked.steps, 1),
        ("--samples", asked.samples, 0),
    ):
        if n < least:
            raise WrongUse(f"{name} {n}: expected {least} or more")
    if asked.by_layer is not None and asked.inject:
        raise WrongUse("--by-layer and --inject: expected one of them")
    if Path(asked.out).exists():
        raise WrongUse(f"{asked.out}: exists already, and a study is never overwritten; choose another -o, or remove it")


def _progress(n: int, answers: pa.Table, seconds: float) -> str:
    frame = pl.DataFrame(pl.from_arrow(answers)).filter(pl.col("mode") == "forced")
    said = frame["text"][0]
    solved = int((frame["score"][1:] == 1).sum())
    heard = "" if said is None else f": full attention said {said!r}, {solved} of {frame.height - 1} policies answer"
    return f"prompt {n}{heard}; {seconds:.0f} s of CPU so far"


def summary(path: Path) -> Iterator[str]:
    """What a study says, as lines."""
    study = closed_loop.open_study(path)
    if sensitivity.tried(study):
        yield from sensitivity.lines(study)
        return
    yield from _scores(closed_loop.scores(study))
    yield from _correlations(closed_loop.correlations(study))
    yield from _misleading(closed_loop.misleading(study))


def _misleading(frame: pl.DataFrame) -> Iterator[str]:
    """The pairs that contradict an open-loop number most, a few of each."""
    frame = frame.with_columns(gap=pl.col("closed_second") - pl.col("closed_first")).sort("gap", descending=True)
    for (task, predictor), mine in frame.group_by("task", "predictor", maintain_order=True):
        yield f"{task}: {closed_loop.PREDICTORS[str(predictor)]} misleads in {mine.height} pairs of policies, for example"
        for row in mine.head(SHOWN).iter_rows(named=True):
            yield (
                f"  {row['open_first']:.3f} and solved {row['closed_first']:4.0%}: {shown(row['first'])}\n"
                f"  {row['open_second']:.3f} and solved {row['closed_second']:4.0%}: {shown(row['second'])}"
            )


def shown(policy: str) -> str:
    """A policy in the width of a line, without the parts that do nothing."""
    return policy.removeprefix("full() >> ").removesuffix(" >> everything()")[:WIDTH]


def _scores(frame: pl.DataFrame) -> Iterator[str]:
    for (task, mode), mine in frame.group_by("task", "mode", maintain_order=True):
        first = mine.filter(pl.col("policy") == closed_loop.FULL).row(0, named=True)
        failed = (
            f", which full attention solves {first['samples'] - first['full_fails']} of" if first["score"] is not None else ""
        )
        yield f"{task}, {mode}: {first['samples']} answers in {first['contexts']} contexts{failed}"
        for row in mine.sort("kl", nulls_last=True).iter_rows(named=True):
            share = "" if row["score"] is None else f"solved {row['score']:4.0%} ({row['low']:.0%} to {row['high']:.0%})  "
            lost = "" if row["nll"] is None else f"  NLL {row['nll'] - row['full_nll']:+.3f}"
            apart = "" if row["kl"] is None else f"KL {row['kl']:.4f}"
            yield f"  {shown(row['policy']):{WIDTH}}  {share}{apart}{lost}"


def _correlations(frame: pl.DataFrame) -> Iterator[str]:
    for row in frame.iter_rows(named=True):
        between = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
        least = "" if row["least"] is None else f", without {row['without']} {row['least']:.2f}"
        what = "KL" if row["outcome"] == "kl" else "the share solved"
        yield (
            f"{row['task']}: {closed_loop.PREDICTORS[row['predictor']]} orders {row['policies']} policies as {what} does, rank correlation "
            f"{row['rho']:.2f}{between}{least}"
        )
