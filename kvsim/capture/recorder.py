"""From attention calls to rows of a trace: what is kept of each, and when it is handed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsim.capture import refuse
from kvsim.capture.attention import add_mass, projected_norm, queries_of
from kvsim.capture.bits import DTYPES
from kvsim.capture.hooks import Call
from kvsim.capture.indexer import Form, Indexed
from kvsim.capture.staging import Block, Copies
from kvsim.geometry import ITEMSIZE, Layer
from kvsim.trace.moments import Moments

SEGMENT_STEPS = 64
SEGMENT_BYTES = 8 << 20
REQUEST = 0

Put = Callable[..., None]  # (table, *rows); rows on their way are `Later`s


@dataclass(frozen=True)
class Keep:
    """What a capture keeps beside q, k, v and out of every decode step."""

    window_rows: int = 64  # queries of the last prompt tokens
    prefill_mass: bool = True
    k_pre: bool = True
    wo_norm: bool = True
    every: int = 1  # the queries of one decode step in so many; keys and values of all
    q_stats: bool = False  # mean and covariance of the prompt queries before RoPE


ALL = Keep()  # every need that a policy can ask for, but q_stats


class Recorder:
    """Sees the calls of a model's attention and puts rows of `layers`."""

    def __init__(
        self,
        layers: Sequence[Layer],
        projections: Mapping[int, torch.Tensor],
        backend: str,
        prompt: int,
        keep: Keep,
        put: Put,
        request: int = REQUEST,
        indexers: Mapping[int, Form] | None = None,
    ) -> None:
        self.prompt, copies, forms = prompt, Copies(), indexers or {}
        self._lanes = {
            x.id: _Lane(x, projections.get(x.id), backend, prompt, keep, put, copies, request, forms.get(x.id)) for x in layers
        }

    @property
    def seen(self) -> int:
        """How many tokens went through."""
        return max(lane.seen for lane in self._lanes.values())

    def before(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """At each forward of the model. Raises WrongUse."""
        refuse.forward(args, options, self.seen, self.prompt)

    def see(self, call: Call) -> None:
        """At each attention call. Raises WrongUse."""
        lane = self._lanes.get(call.layer)
        if lane is not None:
            lane.take(call)

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """The next n tokens of a layer, for engines that show no more than these: q [n, Hq, dk], k [n, Hkv, dk], v [n, Hkv, dv],
        out [n, Hq, dv], which may be written over afterwards. A prompt comes in any number of parts, then one token at a time."""
        lane = self._lanes.get(layer)
        if lane is not None:
            lane.add(
                *(x.transpose(0, 1).clone() for x in (q, out, k, v))
            )  # a GPU would write over them before they are copied off it

    def behind(self, total: int) -> list[int]:
        """The layers that were not shown all of `total` tokens."""
        return [i for i, lane in self._lanes.items() if lane.seen != total]

    def flush(self) -> None:
        """Hands over what still waits for its segment to fill."""
        for lane in self._lanes.values():
            lane.flush()


@dataclass(eq=False)
class _Lane:
    """One layer's rows on their way."""

    layer: Layer
    projection: torch.Tensor | None
    backend: str
    prompt: int
    keep: Keep
    put: Put
    copies: Copies
    request: int = REQUEST
    form: Form | None = None  # of the layer's indexer
    seen: int = 0
    mass: torch.Tensor | None = None
    moments: Moments | None = None  # of the prompt's queries so far
    keys: list[torch.Tensor] = field(default_factory=list)  # of the prompt so far [Hkv, n, dk], where calls do not bring them
    block: Block = field(init=False)  # q, out [Hq, d] and k, v, maybe k_pre [Hkv, d] of a step
    index: Block = field(init=False)  # the indexer's q [H, d], w [H, 1] and k [1, d] of the same steps

    def __post_init__(self) -> None:
        self.block, self.index = (Block(segment_steps(self.layer)) for _ in range(2))

    def take(self, call: Call) -> None:
        refuse.call(call, self.layer, self.seen, self.backend)
        new = call.q.shape[2]
        k_pre = call.turned.before[0] if self.keep.k_pre and call.turned is not None else None
        if call.indexed is not None and self.form is not None:
            self._add_index(call.indexed, self.form)
        self.add(call.q[0], call.out[0].transpose(0, 1), call.k[0, :, -new:], call.v[0, :, -new:], k_pre, call.k[0])

    def _add_index(self, said: Indexed, form: Form) -> None:
        """Keys of all tokens, and queries and weights of decode steps."""
        new, dtype = len(said.q), DTYPES[self.layer.dtype]
        k = said.k[-new:].to(dtype)
        if self.seen >= self.prompt:
            self.index.add(said.q[0].to(dtype), said.w[0, :, None] * form.factor, k)
        else:
            self.put("index_k", self.request, self.layer.id, self.seen, self.copies.take(k))

    def add(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pre: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> None:
        """The next n tokens: q and out [Hq, n, d], k, v and k_pre [Hkv, n, d]; `keys` [Hkv, T, dk]: all they attend to, if at hand."""
        start, new = self.seen, q.shape[1]
        rows = [k, v] if k_pre is None else [k, v, k_pre]
        self.seen += new
        if start >= self.prompt:
            self.block.add(*(x[:, 0] for x in (q, out, *rows)))
            if self.block.full:
                self.flush()
            return
        self._put_kv(start, *rows)
        kept = min(new, self.seen - max(0, self.prompt - self.keep.window_rows))
        if kept > 0:
            self._put_q(self.seen - kept, q[:, -kept:], out[:, -kept:])
        if self.keep.q_stats:
            self._add_moments(q, start)
        if self.keep.prefill_mass:
            self._add_mass(q, self._prompt_keys(k) if keys is None else keys, start)

    def _prompt_keys(self, k: torch.Tensor) -> torch.Tensor:
        """All keys of the prompt so far, these new ones with them."""
        if self.seen < self.prompt or self.keys:
            self.keys.append(k)
        found = torch.cat(self.keys, dim=1) if self.keys else k
        if self.seen == self.prompt:
            self.keys.clear()
        return found

    def flush(self) -> None:
        if self.block.n:
            start = self.seen - self.block.n
            q, out, *rows = self.block.taken()
            self._put_kv(start, *rows)
            self._put_q(start, q, out)
            if self.index.n and self.form is not None:
                self._put_index(self.form, start, *self.index.taken())

    def _put_index(self, form: Form, start: int, q: torch.Tensor, w: torch.Tensor, k: torch.Tensor) -> None:
        """q [H, n, d], w [H, n, 1] and k [1, n, d] of decode steps from position `start`; queries of those that are sampled."""
        take = self.copies.take
        self.put("index_k", self.request, self.layer.id, start, take(k[0]))
        some, steps = self._sampled(start, q.shape[1])
        if len(steps):
            rows = take(q[:, some].transpose(0, 1)), take(w[:, some, 0].T)
            self.put("index_q", self.request, self.layer.id, steps, *rows, form.score_fn)

    def _put_kv(self, start: int, k: torch.Tensor, v: torch.Tensor, k_pre: torch.Tensor | None = None) -> None:
        """Rows [Hkv, n, d] of positions from `start`."""
        take = self.copies.take
        self.put("kv", self.request, self.layer.id, start, take(k), take(v), None if k_pre is None else take(k_pre))
        if self.keep.wo_norm and self.projection is not None:
            self.put("values", self.request, self.layer.id, start, take(projected_norm(v, self.projection, self.layer)))

    def _put_q(self, start: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Queries and outputs [Hq, n, d] of positions from `start`; of decode steps, those that are sampled."""
        some, steps = self._sampled(start, q.shape[1])
        if len(steps):
            kept = (self.copies.take(x[:, some].transpose(0, 1)) for x in (q, out))
            self.put("q", self.request, self.layer.id, steps, *kept)

    def _sampled(self, start: int, n: int) -> tuple[slice, NDArray[np.int64]]:
        """Which of n positions from `start` have their queries kept, and their steps."""
        steps = np.arange(start, start + n) - self.prompt
        some = slice(-int(steps[0]) % self.keep.every, None, self.keep.every) if start >= self.prompt else slice(None)
        return some, steps[some]

    def _add_moments(self, q: torch.Tensor, start: int) -> None:
        self.moments = self.moments or Moments(self.layer)
        self.moments.add(q.float().cpu().numpy(), start)
        if self.seen == self.prompt:
            if stats := self.moments.stats():
                self.put("q_stats", self.request, self.layer.id, stats)
            self.moments = None

    def _add_mass(self, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        if self.mass is None:
            self.mass = torch.zeros(self.layer.q_heads, self.prompt, dtype=torch.float64, device=q.device)
        add_mass(self.mass, q, k, start, self.seen - k.shape[1], self.layer)
        if self.seen == self.prompt:
            queries = queries_of(self.prompt, self.layer, q.device)
            self.put("prefill", self.request, self.layer.id, self.copies.take(self.mass.float()), self.copies.take(queries))
            self.mass = None


def segment_steps(layer: Layer) -> int:
    """Decode steps of a segment of this layer: 64, or as many as 8 MB of queries and outputs hold."""
    step = layer.q_heads * (layer.key_dim + layer.value_dim) * ITEMSIZE[layer.dtype]
    return max(1, min(SEGMENT_STEPS, SEGMENT_BYTES // step))
