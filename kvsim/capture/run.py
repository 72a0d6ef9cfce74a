"""Capture: run a transformers model over a prompt, and write a trace of what its attention was given."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvsim.capture import refuse
from kvsim.capture.estimate import Plan, check_memory, check_room, plan
from kvsim.capture.hooks import attending
from kvsim.capture.layers import Anatomy, Row, cached, probe
from kvsim.capture.prompt import FREE, Prompt, prompt_of
from kvsim.capture.recorder import ALL, REQUEST, Keep, Recorder
from kvsim.capture.source import machine, source_of
from kvsim.capture.writer import Writer
from kvsim.errors import KvsimError, WrongUse
from kvsim.geometry import Layer
from kvsim.trace.write import TraceWriter

STEPS = 128  # decode steps, where nothing says how many
ANSWER_STEPS = 32  # the least of them after the last token that is fed


@dataclass(frozen=True)
class Report:
    """What a capture made; `tokens` are all that went through the model, given ones and its own."""

    path: Path
    prompt_tokens: int
    steps: int
    tokens: tuple[int, ...]
    bytes: int
    seconds: float
    stalled_seconds: float  # of them, the model waited for the disk
    said: str | None = None  # the model's own tokens, where there is a tokenizer
    answered: bool | None = None  # they hold the answer that the prompt expects


@dataclass(eq=False)
class Recording:
    """A capture under way. `tokens`: all ids that went through the model, to be set by whoever runs it; `meta` goes to the trace."""

    prompt: Prompt
    recorder: Recorder
    writer: Writer
    tokens: Sequence[int] | None = None
    mode: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


def capture(
    model: Any,
    prompt: Any,
    out: str | Path,
    *,
    steps: int | None = None,
    layers: Sequence[int] | None = None,
    window_rows: int = 64,
    prefill_mass: bool = True,
    k_pre: bool = True,
    wo_norm: bool = True,
    dtype: str | None = None,
    chunk: int | None = None,
    compression: str = "none",
    source: dict[str, Any] | None = None,
    tokenizer: Any = None,
    restart: bool = False,
) -> Report:
    """Write the trace `out` of `model` reading `prompt` (a Prompt, token ids or what a tokenizer returns) and decoding greedily.

    The prompt goes through in one forward, or `chunk` tokens at a time; then one token a step, first those that the prompt feeds,
    then the model's own, `steps` in all, an end-of-text token or not. layers: ids (None: all that attend); window_rows: queries of
    the last prompt tokens; dtype: what the model is expected to run in; tokenizer: tells the trace what was answered; restart:
    replaces what an unfinished capture left in `out`. Raises WrongUse before the model runs or at the forward that cannot be
    captured; KvsimError when writing fails. After either, what was written is a partial trace."""
    given = prompt_of(prompt)
    steps = steps_of(given, steps)
    keep = Keep(window_rows, prefill_mass, k_pre, wo_norm)
    began = time.perf_counter()
    with recording(model, given, out, steps, layers, keep, dtype, chunk, compression, source, restart) as found, torch.no_grad():
        found.tokens = decode(model, given, steps, chunk)
        if tokenizer is not None:
            found.meta |= answer(given, found.tokens, tokenizer)
    return Report(
        path=Path(out),
        prompt_tokens=given.prefill,
        steps=steps,
        tokens=tuple(found.tokens),
        bytes=sum(p.stat().st_size for p in Path(out).rglob("*") if p.is_file()),
        seconds=time.perf_counter() - began,
        stalled_seconds=found.writer.stalled_seconds,
        said=found.meta.get("said"),
        answered=found.meta.get("answered"),
    )


@contextmanager
def recording(
    model: Any,
    prompt: Any,
    out: str | Path,
    steps: int = STEPS,
    layers: Sequence[int] | None = None,
    keep: Keep = ALL,
    dtype: str | None = None,
    chunk: int | None = None,
    compression: str = "none",
    source: dict[str, Any] | None = None,
    restart: bool = False,
) -> Iterator[Recording]:
    """Write the trace `out` of whatever is run on `model` inside, `prompt` first: its own generate() with sampling, say. Batch 1,
    a DynamicCache, one token a step. Set `.tokens` to all ids before leaving; `steps` may turn out to be fewer. Raises as capture."""
    path, given = Path(out), prompt_of(prompt)
    anatomy, chosen = examined(model, given, steps, layers, keep, chunk, dtype)
    ahead = plan(model, anatomy.layers, chosen, given.prefill, steps, keep, anatomy.backend, chunk)
    check_room(path, ahead)
    check_memory(ahead, model.device, chunk)
    check_place(path, restart)
    if _unfinished(path):
        shutil.rmtree(path)
    rows = [row | {"captured": row["layer"] in {x.id for x in chosen}} for row in anatomy.rows]
    options = asdict(keep) | {"chunk": chunk, "steps": steps}
    told = machine(model) | {"attention_backend": anatomy.backend, "seed": given.meta.get("seed"), "options": options}
    told |= {"layers": [x.id for x in chosen], "heads": "all", "steps": "all"}
    try:
        with TraceWriter(
            path, anatomy.dtype, source or source_of(model), told, [_request(given, given.prefill + steps)], rows, compression
        ) as trace:
            writer = Writer(trace)
            recorder = Recorder(chosen, anatomy.projections, anatomy.backend, given.prefill, keep, writer.put)
            found = Recording(given, recorder, writer)
            try:
                with attending(model, recorder.see, recorder.before):
                    yield found
                recorder.flush()
            except BaseException:
                writer.abandon()
                if recorder.seen == 0:  # refused at the first forward: nothing worth keeping
                    shutil.rmtree(path)
                raise
            writer.close()
            if recorder.seen < given.prefill:
                raise WrongUse(f"{recorder.seen} tokens went through the model; expected the prompt's {given.prefill} and more")
            trace.describe([_request(given, recorder.seen, found)])
    except OSError as e:
        raise KvsimError(f"{path}: writing failed ({e}); the segments closed before can be read with allow_partial") from e


def examined(
    model: Any,
    prompt: Prompt,
    steps: int,
    layers: Sequence[int] | None,
    keep: Keep,
    chunk: int | None = None,
    dtype: str | None = None,
) -> tuple[Anatomy, list[Layer]]:
    """The model's layers and those of them to be captured. Raises WrongUse."""
    for name, n, least in (("steps", steps, 1), ("chunk", chunk, 1), ("window_rows", keep.window_rows, 0)):
        if n is not None and n < least:
            raise WrongUse(f"{name} {n}: expected {least} or more")
    refuse.model(model)
    refuse.length(model, prompt.prefill + steps)
    refuse.tokens(model, prompt.tokens)
    anatomy = probe(model)
    if dtype is not None and dtype != anatomy.dtype:
        raise WrongUse(f"the model runs in {anatomy.dtype}, asked for {dtype}; load it with dtype={dtype!r}")
    able = [x for x in anatomy.layers if x.id in anatomy.modules]
    known = [x.id for x in able]
    if layers is not None and (unknown := sorted(set(layers) - set(known))):
        raise WrongUse(f"layers {unknown}: not among the attention layers of this model, {known}")
    chosen = [x for x in able if layers is None or x.id in layers]
    if not chosen:
        raise WrongUse("no layer to capture; name one or more")
    for x in chosen:
        if keep.k_pre and x.rope is not None and x.id not in anatomy.turned:
            raise WrongUse(
                f"layer {x.id}: its keys before RoPE cannot be had from this model; capture with k_pre=False (--no-k-pre)"
            )
        if keep.wo_norm and x.id not in anatomy.projections:
            raise WrongUse(
                f"layer {x.id}: no plain output projection reads its attention, so value norms after it do not exist; capture with "
                "wo_norm=False (--no-wo-norm)"
            )
    return anatomy, chosen


