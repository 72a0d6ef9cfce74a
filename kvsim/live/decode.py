"""One batched decode whose rows are policies: row 0 is full attention, and every row's attention is what its policy left it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from kvsim.capture.prompt import FREE, HOLE, Prompt
from kvsim.engine.account import cosine, relative
from kvsim.engine.source import Source
from kvsim.errors import WrongUse
from kvsim.geometry import Layer, Request
from kvsim.live.growing import Growing, Prefix
from kvsim.live.needs import chains, shared_limits
from kvsim.live.prefill import Prefilled
from kvsim.live.row import RowLayer, Step, room
from kvsim.live.together import Together, alike
from kvsim.policies.language import Policy, parse_policy

Floats = NDArray[np.float64]
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
    """What came of a decode of N steps, B rows, L layers.

    first: the likeliest token after the prompt; fed i64[N, B]: the token that went in; said i64[N, B]: the likeliest after it; kl f64[N, B]:
    KL(row 0 || row) of what may follow, NaN once a row was fed other tokens than row 0; nll f64[N, B]: -ln p of the token fed next, NaN at the
    last step; logits f32[N, B, vocabulary], where they were to be kept; held, read, injected f64[L, N, B]: tokens, means over heads; rel_l2,
    cosine f64[L, N, B]: each query head's attention output against row 0's, mean over heads; parts: by layer id, every row as it decided."""

    rows: list[Row]
    request: Request
    first: int
    fed: NDArray[np.int64]
    said: NDArray[np.int64]
    kl: NDArray[np.float64]
    nll: NDArray[np.float64]
    logits: NDArray[np.float32] | None
    held: NDArray[np.float64]
    read: NDArray[np.float64]
    injected: NDArray[np.float64]
    rel_l2: NDArray[np.float64]
    cosine: NDArray[np.float64]
    parts: dict[int, list[RowLayer]] = field(repr=False)

    @property
    def layers(self) -> list[int]:
        return list(self.parts)

    def sources(self, b: int) -> dict[int, Source]:
        """By layer id, what a replay of row b would be fed."""
        return {i: rows[b].source.complete(self.request) for i, rows in self.parts.items()}


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
    """The state of all rows in all layers; `attend` answers the model's attention calls at step `at`.

    A row whose tokens were those of row 0, and whose layers below attended to everything, has the hidden state of row 0; it is given row 0's
    q, k and v, because products of a batch may round its rows differently. So what must be equal is equal to the last bit."""

    def __init__(
        self,
        anatomy: Anatomy,
        prefixes: Mapping[int, Prefix],
        request: Request,
        rows: Sequence[Row],
        keep_picks: bool = False,
    ):
        self.anatomy, self.rows, self.request, self.at = anatomy, list(rows), request, 0
        self.layers: dict[int, list[RowLayer]] = {i: [] for i in prefixes}
        evidence = request.evidence_mask()
        for row in self.rows:
            sources = {i: Growing(x, request) for i, x in prefixes.items()}
            limits = shared_limits(row.policy, sources)
            for i, source in sources.items():
                asked = [replace(x, limits=limits.get(i)) for x in chains(row.policy, source.layer)]
                inject = evidence if i in row.inject else None
                self.layers[i].append(RowLayer(source, asked, inject, keep_picks))
        self.together = {i: together(mine) for i, mine in self.layers.items()}
        self._rooms: dict[tuple[int, int], Floats] = {}
        shape = (len(self.layers), request.total - request.prompt, len(self.rows))
        self.place = {layer: n for n, layer in enumerate(self.layers)}
        self.held, self.read, self.injected, self.rel_l2, self.cosine = np.zeros((5, *shape))
        self.same, self.whole = np.ones(len(self.rows), bool), np.ones((len(self.layers), len(self.rows)), bool)

    def step(self, tokens: NDArray[np.int64], forward: Callable[[NDArray[np.int64]], NDArray[np.float32]]) -> NDArray[np.float32]:
        """Logits f32[B, vocabulary] after the next token of each row; inside `replacing(model, self.attend)`, by a forward of the model."""
        self.same &= tokens == tokens[0]
        logits = forward(tokens)
        self.at += 1
        logits[self.same & self.whole.all(0)] = logits[0]
        return logits

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
        for b, row in enumerate(rows):
            new = {"k": k[b], "v": v[b]} | ({} if before is None else {"k_pre": before[b]})
            row.source.append(q[b], new, None if norms is None else norms[b])
        dots, weight = self._room(layer)
        _dots(rows, q, i, dots)
        dots[twin] = dots[0]
        n = int(rows[0].source.t[i]) + 1
        for which, group in self.together[given.layer]:
            ids, chosen = group.pick(i, dots[which][..., :n])
            for b, mine in zip(which, chosen, strict=True):
                rows[b].parts[0].picked = ids, mine
        steps = [row.step(i, dots[b], weight[b]) for b, row in enumerate(rows)]
        out = _outputs(rows, steps, weight[..., :n])
        self.whole[place] &= [step.whole for step in steps]
        out[twin & self.whole[place]] = out[0]
        self.held[place, i] = [step.held.mean() for step in steps]
        self.read[place, i] = [step.read.mean() for step in steps]
        self.injected[place, i] = [0 if step.injected is None else step.injected.mean() for step in steps]
        mine = out.reshape(-1, layer.value_dim).astype(np.float64)
        full = np.tile(mine[: layer.q_heads], (len(rows), 1))
        for into, apart in ((self.rel_l2, relative), (self.cosine, cosine)):
            into[place, i] = apart(mine, full).reshape(len(rows), -1).mean(1)
        return torch.from_numpy(out.reshape(len(rows), 1, layer.q_heads, -1)).to(given.q), None

    def _room(self, layer: Layer) -> Floats:
        """f64[2, B, Hkv, G, columns], of one step: layers take turns."""
        shape = layer.kv_heads, layer.group
        if shape not in self._rooms:
            self._rooms[shape] = np.stack([room(layer, len(self.rows), self.request.total)] * 2)
        return self._rooms[shape]

    def _norms(self, given: Given, layer: Layer) -> NDArray[np.float32]:
        """f32[B, Hq]: L1 norms of the new values after the output projection."""
        found = projected_norm(given.v[:, :, -1].transpose(0, 1), self.anatomy.projections[layer.id], layer)
        return np.asarray(found.T.float().cpu().numpy())


def together(rows: Sequence[RowLayer]) -> list[tuple[list[int], Together]]:
    """The rows of a layer that pick their pages together, by their places."""
    found: dict[Any, list[int]] = {}
    for b, row in enumerate(rows):
        one = row.parts[0]
        if len(row.parts) == 1 and (ranking := alike(one.chain, row.source)) is not None:
            found.setdefault(ranking, []).append(b)
    return [
        (which, Together([rows[b].parts[0].chain.part("read") for b in which], [rows[b].source for b in which]))
        for which in found.values()
    ]


def _dots(rows: Sequence[RowLayer], q: NDArray[np.float32], i: int, out: Floats) -> None:
    """Dot products, in float64, of the rows' queries [B, Hq, d] at the i-th step with all their keys so far -> out [B, Hkv, G, columns]."""
    src, (many, heads, group, _) = rows[0].source, out.shape
    prompt, wide = src.request.prompt, q.reshape(many, heads, group, -1).astype(np.float64)
    flat = np.ascontiguousarray(wide.swapaxes(0, 1)).reshape(heads, many * group, -1)
    found = np.matmul(flat, src.prefix.wide_k.swapaxes(1, 2)).reshape(heads, many, group, prompt)
    out[..., :prompt] = found.swapaxes(0, 1)
    for b, row in enumerate(rows):
        out[b, ..., prompt : prompt + i + 1] = np.matmul(wide[b], row.source.wide_tail[:, : i + 1].swapaxes(1, 2))


