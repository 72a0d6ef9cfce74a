"""A learned indexer at work. The operands of its two products, q·k and w·max(0, q·k), are the same in every model that has one: they are
watched, and no model's own way to them is gone again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvsim.capture.bits import DTYPES
from kvsim.errors import WrongUse
from kvsim.geometry import SCORE_FNS

NAME = "Indexer"
NEAR = 1e-4  # a score from that of the trace's definition, of the largest

Take = Callable[[int], "Indexed | None"]


@dataclass(frozen=True, eq=False)
class Indexed:
    """What an indexer said of S new tokens, in float32: queries q [S, H, d], weights w [S, H], keys k [T, d] of all tokens so far, the score
    [S, T] of each, and which tokens are the best [S, n], no more than `most`."""

    q: torch.Tensor
    w: torch.Tensor
    k: torch.Tensor
    score: torch.Tensor
    best: torch.Tensor
    most: int
    scale: float  # its own, which some multiply the scores by and some the weights

    def read(self) -> torch.Tensor:
        """bool[S, T]: the tokens it lets each query attend to, if they are visible."""
        return torch.zeros(self.score.shape, dtype=torch.bool, device=self.score.device).scatter_(1, self.best, True)


@dataclass(frozen=True)
class Form:
    """How a layer's scores follow from what is stored: geometry.SCORE_FNS of weights times `factor`."""

    score_fn: str
    factor: float
    heads: int
    dim: int


@contextmanager
def indexing(model: torch.nn.Module) -> Iterator[Take]:
    """While inside, indexers are watched -> take(layer): what the layer's own said since this was last asked; None where it has none, or
    one that is made otherwise."""
    said: dict[int, Indexed | None] = {}
    watched = [
        m for m in model.modules() if type(m).__name__.endswith(NAME) and hasattr(m, "layer_idx") and hasattr(m, "index_topk")
    ]
    for m in watched:
        m.forward = _watched(m, said)
    try:
        yield lambda layer: said.pop(layer, None)
    finally:
        for m in watched:
            del m.forward  # the class's own is under it


def form_of(said: Indexed, dtype: str, layer: int) -> Form:
    """Found by trying, with the tokens of a whole forward. Raises WrongUse: none of the forms that a trace knows gives its scores, or
    its numbers have more bits than the trace."""
    dots = said.q @ said.k.T  # [S, H, T]
    seen = torch.ones_like(said.score).tril().bool()
    for score_fn in SCORE_FNS:
        for factor in (1.0, said.scale):
            mine = torch.einsum("sh,sht->st", said.w * factor, dots.relu() if score_fn == "relu_weighted" else dots)
            if float((mine - said.score)[seen].abs().max()) <= NEAR * float(said.score[seen].abs().max()):
                kept = all(torch.equal(x.to(DTYPES[dtype]).float(), x) for x in (said.q, said.k))
                if not kept:
                    raise WrongUse(
                        f"layer {layer}: its indexer's queries and keys are no {dtype}, which all else is; it cannot be captured"
                    )
                return Form(score_fn, factor, *said.q.shape[1:])
    raise WrongUse(f"layer {layer}: its indexer scores tokens by more than {' or '.join(SCORE_FNS)}; it cannot be captured")


def _watched(indexer: Any, said: dict[int, Indexed | None]) -> Callable[..., Any]:
    own = indexer.forward

    @wraps(own)
    def forward(*args: Any, **options: Any) -> Any:
        with _Seen() as seen:
            result = own(*args, **options)
        said[indexer.layer_idx] = seen.said(int(indexer.index_topk), float(getattr(indexer, "softmax_scale", 1.0)))
        return result

    return forward


class _Seen(TorchFunctionMode):  # type: ignore[misc]  # torch has no types for it
    """Keeps the operands of matrix products, and what the best are taken of. Not the products themselves: they are large."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[torch.Tensor] = []
        self.right: torch.Tensor | None = None  # of the first product
        self.best: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.matmul, torch.Tensor.matmul):
            self.left.append(args[0])
            self.right = args[1] if self.right is None else self.right
        elif func in (torch.topk, torch.Tensor.topk):
            self.best.append((args[0], result.indices))
        return result

    def said(self, most: int, scale: float) -> Indexed | None:
        """None: not two products of one sequence and one choice, of the shapes that an indexer has."""
        if len(self.left) != 2 or len(self.best) != 1 or self.right is None:
            return None
        (q, w), k, (score, best) = self.left, self.right, self.best[0]
        if [x.ndim for x in (q, w, k, score)] != [4, 4, 4, 3] or {len(x) for x in (q, w, k, score)} != {1}:
            return None
        _, new, heads, dim = q.shape
        if w.shape != (1, new, 1, heads) or k.shape[:3] != (1, 1, dim) or score.shape != (1, new, k.shape[3]):
            return None
        return Indexed(q[0].float(), w[0, :, 0].float(), k[0, 0].T.float(), score[0].float(), best[0], most, scale)
