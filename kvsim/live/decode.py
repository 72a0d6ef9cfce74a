"""One batched decode whose rows are policies: row 0 is full attention, and every row's attention is what its policy left it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from kvsim.capture.attention import projected_norm
from kvsim.capture.hooks import Given, replacing
from kvsim.capture.layers import Anatomy, cached
from kvsim.capture.prompt import FREE, Prompt
from kvsim.engine.account import cosine, relative
from kvsim.engine.source import Source
from kvsim.errors import WrongUse
from kvsim.geometry import Layer, Request
from kvsim.live.growing import Growing
from kvsim.live.needs import chains, shared_limits
from kvsim.live.prefill import Prefilled
from kvsim.live.row import RowLayer
from kvsim.policies.language import Policy, parse_policy

FULL = "full"  # the name of row 0


@dataclass(frozen=True)
class Row:
    """A row of the decode. inject: layers in which its reads take the evidence, too, whatever the policy chose."""

    policy: Policy
    inject: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        if not self.inject:
            return self.policy.id
        return f"{self.policy.id} + evidence in layers {self.inject[0]}-{self.inject[-1]}"


def rows_of(policies: Sequence[Policy], inject: Sequence[int] = ()) -> list[Row]:
    """Full attention, then the policies; with `inject` each a second time, with the evidence injected there."""
    rows = [Row(parse_policy("full()")), *map(Row, policies)]
    return rows + ([Row(p, tuple(inject)) for p in policies] if inject else [])


@dataclass(eq=False)
class Decoded:
    """What came of a decode of N steps, B rows.

    fed i64[N, B]: the token that went in; logits f32[N, B, vocabulary] after it; held, read, injected f64[L, N, B]: tokens by layer, means over
    heads; rel_l2, cosine f64[L, N, B]: each query head's attention output against row 0's, mean over heads; layers: ids of the L; sources[b]:
    by layer id, what a replay of that row would be fed; parts[b]: by layer id, the row as it decided."""

    rows: list[Row]
    request: Request
    fed: NDArray[np.int64]
    logits: NDArray[np.float32]
    layers: list[int]
    held: NDArray[np.float64]
    read: NDArray[np.float64]
    injected: NDArray[np.float64]
    rel_l2: NDArray[np.float64]
    cosine: NDArray[np.float64]
    sources: list[dict[int, Source]] = field(repr=False)
    parts: list[dict[int, RowLayer]] = field(repr=False)


Follow = Callable[[int, NDArray[np.float32]], NDArray[np.int64]]  # step, logits f32[B, vocabulary] -> the next tokens i64[B]


def following_full(step: int, logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Every row is fed what full attention would say: teacher-forced."""
    return np.full(len(logits), int(logits[0].argmax()))


