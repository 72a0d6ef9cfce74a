"""The shapes that a fit of each kernel class needs, and the bytes that a kernel of the class has to move for one.

Eight to twelve a class, corners of batch and length among them: fewer leave errors of 10 to 15 % (cost study, section 3)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from kvsim.cost.heads import Geometry
from kvsim.errors import WrongUse

PAGE = 16  # tokens
SHORTEST, LONGEST = 256, 131072  # tokens of a request
LENGTHS = 4  # of each batch
FEWEST = 4 * 2 * SHORTEST  # tokens of a launch: three batches, and two lengths of the largest
MIB = 1 << 20
KEPT = 64  # pages of a request that a top-k keeps: Quest's 1 024 tokens
POOL = 4  # pages there are for each that is gathered
GROUP, CODE_BITS = 32, 4  # numbers that share a scale and a zero; bits of a code
BOUND_BYTES = 4
CLASSES = ("rest", "dense_attn", "page_scan", "topk", "gather_attn", "summary_update", "dequant", "scores", "host_fetch")
BY_PAGE = ("page_scan", "topk", "gather_attn")  # whose size is pages; of the others, context


@dataclass(frozen=True)
class Shape:
    """Of one layer: `batch` requests of `context` tokens in pages of `page`, of which a kv head reads `pages`, all requests together."""

    batch: int
    context: int
    pages: int
    page: int = PAGE

    @property
    def each(self) -> int:
        """Pages read of one request."""
        return self.pages // self.batch

    @property
    def all(self) -> int:
        """Pages that one request has."""
        return -(-self.context // self.page)


def traffic(cls: str, g: Geometry, s: Shape) -> int:
    """Bytes that any kernel of the class must move in one layer. What one moves besides, a copy of what it gathers, is in its time.

    Source: cost study, section 3. Bounds of pages are float32, one for each query head; `rest` is a plain read of K and V."""
    number = g.kv_bits // 8
    tokens, wide = s.batch * s.context, g.head_dim + g.value_dim
    cache = tokens * g.kv_heads * wide
    summary = g.kv_heads * 2 * g.head_dim * number
    return {
        "rest": cache * number,
        "dense_attn": g.decode_bytes(s.batch, tokens),
        "page_scan": s.pages * summary,
        "topk": s.pages * g.q_heads * BOUND_BYTES,
        "gather_attn": g.decode_bytes(s.batch, s.pages * s.page),
        "summary_update": s.batch * summary,
        "dequant": cache * CODE_BITS // 8 + cache // GROUP * 2 * number + cache * number,  # codes, scales and zeros; numbers
        "scores": tokens * g.kv_heads * g.head_dim * number + 2 * tokens * g.q_heads * number,  # keys; written, read
        "host_fetch": cache * number,
    }[cls]


def shapes(cls: str, g: Geometry, largest: int, between: bool = False) -> list[Shape]:
    """Of launches whose requests hold at most about `largest` bytes of K and V; `between`: others, inside the box of the first, to check
    a fit with. Raises WrongUse when that is too little."""
    row = g.kv_heads * (g.head_dim + g.value_dim) * g.kv_bits // 8
    tokens = largest // row
    if tokens < FEWEST:
        least = -(-FEWEST * row // MIB)
        raise WrongUse(
            f"{largest // MIB} MiB hold {tokens} tokens of these heads: --largest {least} at least, for shapes that differ enough"
        )
    if cls == "rest":
        lengths = _lengths(tokens, 2 * LENGTHS)
        return [Shape(1, n, n // PAGE) for n in (map(_middle, pairwise(lengths)) if between else lengths)]
    share = POOL if cls == "gather_attn" else 1
    return [Shape(batch, n, batch * max(n // PAGE // share, 1)) for batch, n in _grid(tokens, between)]


def _grid(tokens: int, between: bool) -> list[tuple[int, int]]:
    """(batch, context): three batches, each from the shortest to the longest context that leaves the batch within `tokens` tokens.

    between: the middles of a batch's steps, and the middle of everything between two batches."""
    step = max((b for b in (2, 4, 8) if b * b * 2 * SHORTEST <= tokens), default=2)
    ladders = {b: _lengths(tokens // b, LENGTHS) for b in (1, step, step * step)}
    if not between:
        return [(b, n) for b, lengths in ladders.items() for n in lengths]
    inside = [(b, _middle(pair)) for b, lengths in ladders.items() for pair in pairwise(lengths)]
    across = [(round(math.sqrt(a * b)), _middle((*ladders[a][1:3], *ladders[b][1:3]))) for a, b in pairwise(ladders)]
    return inside + [pair for pair in across if pair[0] not in ladders]


def _lengths(longest: int, count: int) -> list[int]:
    """Whole pages, equal factors apart; twice the shortest at least, so that there is something to tell apart."""
    last = max(min(longest, LONGEST), 2 * SHORTEST)
    return [_whole(SHORTEST * (last / SHORTEST) ** (i / (count - 1))) for i in range(count)]


def _middle(lengths: Iterable[int]) -> int:
    return _whole(statistics.geometric_mean(lengths))


def _whole(length: float) -> int:
    return round(length / PAGE) * PAGE
