"""A policy expression -> its fixed budget as numbers; what depends on queries or contents needs a trace and is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsim.cost.heads import BITS, Geometry
from kvsim.cost.plain import Codes, Fixed
from kvsim.errors import WrongUse
from kvsim.geometry import INDEX
from kvsim.policies.language import canonical, parse_policy
from kvsim.policies.protocol import ATTENTION, Chain
from kvsim.policies.rules import Rule

ONE_SET = ("max", "mean", "softmax_mean")  # heads= of which a group reads one set of pages
STORES = ("kivi", "fp8")


def fixed(expression: str, heads: Geometry, union: float | None = None) -> Fixed:
    """A policy expression -> Fixed. union: pages that a group reads together over those of one head (default: the most it can be).

    Raises WrongUse for an expression that is none, and for one whose bytes only a trace can tell."""
    policy = parse_policy(expression)
    if policy.name is not None:
        raise WrongUse(
            f"{expression}: a policy file has budgets per layer; replay it on a trace and give the run to kvsim cost predict"
        )
    chain = policy.default
    keep, read = chain.part("keep"), chain.part("read")
    if isinstance(getattr(read, "read", None), Rule):
        _needs_a_trace(expression, f"read={type(read.read).__name__}(…) stops where the queries let it")
    if keep.codecs is not None or keep.beyond:
        _needs_a_trace(expression, f"{type(keep).__name__} decides by attention what is coded and what is moved")
    if INDEX in read.needs:
        _needs_a_trace(expression, "a learned index has keys of a size that the model's geometry does not tell")
    if read.shards is not None:
        _needs_a_trace(expression, "what shards exchange depends on which pages they hold")
    return Fixed(
        name=canonical(chain),
        hold=keep.hold,
        codes=_codes(expression, chain, heads),
        looks=ATTENTION in keep.needs,
        **_reads(read, heads, union),
    )


def _needs_a_trace(expression: str, why: str) -> None:
    raise WrongUse(f"{expression}: {why}, so only a trace can tell its bytes: kvsim replay, then kvsim cost predict")


def _reads(read: Any, heads: Geometry, union: float | None) -> dict[str, Any]:
    """The fields of Fixed that a read decides."""
    if getattr(read, "read", None) is None:
        return {}
    group = heads.q_heads // heads.kv_heads
    most = 1.0 if read.heads in ONE_SET else float(group)
    if union is not None and not 1 <= union <= group:
        raise WrongUse(
            f"--union-factor {union:g}: expected 1 (all heads of a group want the same pages) to {group} (none shares a page)"
        )
    tile = read.tile or 1
    out = {
        "read": read.read,
        "page": read.page,
        "rows": -(-read.page // tile) * tile,
        "union": min(most, union or most),
        "dense_layers": getattr(read, "dense_layers", 0),
    }
    if read.index is not None:
        dtype = heads.dtype if read.index.dtype == "kv" else read.index.dtype
        out |= {"summary_numbers": read.index.numbers(heads.head_dim), "summary_bits": BITS[dtype]}
    return out


def _codes(expression: str, chain: Chain, heads: Geometry) -> Codes | None:
    store = chain.part("store")
    if store is None:
        return None
    name = type(store).__name__
    if name not in STORES:
        _needs_a_trace(expression, f"what {name} stores depends on what is in the rows or asked for")
    (key_bits, key_meta, key_group), (value_bits, value_meta, _) = (
        _layout(store.codecs.k, heads.head_dim),
        _layout(store.codecs.v, heads.value_dim),
    )
    block = store.residual if name == "kivi" else 0
    return Codes(key_bits, value_bits, key_meta, value_meta, key_group, store.residual, block)


def _layout(codec: Any, dim: int) -> tuple[int | None, int, int]:
    """Bits of a row's codes, bytes of scales of a group, rows of a group; these stores cost the same whatever is in the rows."""
    if codec is None:
        return None, 0, 1
    coded = codec.encode(np.zeros((1, codec.tokens, dim)))
    return int(coded.bits[0, 0]), int(coded.group_meta[0] + coded.row_meta.sum()), codec.tokens