def planned(
    model: Any,
    prompt: Any,
    steps: int | None = None,
    layers: Sequence[int] | None = None,
    keep: Keep = ALL,
    chunk: int | None = None,
) -> Plan:
    """Bytes and memory of a capture that is not run. Raises WrongUse, as capture would."""
    given = prompt_of(prompt)
    steps = steps_of(given, steps)
    anatomy, chosen = examined(model, given, steps, layers, keep, chunk)
    return plan(model, anatomy.layers, chosen, given.prefill, steps, keep, anatomy.backend, chunk)


def steps_of(prompt: Prompt, steps: int | None) -> int:
    """Decode steps: as asked, or enough to feed what is fed and answer. Raises WrongUse."""
    fed = len(prompt.fed)
    if steps is not None and steps < max(1, fed):
        raise WrongUse(f"{steps} decode steps, and {fed} tokens are fed in decode; take at least {max(1, fed)}")
    return steps or max(STEPS, fed + ANSWER_STEPS)


def decode(model: Any, prompt: Prompt, steps: int, chunk: int | None = None) -> list[int]:
    """The prompt, then `steps` tokens one by one: those it feeds, then the likeliest -> all tokens that went through."""
    tokens = list(prompt.tokens)
    options = cached(model, DynamicCache(config=model.config))

    def forward(ids: Sequence[int]) -> int:
        return int(model(input_ids=torch.tensor([ids], device=model.device), **options).logits[0, -1].argmax())

    chunk = chunk or prompt.prefill
    for i in range(0, prompt.prefill, chunk):
        following = forward(tokens[i : min(i + chunk, prompt.prefill)])
    for n in range(prompt.prefill, prompt.prefill + steps):
        if n == len(tokens):
            tokens.append(following)
        following = forward(tokens[n : n + 1])
    return tokens


def answer(prompt: Prompt, tokens: Sequence[int], tokenizer: Any) -> dict[str, Any]:
    """What the model said of its own, and whether it holds the expected answer."""
    said = tokenizer.decode(list(tokens[len(prompt.tokens) :]), skip_special_tokens=True)
    expected = prompt.meta.get("answer")
    return {"said": said} | ({} if expected is None else {"answered": str(expected) in said})


def _request(prompt: Prompt, total: int, found: Recording | None = None) -> Row:
    """A row of the table `requests`: as planned, or as it was found to be."""
    tokens = None if found is None or found.tokens is None else [int(i) for i in found.tokens[:total]]
    return {
        "request": REQUEST,
        "prompt_tokens": prompt.prefill,
        "total_tokens": total,
        "mode": (found.mode if found else None) or prompt.mode,
        "token_ids": tokens,
        "roles": [*prompt.roles[:total], *[FREE] * (total - len(prompt.roles))],
        "spans": [asdict(s) for s in prompt.spans],
        "text": prompt.text,
        "meta": json.dumps(dict(prompt.meta) | (found.meta if found else {})),
    }


def check_place(path: Path, restart: bool) -> None:
    """Raises WrongUse: something is there already; an unfinished capture may be replaced when `restart` says so."""
    if _unfinished(path):
        if not restart:
            raise WrongUse(f"{path}: an unfinished capture is there; remove it, or replace it with restart=True (--restart)")
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise WrongUse(f"{path}: there is something already; write to a new folder, or remove it first")


def _unfinished(path: Path) -> bool:
    return (path / "journal.jsonl").exists() and not (path / "manifest.json").exists()
