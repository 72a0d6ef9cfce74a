"""What policies need and a running model cannot supply, refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvsim.capture.layers import Anatomy
from kvsim.engine import model_scope
from kvsim.engine.source import Source
from kvsim.errors import WrongUse
from kvsim.geometry import (
    ALL_LAYERS,
    ATTENTION,
    FUTURE,
    ITEMSIZE,
    K_PRE,
    KEY_NORM,
    KEYS,
    PREFILL_MASS,
    Q_STATS,
    QUERIES,
    TRUTH,
    VALUES,
    WO_NORM,
    Layer,
    Need,
    Request,
    rope_problem,
)  # fmt: skip
from kvsim.live.row import Asked
from kvsim.policies.calibrated import Calibrated
from kvsim.policies.language import Policy
from kvsim.policies.protocol import Chain
from kvsim.policies.rules import gap

SUPPLIED = frozenset({ATTENTION, TRUTH, PREFILL_MASS, QUERIES, KEY_NORM, KEYS, VALUES, ALL_LAYERS})


def attended(anatomy: Anatomy, kv_dtype: str | None = None) -> list[Layer]:
    """The layers that attend, bytes as billed (kv_dtype None: the model's when it has 16 bits, else bfloat16). Raises WrongUse: a layer whose
    rows are another layer's."""
    dtype = kv_dtype or (anatomy.dtype if ITEMSIZE[anatomy.dtype] <= 2 else "bfloat16")
    if dtype not in ITEMSIZE:
        raise WrongUse(f"kv dtype {dtype!r}: expected one of {', '.join(ITEMSIZE)}")
    found = [x.billed(dtype, anatomy.dtype) for x in anatomy.layers if x.id in anatomy.modules]
    for x in found:
        if x.kv_source_layer is not None:
            raise WrongUse(
                f"layer {x.id} attends to the rows of layer {x.kv_source_layer}, which a policy cannot evict in a running model yet; capture "
                "a trace and replay it"
            )
        if x.index_topk is not None:
            raise WrongUse(
                f"layer {x.id} attends to what its own indexer chooses, under which no policy runs; capture a trace and replay it"
            )
    return found


def chains(policy: Policy, layer: Layer) -> list[Asked]:
    """The chains of a policy in a layer, each with its kv heads. Raises WrongUse for a head that the layer does not have."""
    *named, (rest, _) = policy.at(layer.id, layer.kv_heads)
    taken = {h for _, heads in named for h in heads or ()}
    left = tuple(h for h in range(layer.kv_heads) if h not in taken)
    return [Asked(chain, heads) for chain, heads in named] + ([Asked(rest, left if taken else None)] if left else [])


def needs_of(policies: Sequence[Policy], layers: Sequence[Layer]) -> frozenset[Need]:
    """Everything that some part of a policy needs in some layer; K_PRE also of codecs that code keys before RoPE."""
    found: set[Need] = set()
    for policy in policies:
        for layer in layers:
            for asked in chains(policy, layer):
                codecs = asked.chain.codecs
                found |= {K_PRE} if codecs and codecs.keys == "pre" and layer.rope is not None else set()
                for part in asked.chain.parts:
                    found |= part.needs
    return frozenset(found)


def check(policies: Sequence[Policy], layers: Sequence[Layer], anatomy: Anatomy, request: Request | None = None) -> None:
    """Raises WrongUse for the first thing that cannot be supplied, or a calibration that was made on this prompt."""
    for policy in policies:
        for layer in layers:
            for asked in chains(policy, layer):
                if estimate := asked.chain.part("estimate"):
                    raise WrongUse(
                        f"{type(estimate).__name__}: a running model attends to rows that are there; replay a trace for what stands for "
                        f"evicted ones (layer {layer.id})"
                    )
                for problem in _lacking(asked.chain, layer, anatomy, request):
                    raise WrongUse(f"{problem} (layer {layer.id})")


def _lacking(chain: Chain, layer: Layer, anatomy: Anatomy, request: Request | None) -> Iterator[str]:
    for part in chain.parts:
        name, codecs = type(part).__name__, getattr(part, "codecs", None)
        if codecs and codecs.keys == "pre" and layer.rope is not None:
            problem = rope_problem(layer.rope) or _unsupplied(K_PRE, layer, anatomy)
            if problem:
                yield f"{name} codes keys before RoPE: {problem}"
        for need in sorted(part.needs, key=str):
            if problem := _unsupplied(need, layer, anatomy):
                yield f"{name} needs {need}: {problem}"
    rule = chain.part("read").read
    if isinstance(rule, gap) and rule.file is not None:
        if request is not None and request.digest in rule.calibration.about["contexts"]:
            yield "gap: its calibration was made from the context that is run; calibrate on other ones"
        for head in range(layer.kv_heads):
            rule.weights(layer.id, head)
    store = chain.part("store")
    if isinstance(store, Calibrated) and request is not None and (problem := store.foreign_to("", "", request.digest)):
        yield problem


def _unsupplied(need: Need, layer: Layer, anatomy: Anatomy) -> str | None:
    """Why a running model cannot supply a need; None when it can."""
    if need in SUPPLIED or need.name == "window":
        return None
    if need == FUTURE:
        return "a running model has none; replay a trace for it"
    if need == Q_STATS:
        return rope_problem(layer.rope)
    if need == WO_NORM:
        return None if layer.id in anatomy.projections else "no plain output projection reads this layer's attention"
    if need == K_PRE:
        return None if layer.id in anatomy.turned else "this model does not show keys before RoPE"
    return "a running model does not have it; replay a trace that does"


def shared_limits(policy: Policy, sources: Mapping[int, Source]) -> dict[int, tuple[int, ...]]:
    """Rows for the kv heads of each layer whose keep shares one budget over the layers (ALL_LAYERS); layers with the same keep share."""
    groups: dict[Any, list[int]] = {}
    for i, source in sources.items():
        keep = policy.at(source.layer.id)[-1][0].part("keep")
        if ALL_LAYERS in keep.needs:
            groups.setdefault(keep, []).append(i)
    found: dict[int, tuple[int, ...]] = {}
    for keep, ids in groups.items():
        shares = model_scope.share([model_scope.preview(sources[i], keep) for i in ids])
        found |= {i: tuple(map(int, x)) for i, x in zip(ids, shares, strict=True)}
    return found
