"""What a store takes per number, counted from its layout: scales, norms, exact rows and exact layers included; no trace is needed.

In a run the same is 8 * coded_bytes / coded_numbers of the ledger, and over all rows
8 * (resident_bytes + meta_resident_bytes) / (held_tokens * (key_dim + value_dim))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.codecs.coded import encode
from kvsim.errors import WrongUse
from kvsim.policies.parameters import TOLD
from kvsim.policies.protocol import FULL, Chain, Seen, Store

EXACT_BITS = 16  # of a number that is not coded


@dataclass(frozen=True)
class Bits:
    """Bits per number. keys, values: of coded rows, None where a side is exact; coded: both sides of them; held: of all rows of a layer that is
    coded, at a number of tokens; model: of all layers. claim: what was published, of the preset with these parameters, or None."""

    keys: float | None
    values: float | None
    coded: float
    held: float
    model: float
    claim: str | None


def bits_of(chain: Chain, tokens: int, dim: int = 128, layers: int = 32) -> Bits:
    """Of a chain's store, for rows of `dim` numbers a side in a cache of `tokens` tokens, right after the prompt. What is stored once (a
    rotation) is not in it. Raises WrongUse where bytes depend on what is in the rows or who attends to them."""
    store = chain.part("store")
    if min(tokens, dim, layers) < 1:
        raise WrongUse(f"bits: {tokens} tokens, rows of {dim} numbers, {layers} layers; expected 1 or more of each")
    if store is None or store.codecs is None:
        raise WrongUse("bits: expected a store that codes rows, for example kivi()")
    if chain.part("keep").hold is not None:
        raise WrongUse("bits: expected a store alone; how many rows a keep holds, a replay tells")
    full = np.full((1, tokens), FULL, np.uint8)
    seen = Seen(-1, tokens - 1, np.arange(tokens)[None], np.ones((1, tokens), bool), full, full, np.array([tokens]))
    sides = [_side(store, codec, dim) for codec in (store.codecs.k, store.codecs.v)]
    rows = [int(np.count_nonzero(x)) for x in store.place(seen)]
    held = sum((n * bits + (tokens - n) * EXACT_BITS) / tokens for n, bits in zip(rows, sides, strict=True)) / 2
    exact = 2 * min(store.exact_layers, layers // 2)
    model = (held * (layers - exact) + EXACT_BITS * exact) / layers
    k, v = (None if codec is None else bits for codec, bits in zip((store.codecs.k, store.codecs.v), sides, strict=True))
    return Bits(k, v, sum(sides) / 2, held, model, claim_of(store))


def _side(store: Store, codec: Any, dim: int) -> float:
    """Bits per number of a row that one side has coded."""
    if codec is None:
        return float(EXACT_BITS)
    if isinstance(codec, tuple) or getattr(codec, "outliers", 0) > 0 or codec.tokens == 0:
        name = type(store).__name__
        raise WrongUse(
            f"bits: what {name} stores depends on what is in the rows or who attends to them; replay it, and read coded_bytes of the ledger"
        )
    if hasattr(codec, "layout"):
        bits, meta = codec.layout(dim)
        return float(codec.tokens * bits + 8 * meta) / (codec.tokens * dim)
    coded = encode(codec, np.zeros((1, codec.tokens, dim)))
    return float(coded.bits.sum() + 8 * (coded.row_meta.sum() + coded.group_meta.sum())) / (codec.tokens * dim)


def claim_of(store: Store) -> str | None:
    """What was published with the preset that has the parameters of this store."""
    for preset in type(store).presets.values():
        given = {name: x for name, x in preset.items() if name not in TOLD}
        if "claim" in preset and all(getattr(store, name) == x for name, x in given.items()):
            return str(preset["claim"])
    return None