def _outputs(rows: Sequence[RowLayer], steps: Sequence[Step], weight: Floats) -> NDArray[np.float32]:
    """f32[B, Hkv, G, dv]: weight [B, Hkv, G, n] over the values, as every row stores them."""
    src, (many, heads, group, n) = rows[0].source, weight.shape
    prompt, narrow = src.request.prompt, weight.astype(np.float32)
    flat = np.ascontiguousarray(narrow[..., :prompt].swapaxes(0, 1)).reshape(heads, many * group, prompt)
    out = np.ascontiguousarray(np.matmul(flat, src.v).reshape(heads, many, group, -1).swapaxes(0, 1))
    for b, (row, step) in enumerate(zip(rows, steps, strict=True)):
        if step.out is None:
            out[b] += np.matmul(narrow[b, ..., prompt:], row.source.tail["v"][:, : n - prompt])
        else:
            out[b] = step.out
    return out


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
    keep_logits: bool = False,
) -> Decoded:
    """`steps` tokens after the prompt: those that it feeds, then what `follow` takes. rows: row 0 is what the others are compared with."""
    prompt = prefilled.prompt
    if steps < max(1, len(prompt.fed)):
        raise WrongUse(f"{steps} decode steps, and {len(prompt.fed)} tokens are fed in decode; take more steps")
    now = Decoding(anatomy, prefilled.layers, request_of(prompt, prompt.prefill + steps), rows, keep_picks)
    options = cached(model, prefilled.cache_of(len(rows)))

    def forward(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(tokens[:, None], device=model.device), **options).logits[:, -1]
        return np.array(logits.float().cpu().numpy())

    last = np.repeat(prefilled.logits.float().cpu().numpy()[None], len(rows), 0)
    first, fed, said, kept, log = int(last[0].argmax()), [], [], [], log_softmax(last)
    kl, nll = np.full((2, steps, len(rows)), np.nan)
    with ExitStack() as stack:
        stack.enter_context(threadpool_limits(1, user_api="blas"))
        stack.enter_context(replacing(model, now.attend))
        for i in range(steps):
            given = i < len(prompt.fed) and prompt.fed[i] != HOLE
            fed.append(np.full(len(rows), prompt.fed[i]) if given else follow(i, last))
            if i:
                nll[i - 1] = -log[np.arange(len(rows)), fed[-1]]
            last = now.step(fed[-1], forward)
            log = log_softmax(last)
            kl[i] = np.where(now.same, (np.exp(log[0]) * (log[0] - log)).sum(1), np.nan)
            said.append(last.argmax(1))
            kept += [last] if keep_logits else []
    return Decoded(
        rows=list(rows),
        request=now.request,
        first=first,
        fed=np.array(fed),
        said=np.array(said),
        kl=kl,
        nll=nll,
        logits=np.array(kept) if keep_logits else None,
        held=now.held,
        read=now.read,
        injected=now.injected,
        rel_l2=now.rel_l2,
        cosine=now.cosine,
        parts=now.layers,
    )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """[B, vocabulary] -> ln p, in float64."""
    log = logits.astype(np.float64)
    log -= log.max(1, keepdims=True)
    log -= np.log(np.exp(log).sum(1, keepdims=True))
    return log


def request_of(prompt: Prompt, total: int, number: int = 0) -> Request:
    """The prompt as a request of that many tokens."""
    roles = np.full(total, FREE, np.int8)
    given = np.array(prompt.roles[:total], np.int8)
    roles[: len(given)] = given
    digest = sha256(np.array(prompt.tokens[: prompt.prefill], "<i4").tobytes()).hexdigest()[:12]
    return Request(number, prompt.prefill, total, prompt.mode, roles, prompt.spans, digest)