def following_own(step: int, logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Every row is fed what it would say."""
    return np.asarray(logits.argmax(1))


def sampling(seed: int, temperature: float = 1.0) -> Follow:
    """Every row is fed a token drawn from its own distribution, all with the same luck: equal distributions draw equal tokens."""
    if temperature <= 0:
        raise WrongUse(f"temperature {temperature}: expected a number above 0; leave sampling out for the likeliest token")

    def follow(step: int, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        luck = np.random.default_rng([seed, step]).gumbel(size=logits.shape[1])
        return np.asarray((logits.astype(np.float64) / temperature + luck).argmax(1))

    return follow


class Decoding:
    """The state of all rows in all layers; `step` feeds one token to each.

    A row whose tokens were those of row 0, and whose layers below attended to everything, has the hidden state of row 0; it is given row 0's
    q, k and v, because products of a batch may round its rows differently. So what must be equal is equal to the last bit."""

    def __init__(
        self, model: Any, anatomy: Anatomy, prefilled: Prefilled, rows: Sequence[Row], steps: int, keep_picks: bool = False
    ):
        self.model, self.anatomy, self.rows, self.at = model, anatomy, list(rows), 0
        self.request = request_of(prefilled.prompt, prefilled.prompt.prefill + steps)
        self.layers: dict[int, list[RowLayer]] = {i: [] for i in prefilled.layers}
        evidence = self.request.evidence_mask()
        for row in self.rows:
            sources = {i: Growing(x, self.request) for i, x in prefilled.layers.items()}
            limits = shared_limits(row.policy, sources)
            for i, source in sources.items():
                asked = [replace(x, limits=limits.get(i)) for x in chains(row.policy, source.layer)]
                inject = evidence if i in row.inject else None
                self.layers[i].append(RowLayer(source, asked, inject, keep_picks))
        self.options = cached(model, prefilled.cache_of(len(self.rows)))
        shape = (len(self.layers), steps, len(self.rows))
        self.place = {layer: n for n, layer in enumerate(self.layers)}
        self.held, self.read, self.injected, self.rel_l2, self.cosine = np.zeros((5, *shape))
        self.same, self.whole = np.ones(len(self.rows), bool), np.ones((len(self.layers), len(self.rows)), bool)

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits f32[B, vocabulary] after the next token of each row; inside `replacing(model, self.attend)`."""
        self.same &= np.asarray(tokens) == tokens[0]
        ids = torch.tensor(np.asarray(tokens)[:, None], device=self.model.device)
        with torch.no_grad():
            logits = self.model(input_ids=ids, **self.options).logits[:, -1].float().cpu().numpy()
        self.at += 1
        logits[self.same & self.whole.all(0)] = logits[0]
        return np.asarray(logits)

    def attend(self, given: Given, own: Callable[[], Any]) -> Any:
        """Answers one attention call of the model, for all rows."""
        rows = self.layers.get(given.layer)
        if rows is None:
            return own()
        layer, i, place = rows[0].source.layer, self.at, self.place[given.layer]
        twin = self.same & self.whole[:place].all(0)
        given = _as_row_0(given, torch.from_numpy(twin))
        q, k, v = (x[:, :, -1].float().cpu().numpy() for x in (given.q, given.k, given.v))
        before = None if given.turned is None else given.turned.before[:, :, -1].float().cpu().numpy()
        norms = self._norms(given, layer) if any(x.source.wo_norm is not None for x in rows) else None
        out = np.empty((len(rows), layer.q_heads, layer.value_dim), np.float32)
        for b, row in enumerate(rows):
            new = {"k": k[b], "v": v[b]} | ({} if before is None else {"k_pre": before[b]})
            row.source.append(q[b], new, None if norms is None else norms[b])
            step = row.step(i)
            out[b] = step.out.reshape(layer.q_heads, -1)
            where = place, i, b
            self.whole[place, b] &= step.whole
            self.held[where], self.read[where] = step.held.mean(), step.read.mean()
            self.injected[where] = 0 if step.injected is None else step.injected.mean()
            mine, full = out[b].astype(np.float64), out[0].astype(np.float64)
            self.rel_l2[where], self.cosine[where] = relative(mine, full).mean(), cosine(mine, full).mean()
        return torch.from_numpy(out)[:, None].to(given.q), None

    def _norms(self, given: Given, layer: Layer) -> NDArray[np.float32]:
        """f32[B, Hq]: L1 norms of the new values after the output projection."""
        found = projected_norm(given.v[:, :, -1].transpose(0, 1), self.anatomy.projections[layer.id], layer)
        return np.asarray(found.T.float().cpu().numpy())


def _as_row_0(given: Given, twin: torch.Tensor) -> Given:
    """What is given to the rows named is what is given to row 0."""

    def copied(x: torch.Tensor) -> torch.Tensor:
        return torch.where(twin.to(x.device)[:, None, None, None], x[:1], x)

    turned = given.turned and replace(given.turned, before=copied(given.turned.before))
    return replace(given, q=copied(given.q), k=copied(given.k), v=copied(given.v), turned=turned)


def decode(
    model: Any,
    anatomy: Anatomy,
    prefilled: Prefilled,
    rows: Sequence[Row],
    steps: int,
    follow: Follow = following_full,
    keep_picks: bool = False,
) -> Decoded:
    """`steps` tokens after the prompt: those that it feeds, then what `follow` takes. rows: row 0 is what the others are compared with."""
    prompt = prefilled.prompt
    if steps < max(1, len(prompt.fed)):
        raise WrongUse(f"{steps} decode steps, and {len(prompt.fed)} tokens are fed in decode; take more steps")
    now = Decoding(model, anatomy, prefilled, rows, steps, keep_picks)
    last = np.repeat(prefilled.logits.float().cpu().numpy()[None], len(rows), 0)
    fed, logits = [], []
    with ExitStack() as stack:
        stack.enter_context(threadpool_limits(1, user_api="blas"))
        stack.enter_context(replacing(model, now.attend))
        for i in range(steps):
            fed.append(np.full(len(rows), prompt.fed[i]) if i < len(prompt.fed) else follow(i, last))
            last = now.step(fed[-1])
            logits.append(last)
    return Decoded(
        rows=list(rows),
        request=now.request,
        fed=np.array(fed),
        logits=np.array(logits),
        layers=list(now.layers),
        held=now.held,
        read=now.read,
        injected=now.injected,
        rel_l2=now.rel_l2,
        cosine=now.cosine,
        sources=[{i: x[b].source.complete(now.request) for i, x in now.layers.items()} for b in range(len(rows))],
        parts=[{i: x[b] for i, x in now.layers.items()} for b in range(len(rows))],
    )


def request_of(prompt: Prompt, total: int, number: int = 0) -> Request:
    """The prompt as a request of that many tokens."""
    roles = np.full(total, FREE, np.int8)
    given = np.array(prompt.roles[:total], np.int8)
    roles[: len(given)] = given
    digest = sha256(np.array(prompt.tokens[: prompt.prefill], "<i4").tobytes()).hexdigest()[:12]
    return Request(number, prompt.prefill, total, prompt.mode, roles, prompt.spans, digest)
