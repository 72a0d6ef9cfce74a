"""Traces of what a serving engine attends to, one of every request, taken forward by forward from rows packed over requests.

What the adapter of an engine calls; which engine it is does not matter here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvsim.capture.prompt import CONTEXT, FREE
from kvsim.capture.proof import distance
from kvsim.capture.recorder import REQUEST, Keep, Recorder
from kvsim.capture.writer import Writer
from kvsim.errors import WrongUse
from kvsim.geometry import Layer
from kvsim.trace.check import OUT
from kvsim.trace.shapes import layers_of
from kvsim.trace.write import TraceWriter

PROVED = 8  # tokens of a layer that must be plain attention before anything else of it is believed
SHOWN = Keep(k_pre=False, wo_norm=False)  # an engine shows neither keys before RoPE nor its output projection


@dataclass(frozen=True)
class Engine:
    """What all requests share. rows: of the table `layers`, those to be captured marked so; source and told: the manifest's `source`
    and `capture`."""

    rows: Sequence[Mapping[str, Any]]
    dtype: str
    source: Mapping[str, Any]
    told: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Tokens of one request in a forward: `count` of them from position `start`."""

    request: str
    start: int
    count: int


@dataclass(eq=False)
class _Request:
    """One trace under way."""

    name: str
    tokens: list[int]  # all that are known to have gone through, the prompt's at once
    prompt: int
    mode: str
    trace: TraceWriter
    writer: Writer
    recorder: Recorder
    seen: int = 0

    def row(self, total: int) -> dict[str, Any]:
        return _row(self.name, self.prompt, total, self.mode, self.tokens if len(self.tokens) == total else None)


