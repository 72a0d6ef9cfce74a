"""Budgets become whole tokens and pages here, and a chain becomes the chain of one layer; nothing else rounds a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import WrongUse
from kvsim.geometry import Layer, Request
from kvsim.policies.parameters import written
from kvsim.policies.protocol import Chain, Keep
from kvsim.policies.read.everything import everything
from kvsim.policies.rules import Rule
from kvsim.units import Budget, pages, share, tokens, whole


def to_tokens(budget: Budget, visible: int, request: Request, layer: Layer) -> int:
    """Whole tokens of a budget at a step that sees `visible` tokens; may be 0. pages() has no size here: WrongUse."""
    if isinstance(budget, tokens):
        return budget.n
    if isinstance(budget, share):
        return whole(budget.x * {"prompt": request.prompt, "total": request.total, "visible": visible}[budget.of])
    if isinstance(budget, pages):
        raise WrongUse(f"{written(budget)}: a page size is needed to count its tokens")
    return whole(budget.bytes / layer.row_bytes)


def to_pages(budget: Budget, page: int, visible: int, request: Request, layer: Layer) -> int:
    """Whole pages of `page` tokens, at least 1."""
    if isinstance(budget, pages):
        return budget.n
    return max(1, to_tokens(budget, visible, request, layer) // page)


def rule_pages(rule: Rule, page: int, visible: int, request: Request, layer: Layer) -> tuple[int, int]:
    """(floor, cap) of a stopping rule in whole pages; where it states none, 0 and as many as the visible tokens could fill.

    Raises WrongUse when the floor is above the cap, which budgets of two units tell only here."""
    low, high = getattr(rule, "floor", None), getattr(rule, "cap", None)
    floor, cap = (None if x is None else to_pages(x, page, visible, request, layer) for x in (low, high))
    if floor is not None and cap is not None and floor > cap:
        raise WrongUse(
            f"{type(rule).__name__}(floor={written(low)}, cap={written(high)}): with page={page} and {visible} visible tokens"
            f" (request {request.id}, layer {layer.id}) the floor is {floor} pages and the cap {cap}; lower floor= or raise cap="
        )
    return floor or 0, request.total + 1 if cap is None else cap


def hold_limit(keep: Keep, visible: int, request: Request, layer: Layer) -> int:
    """Whole tokens per kv head that may be held, at least 1; all visible ones without a budget.

    Raises WrongUse when the keep protects more than that."""
    if keep.hold is None:
        return visible
    limit = max(1, to_tokens(keep.hold, visible, request, layer))
    if (parts := keep.layers(limit, request.prompt, len(layer.among))) is not None:
        limit = int(largest_remainder(parts, limit * len(layer.among))[layer.among.index(layer.id)])
    if (protected := keep.protected(limit) + len(keep.pinned_positions(request.spans))) > limit:
        raise WrongUse(
            f"{type(keep).__name__}(hold={written(keep.hold)}): that is {limit} tokens in layer {layer.id} of request {request.id},"
            f" fewer than the {protected} it protects; raise hold= or protect less"
        )
    return limit


def largest_remainder(raw: Any, total: int, most: Any = np.inf) -> NDArray[np.int64]:
    """Real parts f64[n] -> whole parts of that total: rounded down, the rest one by one to the largest remainder, ties to the lower one.

    most: no part may be larger; what a full part leaves goes to the others in the same way. Needs total <= sum(most)."""
    raw = np.asarray(raw, np.float64)
    parts = np.minimum(np.floor(raw), most).astype(np.int64)
    for _ in range(total - int(parts.sum())):
        parts[np.argmax(np.where(parts < most, np.round(raw - parts, 9), -np.inf))] += 1
    return parts


def for_layer(chain: Chain, layer: Layer) -> Chain:
    """The chain as this layer runs it: dense_layers=n reads the first n whole, a store's exact_layers=n codes nothing in the first and last n,
    and an index's dtype "kv" is the billed one.

    Raises WrongUse for an index or a codec that has no form for the layer's keys."""
    chain = _exact_at_the_ends(chain, layer)
    read, codecs = chain.part("read"), chain.codecs
    if codecs is not None:
        codecs.check(layer)
    if estimate := chain.part("estimate"):
        estimate.check(layer)
    if read is None or layer.id < getattr(read, "dense_layers", 0):
        return chain if read is None else chain.with_part(everything(page=read.page, tile=read.tile))
    if hasattr(read.index, "check"):
        read.index.check(layer.key_dim)
    if getattr(read.index, "dtype", None) == "kv":
        return chain.with_part(replace(read, index=replace(read.index, dtype=layer.dtype)))
    return chain


def _exact_at_the_ends(chain: Chain, layer: Layer) -> Chain:
    """Without its store in the layers that it leaves alone, no more than half of all layers at each end."""
    store = chain.part("store")
    if store is None or layer.id not in layer.among:
        return chain
    many = min(store.exact_layers, len(layer.among) // 2)
    coded = layer.among[many : len(layer.among) - many]
    return chain if layer.id in coded else Chain(tuple(part for part in chain.parts if part is not store))
