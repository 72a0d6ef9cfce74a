"""A trace under way: requests of a model are written to it one after the other."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from kvsim.capture import refuse
from kvsim.capture.decode import answer, decode, end_of_text, steps_of
from kvsim.capture.estimate import Plan, check_memory, check_room, plan, together
from kvsim.capture.hooks import attending
from kvsim.capture.layers import Anatomy, Row, probe
from kvsim.capture.prompt import FREE, HOLE, Prompt
from kvsim.capture.recorder import ALL, REQUEST, Keep, Recorder
from kvsim.capture.source import machine, source_of
from kvsim.capture.writer import Writer
from kvsim.errors import KvsimError, WrongUse
from kvsim.geometry import Layer, rope_problem
from kvsim.trace.write import TraceWriter


@dataclass(frozen=True)
class How:
    """How a trace is captured, the same for all its requests. steps: decode steps of each (None: what its prompt feeds and an
    answer); most: no more than so many of each, and none after its end-of-text token; sampled: the part of all requests that these
    are, with the seed they were drawn by."""

    steps: int | None = None
    layers: Sequence[int] | None = None
    keep: Keep = ALL
    dtype: str | None = None
    chunk: int | None = None
    compression: str = "none"
    most: int | None = None
    sampled: Mapping[str, Any] | None = None


DEFAULT = How()


@dataclass(frozen=True)
class Report:
    """What a capture made of one request; `tokens` are all that went through the model, given ones and its own."""

    path: Path
    prompt_tokens: int
    steps: int
    tokens: tuple[int, ...]
    bytes: int
    seconds: float
    stalled_seconds: float  # of them, the model waited for the disk
    request: int = REQUEST
    said: str | None = None  # the model's own tokens, where there is a tokenizer
    score: float | None = None  # of what it said, where the prompt expects an answer
    solved: bool | None = None  # it said all that was expected


@dataclass(eq=False)
class Recording:
    """A request under way. `tokens`: all ids that went through the model, to be set by whoever runs it; `meta` goes to the trace."""

    prompt: Prompt
    recorder: Recorder
    writer: Writer
    tokens: Sequence[int] | None = None
    mode: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@contextmanager
def session(
    model: Any,
    out: str | Path,
    how: How = DEFAULT,
    source: dict[str, Any] | None = None,
    restart: bool = False,
    append: bool = False,
) -> Iterator[Session]:
    """A trace that requests of `model` are written to, complete when it is left. Raises as capture."""
    path = Path(out)
    anatomy, chosen = examined(model, how)
    check_place(path, restart, append)
    if restart and _unfinished(path):
        shutil.rmtree(path)
    fresh = not (path / "journal.jsonl").exists()
    rows = [row | {"captured": row["layer"] in {x.id for x in chosen}} for row in anatomy.rows]
    kept = {name: x for name, x in asdict(how.keep).items() if name != "q_stats" or x}  # traces begun without it go on without it
    options = kept | {"chunk": how.chunk, "steps": how.steps, "max_steps": how.most}
    told = machine(model) | {"attention_backend": anatomy.backend, "options": options, "requests_sampled": how.sampled}
    told |= {"layers": [x.id for x in chosen], "heads": "all"}
    told |= {"steps": "all" if how.keep.every == 1 else f"1 of {how.keep.every}"}
    found = None
    try:
        with TraceWriter(path, anatomy.dtype, source or source_of(model), told, [], rows, how.compression, go_on=append) as trace:
            found = Session(model, path, how, anatomy, chosen, trace, Writer(trace))
            try:
                yield found
            except BaseException:
                found.writer.abandon()
                if fresh and not found.written:  # refused at the first forward: nothing worth keeping
                    shutil.rmtree(path)
                raise
            found.writer.close()
            trace.tell(**_outcomes(trace.finished.values()))
    except OSError as e:
        raise KvsimError(f"{path}: writing failed ({e}); the segments closed before can be read with allow_partial") from e


@dataclass(eq=False)
class Session:
    """A trace under way; requests come one after the other."""

    model: Any
    path: Path
    how: How
    anatomy: Anatomy
    chosen: Sequence[Layer]
    trace: TraceWriter
    writer: Writer
    written: bool = False  # rows of a request

    @property
    def next(self) -> int:
        """The id after those of all requests there."""
        return max(self.trace.finished, default=REQUEST - 1) + 1

    def capture(self, prompts: Mapping[int, Prompt], tokenizer: Any = None) -> Iterator[Report]:
        """Captures those that the trace has not, decoding greedily. Raises as capture_all."""
        left = self._left(prompts)
        if left:
            ahead = together([self._plan(p) for p in left.values()])
            check_room(self.path, ahead)
            check_memory(ahead, self.model.device, self.how.chunk)
        ends = end_of_text(self.model) if self.how.most else frozenset()
        for i, given in left.items():
            began, stalled = time.perf_counter(), self.writer.stalled_seconds
            steps = steps_of(given, self.how.steps, self.how.most)
            with self.request(i, given) as found, torch.no_grad():
                found.tokens = decode(self.model, given, steps, self.how.chunk, ends)
                if tokenizer is not None:
                    found.meta |= answer(given, found.tokens, tokenizer)
            self.writer.drain()  # what is counted must be there
            yield Report(
                path=self.path,
                request=i,
                prompt_tokens=given.prefill,
                steps=len(found.tokens) - given.prefill,
                tokens=tuple(found.tokens),
                bytes=bytes_of(self.path, i),
                seconds=time.perf_counter() - began,
                stalled_seconds=self.writer.stalled_seconds - stalled,
                said=found.meta.get("said"),
                score=found.meta.get("score"),
                solved=found.meta.get("solved"),
            )

    @contextmanager
    def request(self, i: int, prompt: Prompt) -> Iterator[Recording]:
        """Whatever is run on the model inside is the request `i`, `prompt` first. Raises WrongUse."""
        steps = steps_of(prompt, self.how.steps, self.how.most)
        check_prompt(self.model, prompt, steps)
        ahead = self._plan(prompt)
        check_room(self.path, ahead)
        check_memory(ahead, self.model.device, self.how.chunk)
        found = self.anatomy
        recorder = Recorder(
            self.chosen, found.projections, found.backend, prompt.prefill, self.how.keep, self.writer.put, i, found.indexers
        )
        recording = Recording(prompt, recorder, self.writer)
        self.writer.put("describe", [_request(i, prompt, prompt.prefill + steps)])
        try:
            with attending(self.model, recorder.see, recorder.before):
                yield recording
            recorder.flush()
        finally:
            self.written |= recorder.seen > 0
        if recorder.seen < prompt.prefill:
            raise WrongUse(f"{recorder.seen} tokens went through the model; expected the prompt's {prompt.prefill} and more")
        self.writer.put("describe", [_request(i, prompt, recorder.seen, recording)])

    def _left(self, prompts: Mapping[int, Prompt]) -> dict[int, Prompt]:
        """Those that are not there yet, checked before the model runs. Raises WrongUse."""
        left = {}
        for i, given in prompts.items():
            check_prompt(self.model, given, steps_of(given, self.how.steps, self.how.most))
            there = self.trace.finished.get(i)
            if there is None:
                left[i] = given
            elif tuple(there["token_ids"][: given.prefill]) != given.tokens[: given.prefill]:
                raise WrongUse(
                    f"{self.path}: request {i} has another prompt there; go on with the same ones, or write to another folder"
                )
        return left

    def _plan(self, prompt: Prompt) -> Plan:
        how, steps = self.how, steps_of(prompt, self.how.steps, self.how.most)
        return plan(self.model, self.anatomy, self.chosen, prompt.prefill, steps, how.keep, how.chunk)


def examined(model: Any, how: How) -> tuple[Anatomy, list[Layer]]:
    """The model's layers and those of them to be captured. Raises WrongUse."""
    layers, keep, dtype = how.layers, how.keep, how.dtype
    for name, n, least in (
        ("steps", how.steps, 1),
        ("max_steps", how.most, 1),
        ("chunk", how.chunk, 1),
        ("window_rows", keep.window_rows, 0),
        ("every", keep.every, 1),
    ):
        if n is not None and n < least:
            raise WrongUse(f"{name} {n}: expected {least} or more")
    refuse.model(model)
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
        if keep.q_stats and (problem := rope_problem(x.rope)):
            raise WrongUse(f"layer {x.id}: queries cannot be turned back, {problem}; capture with q_stats=False (no --q-stats)")
        if keep.wo_norm and x.id not in anatomy.projections:
            raise WrongUse(
                f"layer {x.id}: no plain output projection reads its attention, so value norms after it do not exist; capture with "
                "wo_norm=False (--no-wo-norm)"
            )
    return anatomy, chosen