class Serving:
    """Writes `folder`/request-00000, -00001, ... in the order in which requests begin. Every method raises WrongUse; after that, or when
    writing fails (KvsimError), only `abandon` may be called."""

    def __init__(self, folder: str | Path, engine: Engine, keep: Keep = SHOWN) -> None:
        self.folder, self.engine = Path(folder), engine
        self.keep = replace(keep, k_pre=False, wo_norm=False, q_stats=False)
        self.layers = tuple(x for x in layers_of(engine.rows, engine.dtype, "layers") if x.captured)
        if not self.layers:
            raise WrongUse("no layer to capture; name one or more")
        self._begun = 0
        self._open: dict[str, _Request] = {}
        self._parts: Sequence[Part] = ()
        self._unproved = {x.id: x for x in self.layers}

    def begin(self, request: str, prompt: Sequence[int], mode: str = "greedy", steps: int = 1) -> None:
        """A request with the token ids of its prompt, of which nothing has been computed; at most `steps` decode steps follow."""
        if request in self._open:
            raise WrongUse(f"request {request} begins twice")
        if not prompt:
            raise WrongUse(f"request {request} has no token ids (embeddings?); capture needs a prompt of one token or more")
        row = _row(request, len(prompt), len(prompt) + max(1, steps), mode, None)
        told = dict(self.engine.told) | {"options": {**self.engine.told.get("options", {}), **asdict(self.keep)}}
        told |= {"layers": [x.id for x in self.layers], "heads": "all"}
        told |= {"steps": "all" if self.keep.every == 1 else f"1 of {self.keep.every}"}
        path = self.folder / f"request-{self._begun:05d}"
        trace = TraceWriter(path, self.engine.dtype, self.engine.source, told, [row], list(self.engine.rows))
        writer = Writer(trace)
        recorder = Recorder(self.layers, {}, "", len(prompt), self.keep, writer.put)
        self._begun += 1
        self._open[request] = _Request(request, list(prompt), len(prompt), mode, trace, writer, recorder)

    def forward(self, parts: Sequence[Part], tokens: Sequence[int] | None = None) -> None:
        """Before the layers of a forward: whose tokens its rows are, in their order, and if known their ids."""
        self._check_layers()
        first = 0
        for part in parts:
            found = self._open.get(part.request)
            if found is None:
                raise WrongUse(f"request {part.request} was never begun")
            _check_part(part, found)
            if tokens is not None and part.start >= found.prompt:
                found.tokens += [int(i) for i in tokens[first : first + part.count]]
            found.seen += part.count
            first += part.count
        self._parts = parts

    def attention(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """One layer of this forward: q [n, Hq, dk], k [n, Hkv, dk], v [n, Hkv, dv] as attended (after RoPE), out [n, Hq, dv] before
        W_O; rows beyond those of the parts are padding."""
        first = 0
        for part in self._parts:
            rows = [x[first : first + part.count] for x in (q, k, v, out)]
            self._prove(layer, part, *rows)
            self._open[part.request].recorder.add(layer, *rows)
            first += part.count

    def end(self, request: str) -> None:
        """The request will not come again. Its trace is complete if it decoded a token; otherwise it stays partial."""
        self._check_layers()
        found = self._open.pop(request, None)
        if found is None:
            return
        if found.seen <= found.prompt:
            self._drop(found)
            return
        found.recorder.flush()
        found.writer.close()
        found.trace.describe([found.row(found.seen)])
        found.trace.__exit__(None, None, None)

    def close(self) -> None:
        """The engine stops: every request ends."""
        for request in list(self._open):
            self.end(request)

    def abandon(self) -> None:
        """What was put is written and stays partial."""
        while self._open:
            self._drop(self._open.popitem()[1])

    def _drop(self, found: _Request) -> None:
        found.writer.abandon()
        stop = InterruptedError()
        found.trace.__exit__(InterruptedError, stop, None)
        if found.seen == 0:  # nothing worth keeping
            shutil.rmtree(found.trace.path)

    def _check_layers(self) -> None:
        """Raises WrongUse: a layer did not show its part of the last forward."""
        parts, self._parts = self._parts, ()
        for part in parts:
            found = self._open[part.request]
            if behind := found.recorder.behind(found.seen):
                raise WrongUse(
                    f"layers {behind} did not show their attention in the last forward (replayed as a graph, or by another backend?); "
                    "run the engine in eager mode"
                )

    def _prove(self, layer: int, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        spec = self._unproved.get(layer)
        if spec is None or part.start:
            return
        _check_shape(spec, q, k, v, out)
        error = distance(spec, *(x[:PROVED].transpose(0, 1) for x in (q, k, v, out)))
        if not error <= OUT[spec.dtype]:
            raise WrongUse(
                f"layer {layer} is not plain attention: its output is {error:.2g} away from softmax(scale q k) v over its own keys; this "
                "model cannot be captured"
            )
        del self._unproved[layer]


def _row(name: str, prompt: int, total: int, mode: str, tokens: Sequence[int] | None) -> dict[str, Any]:
    """A row of the table `requests`."""
    return {
        "request": REQUEST,
        "prompt_tokens": prompt,
        "total_tokens": total,
        "mode": mode,
        "token_ids": tokens,
        "roles": [CONTEXT] * prompt + [FREE] * (total - prompt),
        "spans": [],
        "text": None,
        "meta": json.dumps({"engine_request": name}),
    }


def _check_part(part: Part, request: _Request) -> None:
    """Raises WrongUse: not the next tokens of this request."""
    if part.start > request.seen == 0:
        raise WrongUse(
            f"request {part.request} starts at position {part.start}: what is before it comes from a prefix cache and passes no layer; "
            "turn prefix caching off"
        )
    if part.start != request.seen:
        raise WrongUse(
            f"request {part.request} goes on at position {part.start} after {request.seen} tokens: preempted and computed again, or "
            "speculative; capture fewer requests at a time, and without drafts"
        )
    if part.start < request.prompt < part.start + part.count or (part.start >= request.prompt and part.count != 1):
        raise WrongUse(
            f"request {part.request}: {part.count} tokens at position {part.start} of a prompt of {request.prompt}; expected a part of the "
            "prompt or one decoded token: speculative decoding would record rejected tokens"
        )


def _check_shape(layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Raises WrongUse: rows that are not of this layer's heads."""
    given = [tuple(x.shape[1:]) for x in (q, k, v, out)]
    heads = (layer.q_heads, layer.kv_heads, layer.kv_heads, layer.q_heads)
    sizes = (layer.key_dim, layer.key_dim, layer.value_dim, layer.value_dim)
    expected = list(zip(heads, sizes, strict=True))
    if given != expected:
        raise WrongUse(f"layer {layer.id}: q, k, v, out are {given} a token; expected {expected}")
