"""Fixed-budget policies on a GPU that was measured, at any context and batch: no trace, bytes from the budget alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

from kvsim.cost.fixed import fixed
from kvsim.cost.heads import Geometry
from kvsim.cost.launches import Kernels, Launch, table
from kvsim.cost.model import CostModel
from kvsim.cost.numbers import seconds
from kvsim.cost.plain import Fixed, resident_bytes, step
from kvsim.cost.price import parts, steps
from kvsim.cost.prices import Prices, priced_for, refuse_unknown, rests
from kvsim.cost.ratio import speedups
from kvsim.errors import Uncalibrated, WrongUse


@dataclass(frozen=True)
class Asked:
    """Shapes are every context with every batch, or one batch of `lengths`. devices: tensor parallel, heads split among them.

    variants: of `step` or `rest`, a row each (default: all that the model has)."""

    policies: Sequence[str]
    contexts: Sequence[int] = ()
    batches: Sequence[int] = (1,)
    lengths: Sequence[int] = ()
    variants: Sequence[str] = ()
    kernels: dict[str, str] = field(default_factory=dict)
    how: Kernels = field(default_factory=Kernels)
    devices: int = 1
    union: float | None = None
    weights_bytes: int | None = None
    graph: str | None = None
    padded: bool = False

    def shapes(self) -> list[list[int]]:
        """Lengths of the requests of each batch that is asked about."""
        if bool(self.lengths) == bool(self.contexts):
            raise WrongUse("say either --context (with --batch) or --lengths, the tokens of each request of one batch")
        return [list(self.lengths)] if self.lengths else [[n] * b for n in self.contexts for b in self.batches]


def whatif(model: CostModel, heads: Geometry, asked: Asked) -> list[dict[str, Any]]:
    """One row a variant, shape and policy: step_us, overlap_us, low, high (µs), grade, binding, parts (µs by class), detail (all of
    price.parts), resident_bytes, union (pages that a group reads over those of one head), union_assumed (nobody said it), and speedup over
    full() with its interval.

    Raises WrongUse for a policy without a fixed budget, a model of other heads, a batch that does not fit in memory."""
    split = split_heads(heads, asked.devices)
    policies = [Fixed()] + [fixed(p, split, asked.union) for p in asked.policies]
    shapes = asked.shapes()
    if not all(lengths and min(lengths) > 0 for lengths in shapes):
        raise WrongUse("a request has 1 token or more, and a batch 1 request or more")
    for lengths in shapes:
        for policy in policies[1:]:
            refuse_what_does_not_fit(model, policy.name, resident_bytes(policy, split, lengths), asked, lengths)
    rows = []
    refuse_unknown(model, asked.variants)
    found: Sequence[str | None] = asked.variants or rests(model) or [None]
    for variant in found:
        prices = priced_for(
            model,
            (split.q_heads, split.kv_heads, split.head_dim),
            rest=variant,
            kernels=asked.kernels,
            weights_bytes=_part(asked.weights_bytes, asked.devices),
            graph=asked.graph,
        )
        rows += _of_variant(prices, split, heads, policies, shapes, asked)
    return rows


def split_heads(heads: Geometry, devices: int) -> Geometry:
    """Of one device of `devices`: query heads divided, kv heads too, each on several devices where they are fewer."""
    if devices < 1 or heads.q_heads % devices or (heads.kv_heads % devices and devices % heads.kv_heads):
        raise WrongUse(
            f"--tp {devices}: expected a number that divides the {heads.q_heads} query heads and the {heads.kv_heads} kv heads"
        )
    return replace(heads, q_heads=heads.q_heads // devices, kv_heads=max(1, heads.kv_heads // devices))


def _part(bytes: int | None, devices: int) -> int | None:
    return None if bytes is None else -(-bytes // devices)


def refuse_what_does_not_fit(model: CostModel, name: str, resident: int, asked: Asked, lengths: Sequence[int]) -> None:
    """Raises WrongUse for a batch that the GPU's memory cannot hold beside the weights."""
    gpu, weights = model.gpu, _part(asked.weights_bytes, asked.devices) or 0
    if gpu and gpu.memory_gb and resident + weights > gpu.memory_gb * 1e9:
        of = f"{weights / 1e9:.1f} GB of weights and " if weights else ""
        raise WrongUse(
            f"{name} with {len(lengths)} requests of up to {max(lengths)} tokens needs {of}{resident / 1e9:.1f} GB for the cache, and"
            f" {gpu.name} has {gpu.memory_gb:g} GB; lower --batch or --context, or raise --tp"
        )


