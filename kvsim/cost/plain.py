"""The launches of a decode step under a fixed budget, from lengths alone: no trace.

Bytes are those that the ledger counts for the same policy; tests hold one against the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.cost.heads import Geometry
from kvsim.cost.launches import Launch


@dataclass(frozen=True)
class Fixed:
    """A fixed-budget policy as numbers, of one kv head of one layer; full attention with the defaults.

    hold_tokens: most tokens held (None: all). read_pages of `page` tokens (None: everything held is read). union: pages that the query
    heads of a group read together, over those of one. summary_numbers: stored per page and ranked at every step (0: none).
    tail: the newest page is always read, valid rows only. dense_layers: the first layers, read whole."""

    name: str = "full()"
    hold_tokens: int | None = None
    read_pages: int | None = None
    page: int = 16
    union: float = 1.0
    summary_numbers: int = 0
    summary_bits: int = 16
    tail: bool = False
    dense_layers: int = 0

    def held(self, tokens: int) -> int:
        """Tokens held of a request that has `tokens`."""
        return tokens if self.hold_tokens is None else min(tokens, self.hold_tokens)

    def resident_bytes(self, heads: Geometry, lengths: Sequence[int]) -> int:
        """K, V and summaries of all layers and requests, on the device."""
        rows = sum(self.held(n) for n in lengths) * (heads.head_dim + heads.value_dim) * heads.kv_bits // 8
        summaries = sum(-(-self.held(n) // self.page) for n in lengths) * self.summary_numbers * self.summary_bits // 8
        return (rows + summaries) * heads.kv_heads * heads.layers


def step(policy: Fixed, heads: Geometry, lengths: Sequence[int]) -> list[Launch]:
    """A decode step of a batch whose requests see `lengths` tokens each, the new one included."""
    dense = heads.layers if policy.read_pages is None else min(policy.dense_layers, heads.layers)
    held, batch = [policy.held(n) for n in lengths], len(lengths)
    out = [_attention("dense_attn", dense, heads, batch, sum(held))] if dense else []
    if sparse := heads.layers - dense:
        out += _selective(policy, heads, held, sparse)
    return out


def _attention(
    cls: str, layers: int, heads: Geometry, batch: int, tokens: int, pages: int | None = None, page: int | None = None
) -> Launch:
    return Launch(cls, layers * heads.decode_bytes(batch, tokens), layers, layers, batch, round(tokens / batch), pages, page)


def _selective(policy: Fixed, heads: Geometry, held: list[int], layers: int) -> list[Launch]:
    """Summaries are scanned, pages ranked and read, and the new token's page summarised again."""
    batch, there = len(held), [-(-n // policy.page) for n in held]
    picked = [min(p, int(policy.read_pages * policy.union + 0.5)) for p in there]  # type: ignore[operator]  # not None: there are such layers
    short = [-n % policy.page if policy.tail else 0 for n in held]
    read = [min(n, k * policy.page - s) for n, k, s in zip(held, picked, short, strict=True)]
    gather = _attention("gather_attn", layers, heads, batch, sum(read), sum(picked), policy.page)
    if not policy.summary_numbers:
        return [gather]
    summary = policy.summary_numbers * policy.summary_bits // 8 * heads.kv_heads
    context = round(sum(held) / batch)

    def of(cls: str, bytes: int) -> Launch:
        return Launch(cls, layers * bytes, layers, layers, batch, context, sum(there), policy.page)

    return [
        of("page_scan", sum(there) * summary),
        of("topk", sum(there) * heads.q_heads * 4),
        gather,
        of("summary_update", batch * summary),
    ]
