"""`kvsim cost serve`: the serving view of some policies, beside full attention, as rows and as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.cost.fixed import fixed
from kvsim.cost.heads import Geometry
from kvsim.cost.launches import Kernels
from kvsim.cost.model import CostModel
from kvsim.cost.numbers import seconds
from kvsim.cost.plain import Fixed, step
from kvsim.cost.prices import priced_for
from kvsim.cost.serving import (
    Engine,
    Memory,
    batches,
    beyond,
    filled,
    longest,
    most_requests,
    recovery,
    resident,
    sharing,
    view,
)
from kvsim.cost.whatif import assumed
from kvsim.errors import WrongUse


@dataclass(frozen=True)
class Asked:
    """contexts: tokens of requests alike; batch: of the latency view; lengths: a mix, one number a request."""

    policies: Sequence[str]
    contexts: Sequence[int]
    batch: int = 1
    lengths: Sequence[int] = ()
    variant: str | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    how: Kernels = field(default_factory=Kernels)
    union: float | None = None
    graph: str | None = None
    memory_share: float = 0.9
    weights: int = 0
    workspace: int = 0
    prefix: int = 0
    bucket: int = 1024
    span: int = 0


def serve(model: CostModel, heads: Geometry, asked: Asked) -> dict[str, Any]:
    """-> usable_bytes, rows (a policy and context each), and where asked for mix, prefix and recovery.

    A row: step_us at the batch asked for with interval, grade; requests that fit, their step and tokens a second (null where memory is
    not known); longest context of that batch; attention_share, amdahl, break-even share, crossover. Raises WrongUse: nothing fits, a
    policy without a fixed budget, a model of other heads."""
    if not asked.contexts or min(*asked.contexts, asked.batch) < 1:
        raise WrongUse("--context and --batch: expected one number or more, 1 token and 1 request at least")
    if not 0 < asked.memory_share <= 1:
        raise WrongUse(f"--memory-share {asked.memory_share:g}: expected a part of the memory, above 0 and at most 1")
    prices = priced_for(
        model, (heads.q_heads, heads.kv_heads, heads.head_dim), rest=asked.variant, kernels=asked.kernels,
        weights_bytes=asked.weights or None, graph=asked.graph,
    )  # fmt: skip
    engine = Engine(prices, heads, asked.how)
    total = model.gpu.memory_gb * 1e9 if model.gpu else 0.0
    memory = Memory(total, asked.memory_share, asked.weights, asked.workspace) if total else None
    if memory and not memory.usable:
        raise WrongUse(
            f"--weights {asked.weights:,} and --workspace {asked.workspace:,} leave nothing of the {memory.share:.0%} of {total:,.0f} "
            "bytes for a cache"
        )
    policies = [Fixed()] + [fixed(p, heads, asked.union) for p in asked.policies]
    names = ["full()", *asked.policies]
    rows = [
        {"policy": name, "context": n}
        | _row(engine, policy, n, asked, memory)
        | {"union": policy.union, "union_assumed": asked.union is None and policy.union > 1}
        for n in asked.contexts
        for name, policy in zip(names, policies, strict=True)
    ]
    out: dict[str, Any] = {"usable_bytes": memory.usable if memory else None, "batch": asked.batch, "rows": rows}
    if asked.lengths:
        out["mix"] = [
            {"policy": name}
            | batches(engine, p, asked.lengths, asked.bucket)
            | (filled(engine, p, asked.lengths, memory) if memory else {})
            | _share(asked.lengths, rows, name)
            for name, p in zip(names, policies, strict=True)
        ]
    if asked.prefix:
        many, context = max(asked.batch, 2), max(asked.contexts)
        out["prefix"] = {"requests": many, "context": context} | sharing(engine, Fixed(), context, many, asked.prefix)
    if asked.span:
        out["recovery"] = recovery(engine, asked.span, asked.weights)
    return out


def _row(engine: Engine, policy: Fixed, context: int, asked: Asked, memory: Memory | None) -> dict[str, Any]:
    at = engine.times([step(policy, engine.heads, [context] * asked.batch, asked.how)])[0]
    row = {k: at[k] for k in ("step_us", "low_us", "high_us", "grade", "binding")}
    row["resident_bytes"] = resident(policy, engine.heads, [context] * asked.batch, asked.prefix)
    if memory:
        n = most_requests(policy, engine.heads, context, memory, asked.prefix)
        full = engine.times([step(policy, engine.heads, [context] * n, asked.how)])[0] if n else None
        row |= {
            "requests": n,
            "step_us_of_all": full and full["step_us"],
            "tokens_per_s": full and n / full["step_us"] * 1e6,
            "grade_of_all": full and full["grade"],
            "longest_context": longest(policy, engine.heads, asked.batch, memory, asked.prefix),
        }
    return row | (view(engine, policy, context, asked.batch) if policy.read is not None or policy.hold is not None else {})


def _share(lengths: Sequence[int], rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    there = [r["crossover_tokens"] for r in rows if r["policy"] == name and "crossover_tokens" in r]
    return {"beyond_crossover": beyond(lengths, there[0])} if there else {}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """What the command says."""
    if found["usable_bytes"] is None:
        yield "the memory of this device is not known, so how many requests fit is not said"
    else:
        yield f"{found['usable_bytes'] / 1e9:.1f} GB for the cache"
    wide = max(len(r["policy"]) for r in found["rows"])
    yield f"{'':{wide}}  {'context':>8}  step of {found['batch']:<4}  most requests, their step, tokens/s    pays from   break-even"
    for r in found["rows"]:
        yield f"{r['policy']:{wide}}  {r['context']:8}  {_floor(r, 'step_us', 'high_us'):12}  {_all(r):37}  {_pays(r)}  {r['grade']}"
    for m in found.get("mix", []):
        told = "  ".join(f"{k} {seconds(m[k])}" for k in ("ragged", "bucketed", "padded"))
        share = m.get("beyond_crossover")
        yield f"{m['policy']:{wide}}  mix: {told}" + (
            f"  beyond its crossover {share['requests']:.0%} of requests" if share else ""
        )
    for m in found.get("mix", []):
        if m.get("tpot_us_p50"):
            at = "≥ " if m["floor"] else ""
            p50, p99 = (at + seconds(m[k]) for k in ("tpot_us_p50", "tpot_us_p99"))
            most = f"{m['requests_p50']} requests, in 1 batch of 100 at most {m['requests_p1']}"
            yield f"{m['policy']:{wide}}  memory filled from the mix: {most}; a token {p50}, p99 {p99}"
    if "prefix" in found:
        once, each = (seconds(found["prefix"][k]) for k in ("read_once", "read_by_each"))
        yield (
            f"full(), {found['prefix']['requests']} requests of {found['prefix']['context']} tokens over a shared prefix: {once} when it is "
            f"read once, {each} when by each"
        )
    if "recovery" in found:
        r = found["recovery"]
        fetch = "no link is known" if r["fetch_us"] is None else f"{seconds(r['fetch_us'])}, {r['fetch_grade']}"
        floor = "say --weights" if r["prefill_floor_us"] is None else f"at least {seconds(r['prefill_floor_us'])}"
        yield f"{r['tokens']} evicted tokens back: from the host {fetch}; prefilled again {floor}"
    yield from assumed(found["rows"])


def _floor(row: dict[str, Any], us: str, high: str) -> str:
    return ("≥ " if row[high] is None else "") + seconds(row[us])


def _all(row: dict[str, Any]) -> str:
    if not row.get("requests"):
        return "" if "requests" not in row else "not one fits"
    return f"{row['requests']:6} {seconds(row['step_us_of_all']):>9} {row['tokens_per_s']:10.0f}"


def _pays(row: dict[str, Any]) -> str:
    if "crossover_tokens" not in row:
        return f"{'':11}{'':10}"
    pays, even = row["crossover_tokens"], row["break_even_share"]
    return f"{f'{pays} tokens' if pays else 'never':>13}  {'' if even is None else f'{even:.0%}':>5}"
