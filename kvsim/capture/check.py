"""Is a capture what the model computed? Two answers: attention again in float64, and the model's own function on the stored bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsim.capture import refuse
from kvsim.capture.bits import raw, tensor
from kvsim.capture.hooks import function_of, is_flash
from kvsim.capture.layers import Anatomy, probe
from kvsim.errors import WrongUse
from kvsim.trace.bits import widen
from kvsim.trace.open import Lane, Trace, open_trace, own_reads, with_known_reads
from kvsim.trace.reference import attend

Reads = NDArray[np.bool_] | None  # [N, T]: what each step reads; None: all that is visible
NEAR = 1e-4  # float32 outputs from float64 ones
STEPS = 16  # attended at a time


@dataclass(frozen=True)
class Verified:
    """One layer of one request, all its heads and decode steps."""

    request: int
    layer: int
    dtype: str
    steps: int
    heads: int
    apart: float  # largest difference of an output from float64, at (head, step)
    head: int
    step: int
    equal: int  # of heads x steps outputs, those the model's own function gives again bit for bit
    replay_apart: float  # the largest difference of those that differ
    unknown: int = 0  # steps beside these, of which tied scores of the model's own indexer do not tell what it read

    @property
    def outputs(self) -> int:
        return self.heads * self.steps

    @property
    def sound(self) -> bool:
        """Float32: near float64 everywhere. In 16 bits the model rounds on its way, so only its own function can tell."""
        return self.apart <= NEAR if self.dtype == "float32" else self.equal == self.outputs


def verify(trace: Trace | str | Path, model: Any) -> list[Verified]:
    """Every captured layer, head and decode step of a trace against the model it came from, on the same device and library builds.

    Raises WrongUse: another model, or a trace without outputs; BadTrace."""
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    refuse.model(model)
    anatomy = probe(model)
    if anatomy.dtype != trace.dtype:
        raise WrongUse(f"the trace is {trace.dtype} and the model {anatomy.dtype}; verify with the model as it was captured")
    return [_layer(trace.lane(r, layer), anatomy, model.device) for r in trace.requests for layer in trace.captured_layers]


def summary(found: list[Verified]) -> str:
    """One line: what was compared and how it went."""
    worst = max(found, key=lambda x: x.apart)
    equal, outputs, unknown = (sum(n) for n in zip(*((x.equal, x.outputs, x.unknown) for x in found), strict=True))
    more = f"; {unknown:,} steps left out, of which tied scores do not tell what the indexer chose" if unknown else ""
    return (
        f"{'verified' if all(x.sound for x in found) else 'NOT VERIFIED'}: {len(found)} layers, {outputs:,} outputs; furthest from "
        f"float64 {worst.apart:.2g} (layer {worst.layer}, q head {worst.head}, step {worst.step}); the model's own attention on the "
        f"stored bits gives {equal:,} of {outputs:,} again bit for bit{more}"
    )


def _layer(lane: Lane, anatomy: Anatomy, device: torch.device) -> Verified:
    asked, lane = len(lane.t), with_known_reads(lane)
    if lane.out is None or lane.layer.id not in anatomy.modules:
        raise WrongUse(
            f"layer {lane.layer.id}: the trace has no outputs, or the model no such layer; verify with the captured model"
        )
    read = own_reads(lane)
    if read is None and lane.sparse:
        raise WrongUse(
            f"layer {lane.layer.id}: nothing in the trace says what the model's own indexer chose; its outputs cannot be verified"
        )
    apart = np.abs(widen(lane.out) - _in_float64(lane, read)).max(axis=2)
    n, head = np.unravel_index(int(apart.argmax()), apart.shape) if apart.size else (0, 0)
    equal, furthest = 0, 0.0
    for step, again in enumerate(_again(lane, read, anatomy, device)):
        same = (again == lane.out[step]).all(axis=1)
        equal += int(same.sum())
        furthest = max(furthest, float(np.abs(widen(again) - widen(lane.out[step])).max()))
    return Verified(
        request=lane.request.id,
        layer=lane.layer.id,
        dtype=lane.dtype,
        steps=len(lane.t),
        heads=lane.layer.q_heads,
        apart=float(apart.max(initial=0)),
        head=int(head),
        step=int(lane.steps[n]) if apart.size else -1,
        equal=equal,
        replay_apart=furthest,
        unknown=asked - len(lane.t),
    )


def _in_float64(lane: Lane, read: Reads) -> NDArray[np.float64]:
    """Outputs [N, Hq, dv] of attention over the stored q, k and v, of what the steps read."""
    out = np.empty(lane.out.shape if lane.out is not None else ())
    for h in range(lane.layer.kv_heads):
        heads, k, v = slice(h * lane.layer.group, (h + 1) * lane.layer.group), widen(lane.k[h]), widen(lane.v[h])
        for i in range(0, len(lane.t), STEPS):
            block = slice(i, i + STEPS)
            shown = None if read is None else read[block]
            out[block, heads] = attend(widen(lane.q[block, heads]), lane.t[block], k, lane.layer, h, shown)[0] @ v
    return out


def _again(lane: Lane, read: Reads, anatomy: Anatomy, device: torch.device) -> Iterator[NDArray[Any]]:
    """Raw outputs [Hq, dv] of each decode step, by the model's own attention function with the shapes it had in the capture.

    A backend may be given a mask that hides nothing, or none, and may then round otherwise: the one that gives the stored bits counts. What
    an indexer left out is hidden."""
    layer, module = lane.layer, anatomy.modules[lane.layer.id]
    attend, options = function_of(module, anatomy.backend), anatomy.options[layer.id]
    for step, t in enumerate(lane.t):
        rows = slice(layer.first_visible(int(t)), int(t) + 1)
        q = tensor(lane.q[step], lane.dtype, device)[None, :, None]
        k, v = (tensor(x[:, rows], lane.dtype, device)[None] for x in (lane.k, lane.v))
        shown = None if read is None else torch.from_numpy(read[step, rows]).to(device)
        for mask in (
            (None,) if is_flash(anatomy.backend) else (_mask(k, anatomy.backend, shown), None)[: 1 if read is not None else 2]
        ):
            with torch.no_grad():
                again = raw(attend(module, q, k, v, mask, **options)[0][0, 0])
            if lane.out is None or (again == lane.out[step]).all():
                break
        yield again


def _mask(k: torch.Tensor, backend: str, shown: torch.Tensor | None) -> torch.Tensor:
    """[1, 1, 1, T] as a backend takes it, of the keys that are shown bool[T] (None: all)."""
    shown = torch.ones(k.shape[2], dtype=torch.bool, device=k.device) if shown is None else shown
    if backend == "sdpa":
        return shown[None, None, None]
    least = torch.finfo(k.dtype).min
    return torch.zeros(shown.shape, dtype=k.dtype, device=k.device).masked_fill(~shown, least)[None, None, None]