def check_prompt(model: Any, prompt: Prompt, steps: int) -> None:
    """Raises WrongUse: too long for the model, or tokens that it does not know."""
    refuse.length(model, prompt.prefill + steps)
    refuse.tokens(model, [*prompt.tokens[: prompt.prefill], *(i for i in prompt.fed if i != HOLE)])


def check_place(path: Path, restart: bool, append: bool = False) -> None:
    """Raises WrongUse: something is there already, where an unfinished capture may be replaced, or either kind gone on with; or nothing can
    be written there."""
    if restart and append:
        raise WrongUse(f"{path}: to replace what is there or to go on with it: expected restart (--restart) or append (--append)")
    if append and (path / "journal.jsonl").exists():
        _check_writable(path)
        return
    if _unfinished(path):
        if not restart:
            raise WrongUse(
                f"{path}: an unfinished capture is there; remove it, replace it with restart=True (--restart), or go on with "
                "append=True (--append)"
            )
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise WrongUse(
            f"{path}: there is something already; write to a new folder, remove it first, or add requests to a trace with append=True "
            "(--append)"
        )
    _check_writable(path)


def _check_writable(path: Path) -> None:
    """Raises WrongUse where no folder can be made or written to. Tried, as permissions do not tell it of every file system."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise WrongUse(f"{path}: cannot be written ({e.strerror or e}); choose another folder") from None
    finally:
        with suppress(OSError):
            for made in missing:
                made.rmdir()


def _unfinished(path: Path) -> bool:
    return (path / "journal.jsonl").exists() and not (path / "manifest.json").exists()


def _outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the manifest tells of the requests: how each was made, what the model said, and whether that solves it."""
    found = [{"request": row["request"]} | json.loads(row["meta"] or "{}") for row in rows]
    names = ("request", "task", "seed", "row", "answers", "said", "score", "solved")
    seeds = {"seed": found[0].get("seed")} if found else {}
    return seeds | {"requests": [{k: x[k] for k in names if k in x} for x in found]}


def _request(i: int, prompt: Prompt, total: int, found: Recording | None = None) -> Row:
    """A row of the table `requests`: as planned, or as it was found to be."""
    tokens = None if found is None or found.tokens is None else [int(i) for i in found.tokens[:total]]
    expected = {"answers": list(prompt.answers), "scoring": prompt.scoring} if prompt.answers else {}
    return {
        "request": i,
        "prompt_tokens": prompt.prefill,
        "total_tokens": total,
        "mode": (found.mode if found else None) or prompt.mode,
        "token_ids": tokens,
        "roles": [*prompt.roles[:total], *[FREE] * (total - len(prompt.roles))],
        "spans": [asdict(s) for s in prompt.spans if s.stop <= total],
        "text": prompt.text,
        "meta": json.dumps(dict(prompt.meta) | expected | (found.meta if found else {})),
    }


def bytes_of(path: Path, request: int | None = None) -> int:
    """Of a trace on disk, or of the rows of one request."""
    files = path.glob("**/*" if request is None else f"*/request={request}/**/*")
    return sum(p.stat().st_size for p in files if p.is_file())
