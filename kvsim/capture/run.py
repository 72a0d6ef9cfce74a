"""Capture: run a transformers model over a prompt, and write a trace of what its attention was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsim.capture.decode import STEPS, steps_of
from kvsim.capture.estimate import Plan, plan, together
from kvsim.capture.prompt import Prompt, prompt_of
from kvsim.capture.recorder import ALL, Keep
from kvsim.capture.session import How, Recording, Report, bytes_of, check_prompt, examined, session


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
    q_stats: bool = False,
    dtype: str | None = None,
    chunk: int | None = None,
    compression: str = "none",
    source: dict[str, Any] | None = None,
    tokenizer: Any = None,
    restart: bool = False,
    append: bool = False,
) -> Report:
    """Write the trace `out` of `model` reading `prompt` (a Prompt, token ids or what a tokenizer returns) and decoding greedily.

    The prompt goes through in one forward, or `chunk` tokens at a time; then one token a step, first those that the prompt feeds,
    then the model's own, `steps` in all, an end-of-text token or not. layers: ids (None: all that attend); window_rows: queries of
    the last prompt tokens; dtype: what the model is expected to run in; tokenizer: tells the trace what was answered; restart:
    replaces what an unfinished capture left in `out`; append: one more request of the trace there. Raises WrongUse before the model
    runs or at the forward that cannot be captured; KvsimError when writing fails. After either, what was written is a partial trace,
    or the trace that was there before."""
    how = How(steps, layers, Keep(window_rows, prefill_mass, k_pre, wo_norm, q_stats=q_stats), dtype, chunk, compression)
    given = prompt_of(prompt)
    with session(model, out, how, source, restart, append) as trace:
        [report] = trace.capture({trace.next: given}, tokenizer)
    return replace(report, bytes=bytes_of(Path(out)))


def capture_all(
    model: Any,
    prompts: Mapping[int, Any],
    out: str | Path,
    how: How,
    *,
    source: dict[str, Any] | None = None,
    tokenizer: Any = None,
    restart: bool = False,
    append: bool = False,
) -> Iterator[Report]:
    """Write one trace of many requests {id: prompt}, one after the other, a report as each is done.

    append: the trace there, complete or not, is gone on with: requests that it has finished are left out, one that was being written
    is captured again. Raises as `capture`, and WrongUse: another capture is there, or other prompts under the same ids."""
    with session(model, out, how, source, restart, append) as trace:
        yield from trace.capture({i: prompt_of(p) for i, p in prompts.items()}, tokenizer)


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
    append: bool = False,
) -> Iterator[Recording]:
    """Write the trace `out` of whatever is run on `model` inside, `prompt` first: its own generate() with sampling, say. Batch 1,
    a DynamicCache, one token a step. Set `.tokens` to all ids before leaving; `steps` may turn out to be fewer. Raises as capture."""
    how = How(steps, layers, keep, dtype, chunk, compression)
    with session(model, out, how, source, restart, append) as trace, trace.request(trace.next, prompt_of(prompt)) as found:
        yield found


def planned(
    model: Any,
    prompts: Any,
    steps: int | None = None,
    layers: Sequence[int] | None = None,
    keep: Keep = ALL,
    chunk: int | None = None,
    how: How | None = None,
) -> Plan:
    """Bytes and memory of a capture that is not run, of one prompt or of a list of Prompts. Raises WrongUse, as capture would."""
    how = how or How(steps, layers, keep, chunk=chunk)
    anatomy, chosen = examined(model, how)
    plans = []
    for given in prompts if isinstance(prompts, list) and isinstance(prompts[0], Prompt) else [prompt_of(prompts)]:
        n = steps_of(given, how.steps, how.most)
        check_prompt(model, given, n)
        plans.append(plan(model, anatomy, chosen, given.prefill, n, how.keep, how.chunk))
    return together(plans)
