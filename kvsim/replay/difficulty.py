"""The calibration of gap(file=...): how likely a query is covered too little at each level, learned from contexts that it will not be
replayed on; and how well that is foretold on others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim import __version__
from kvsim.engine.difficulty import coverage, fit
from kvsim.errors import WrongUse
from kvsim.geometry import Layer
from kvsim.policies import allocate
from kvsim.policies.language import parse
from kvsim.policies.protocol import Chain
from kvsim.policies.rules import FEATURES, gap, ranking
from kvsim.replay.asked import chosen
from kvsim.replay.lanes import source_of
from kvsim.trace.open import Trace
from kvsim.units import pages

Floats = NDArray[np.float64]
TARGET = 0.9


def levels_of(rule: gap) -> list[int]:
    """Pages from floor to cap, each about the square root of 2 times the one before."""
    floor, cap = rule.floor, rule.cap
    if not isinstance(floor, pages) or not isinstance(cap, pages):
        raise WrongUse("gap: to be calibrated its floor= and cap= are pages(), for example floor=pages(2), cap=pages(32)")
    many = int(np.floor(2 * np.log2(cap.n / floor.n))) + 1
    return sorted({*np.round(floor.n * np.sqrt(2.0) ** np.arange(many)).astype(int).tolist(), cap.n})


def learned(
    traces: Sequence[Trace], chain: Chain, target: float | None, layers: Iterable[int] | None, requests: Iterable[int] | None
) -> tuple[dict[str, Any], dict[str, Floats]]:
    """What the calibration file says of itself, and its arrays: LAYER.gap f64[Hkv, levels, features + 1]."""
    rule, read = chain.part("read").read, chain.part("read")
    target = TARGET if target is None else target
    if not 0 < target < 1:
        raise WrongUse(f"target coverage {target}: expected a part of the attention, above 0 and below 1")
    if rule.file is not None or len(chain.parts) != 2 or type(chain.part("keep")).__name__ != "full" or read.heads != "each":
        raise WrongUse(
            'gap is calibrated for a quest of its own, with heads="each": quest(read=gap(min=0, floor=pages(2), cap=pages(32)))'
        )
    levels = levels_of(rule)
    mine = chosen("layers", layers, [x.id for x in traces[0].captured_layers], traces[0])
    told = [(t, r) for t in traces for r in t.requests if r.id in chosen("requests", requests, [x.id for x in t.requests], t)]
    arrays: dict[str, Floats] = {}
    for layer in mine:
        each = [list(_lane(t, r, layer, chain, levels)) for t, r in told]
        if len({len(heads) for heads in each}) > 1:
            raise WrongUse(f"layer {layer}: traces of models with other kv heads; calibrate on contexts of one model")
        arrays[f"{layer}.gap"] = np.stack([_fitted(head, target) for head in zip(*each, strict=True)])
    about: dict[str, Any] = {
        "kind": "gap",
        "kvsim": __version__,
        "options": ranking(read.page, read.index) | {"levels": levels, "target": target, "features": list(FEATURES)},
        "traces": [{"id": t.id, "sha256": t.sha256} for t in traces],
        "contexts": [r.digest for _, r in told],
        "layers": list(mine),
    }
    return about, arrays


def foretell(traces: Sequence[Trace], policy: str, bins: int = 10) -> pl.DataFrame:
    """A policy with gap(file=...) on contexts its file was not made from -> context, layer, level, bin of the foretold risk, n, foretold and
    observed (means of the risk, and of coverage < target): the data of a reliability plot."""
    chain = parse(policy)
    rule = chain.part("read").read
    target, levels, rows = rule.calibration.about["options"]["target"], rule.levels, []
    for t in traces:
        for r in t.requests:
            if r.digest in rule.calibration.about["contexts"]:
                raise WrongUse(
                    f"gap: its calibration was made from the same context, request {r.id} of trace {t.id}; test on other ones"
                )
            for layer in rule.calibration.about["layers"]:
                for head, (x, covered) in enumerate(_lane(t, r, layer, chain, levels)):
                    w = rule.weights(layer, head)
                    p = 1 / (1 + np.exp(-((x * w[:, :-1]).sum(-1) + w[:, -1])))
                    at, level = np.minimum((p * bins).astype(int), bins - 1), np.broadcast_to(levels, p.shape)
                    rows.append(
                        pl.DataFrame(
                            {"level": level.ravel(), "bin": at.ravel(), "risk": p.ravel(), "missed": (covered < target).ravel()}
                        ).with_columns(context=pl.lit(f"{t.id}/{r.id}"), layer=layer)
                    )
    said = {"n": pl.len(), "foretold": pl.col("risk").mean(), "observed": pl.col("missed").cast(pl.Float64).mean()}
    return pl.concat(rows).group_by("context", "layer", "level", "bin").agg(**said).sort("context", "layer", "level", "bin")


def _lane(t: Trace, r: Any, layer: int, chain: Chain, levels: Sequence[int]) -> Iterator[tuple[Floats, Floats]]:
    """Features and coverage of every kv head."""
    at = next((x for x in t.captured_layers if x.id == layer), None)
    if at is None:
        raise WrongUse(f"trace {t.id}: layer {layer} is not captured; expected the same layers in all traces")
    source = source_of(t.lane(r, at))
    for head in range(at.kv_heads):
        yield coverage(source, _read(chain, at), head, levels)


def _read(chain: Chain, layer: Layer) -> Any:
    return allocate.for_layer(chain, layer).part("read")


def _fitted(contexts: Sequence[tuple[Floats, Floats]], target: float) -> Floats:
    """f64[L, F + 1]: all contexts of a kv head together."""
    x, covered = (np.concatenate([c[i] for c in contexts]) for i in (0, 1))
    return np.stack([fit(x[:, i], covered[:, i] < target) for i in range(covered.shape[1])])