def _of_variant(
    prices: Prices, split: Geometry, heads: Geometry, policies: list[Fixed], shapes: list[list[int]], asked: Asked
) -> list[dict[str, Any]]:
    cases = [(lengths, policy) for lengths in shapes for policy in policies]
    work = [
        step(policy, split, lengths, asked.how, asked.padded) + collectives(heads, asked.devices, len(lengths))
        for lengths, policy in cases
    ]
    launches = table(work, split, asked.graph)
    found = parts(prices, launches)
    told = steps(found).to_dicts()
    pairs = [(i // len(policies) * len(policies), i) for i in range(len(cases))]
    ratios = speedups(prices, launches, pairs)
    return [
        _row(prices.rest, lengths, policy, told[i], found.filter(step=i), ratios[i])
        | {"resident_bytes": resident_bytes(policy, split, lengths), "asked": asked.policies[i % len(policies) - 1]}
        | {"union": policy.union, "union_assumed": asked.union is None and policy.union > 1}
        for i, (lengths, policy) in enumerate(cases)
        if i % len(policies)
    ]


def collectives(heads: Geometry, devices: int, batch: int) -> list[Launch]:
    """Two all-reduces a layer of one 16-bit number a request and channel, the model's width taken as query heads times head_dim."""
    if devices == 1:
        return []
    bytes = 2 * heads.layers * batch * heads.q_heads * heads.head_dim * 2
    return [Launch("collective", bytes, heads.layers, 2 * heads.layers, batch)]


def _row(
    variant: str | None, lengths: list[int], policy: Fixed, told: dict[str, Any], found: pl.DataFrame, ratio: dict[str, Any]
) -> dict[str, Any]:
    row = {
        "policy": policy.name,
        "variant": variant or "",
        "context": math.ceil(sum(lengths) / len(lengths)),
        "batch": len(lengths),
    }
    row |= {k: told[k] for k in ("step_us", "overlap_us")} | {"low": told["low_us"], "high": told["high_us"]}
    row |= {k: told[k] for k in ("grade", "binding", "unknown")}
    detail = found.drop("step").to_dicts()
    return row | {"parts": {r["class"]: r["us"] for r in detail}, "detail": detail, "speedup": ratio}


def refuse_uncalibrated(rows: list[dict[str, Any]]) -> None:
    """--strict. Raises Uncalibrated that names the first class whose time no measurement encloses."""
    for r in rows:
        for part in r["detail"]:
            if part["grade"] != "calibrated":
                raise Uncalibrated(
                    f"--strict: {r['asked']} at context {r['context']}, batch {r['batch']}: {part['class']} is {part['grade']}, priced by"
                    f" {part['by']}; measure samples of {part['class']} that enclose it, and fit again"
                )


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """What `kvsim cost whatif` says: one line a row, a table a variant."""
    wide = max(len(r["asked"]) for r in rows)
    said = []
    for i, r in enumerate(rows):
        if not i or r["variant"] != rows[i - 1]["variant"]:
            said.append(
                f"{r['variant'] or 'steps':{wide}}  {'context':>8} {'batch':>5} {'step':>10}  {'interval':22} {'full/it':20} binds"
            )
        said.append(
            f"{r['asked']:{wide}}  {r['context']:8} {r['batch']:5} {_at_least(r):>10}  {_span(r):22} {_gain(r):20} {r['binding']}, {r['grade']}"
        )
    if missing := sorted({c for r in rows for c in r["unknown"]}):
        said.append(
            f"no time is known for {', '.join(missing)}: steps are floors; measure them, or say --weights for the rest of a step"
        )
    return said + assumed(rows)


def assumed(rows: list[dict[str, Any]]) -> list[str]:
    """A line when query heads that choose for themselves were taken to share no page."""
    most = max((r["union"] for r in rows if r["union_assumed"]), default=None)
    if most is None:
        return []
    return [
        f"query heads of a group are taken to share no page: together they read {most:g} times the pages of one, as far as there are pages; a"
        " replay with heads='each' measures it (kvsim report: read per KV head over read per query head), --union-factor says it"
    ]


def _at_least(row: dict[str, Any]) -> str:
    return ("≥ " if row["high"] is None else "") + seconds(row["step_us"])


def _span(row: dict[str, Any]) -> str:
    return f"from {seconds(row['low'])}" if row["high"] is None else f"{seconds(row['low'])} - {seconds(row['high'])}"


def _gain(row: dict[str, Any]) -> str:
    """Full attention over this; without an interval where either is a floor."""
    ratio = row["speedup"]
    return f"{ratio['speedup']:.2f}" + (f" [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio["low"] is not None else "")
