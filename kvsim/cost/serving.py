"""A policy in a serving engine: how many requests fit, what a step of them takes, from which length on it pays.

Two questions that are often mixed stand apart: the latency of a given batch, and the throughput of as many requests as the same memory holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvsim.cost.heads import Geometry
from kvsim.cost.launches import Kernels, Launch, table
from kvsim.cost.plain import Fixed, resident_bytes, row_bytes, step
from kvsim.cost.price import parts, steps
from kvsim.cost.prices import Prices
from kvsim.errors import WrongUse
from kvsim.units import share

LONGEST = 1 << 24  # tokens; no length is looked for beyond
GRID = 32  # lengths at which a crossover is looked for before it is closed in on


@dataclass(frozen=True)
class Memory:
    """What of a device the cache may take. share: of `total` bytes that an engine may use at all; the rest is its reserve."""

    total: float
    share: float = 0.9
    weights: int = 0
    workspace: int = 0

    @property
    def usable(self) -> int:
        return max(0, int(self.total * self.share) - self.weights - self.workspace)


@dataclass(frozen=True)
class Engine:
    """Prices of a device, the heads of a model on it, and how its kernels do what a policy asks."""

    prices: Prices
    heads: Geometry
    how: Kernels = field(default_factory=Kernels)

    def times(self, work: Sequence[Sequence[Launch]]) -> list[dict[str, Any]]:
        """Of each step: step_us, low_us, high_us, grade, binding, parts {class: µs}."""
        found = parts(self.prices, table(work, self.heads, self.prices.graph))
        told = [r | {"parts": dict[str, float]()} for r in steps(found).iter_rows(named=True)]
        place = {r["step"]: r["parts"] for r in told}
        for at, cls, us in found.select("step", "class", "us").iter_rows():
            place[at][cls] = place[at].get(cls, 0.0) + (us or 0.0)
        return told

    def step_us(self, cases: Sequence[tuple[Fixed, Sequence[int]]]) -> list[float]:
        return [r["step_us"] for r in self.times([step(policy, self.heads, lengths, self.how) for policy, lengths in cases])]


# ------------------------------------------------------------------------------------------------ memory
def resident(policy: Fixed, heads: Geometry, lengths: Sequence[int], prefix: int = 0) -> int:
    """Bytes of a batch whose requests begin with the same `prefix` tokens. Whole pages of it are there once while nothing is evicted;
    a policy that evicts leaves every request with rows of its own."""
    alone = resident_bytes(policy, heads, lengths)
    shared = min(prefix, min(lengths) - 1) // policy.page * policy.page  # a request that decodes has a newest token of its own
    if policy.hold is not None or not shared:
        return alone
    return alone - (len(lengths) - 1) * resident_bytes(policy, heads, [shared])


def most_requests(policy: Fixed, heads: Geometry, length: int, memory: Memory, prefix: int = 0) -> int:
    """The largest batch of requests of `length` tokens that fits."""
    one = resident(policy, heads, [length], prefix)
    next_ = resident(policy, heads, [length] * 2, prefix) - one
    return 0 if one > memory.usable else 1 + (memory.usable - one) // next_


def longest(policy: Fixed, heads: Geometry, batch: int, memory: Memory, prefix: int = 0) -> int:
    """Tokens of the longest requests of which `batch` fit; LONGEST where the policy's memory does not grow."""
    return _last(lambda n: resident(policy, heads, [n] * batch, prefix) <= memory.usable, LONGEST)


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The largest n <= most with fits(n), which holds up to some n and not beyond; 0: not even 1."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ------------------------------------------------------------------------------------------------ when it pays
def crossover(engine: Engine, policy: Fixed, batch: int, most: int = 1 << 20) -> int | None:
    """The shortest length from which on a step is faster than with full attention, at every longer one looked at; None: none up to
    `most`."""
    grid = sorted({round(policy.page * 2 * (most / (2 * policy.page)) ** (i / (GRID - 1))) for i in range(GRID)})
    ours = engine.step_us([(policy, [n] * batch) for n in grid])
    full = engine.step_us([(Fixed(), [n] * batch) for n in grid])
    slower = [i for i, (a, b) in enumerate(zip(ours, full, strict=True)) if a >= b]
    if not slower:
        return grid[0]
    if slower[-1] == len(grid) - 1:
        return None
    low, high = grid[slower[-1]], grid[slower[-1] + 1]
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        a, b = engine.step_us([(policy, [middle] * batch), (Fixed(), [middle] * batch)])
        low, high = (low, middle) if a < b else (middle, high)
    return high


def break_even(engine: Engine, policy: Fixed, context: int, batch: int) -> float | None:
    """The largest read budget, a share of what is visible, at which the policy is still faster than full attention; None: not at any, or
    it ranks no pages."""
    if policy.read is None:
        return None
    shares = [i / 100 for i in range(1, 101)]
    ours = engine.step_us([(replace(policy, read=share(x)), [context] * batch) for x in shares])
    full = engine.step_us([(Fixed(), [context] * batch)])[0]
    return max((x for x, us in zip(shares, ours, strict=True) if us < full), default=None)


def view(engine: Engine, policy: Fixed, context: int, batch: int) -> dict[str, Any]:
    """One policy at one shape: the part of full attention's step that is about the cache, the most that any reading policy can gain by
    it (Amdahl), and what ranking alone costs, all pages read after all."""
    full = engine.times([step(Fixed(), engine.heads, [context] * batch, engine.how)])[0]
    about, whole = full["step_us"] - full["parts"].get("rest", 0.0), full["step_us"]
    out = {"attention_share": about / whole, "amdahl": whole / max(whole - about, 1e-9) if whole > about else None}
    if policy.read is not None:
        every = engine.step_us([(replace(policy, read=share(1.0), union=1.0), [context] * batch)])[0]
        out |= {"reading_all_over_full": every / whole}
    return out | {
        "break_even_share": break_even(engine, policy, context, batch),
        "crossover_tokens": crossover(engine, policy, batch),
    }


# ------------------------------------------------------------------------------------------------ batches as they come
def batches(engine: Engine, policy: Fixed, lengths: Sequence[int], bucket: int = 1024) -> dict[str, float]:
    """A step of requests of unlike lengths, µs: ragged, as they are; bucketed, each rounded up to a multiple of `bucket`; padded to the
    longest."""
    rounded = [-(-n // bucket) * bucket for n in lengths]
    found = engine.step_us([(policy, lengths), (policy, rounded), (policy, [max(lengths)] * len(lengths))])
    return dict(zip(("ragged", "bucketed", "padded"), found, strict=True))


def filled(
    engine: Engine, policy: Fixed, lengths: Sequence[int], memory: Memory, draws: int = 500, seed: int = 0
) -> dict[str, Any]:
    """Batches of requests drawn from the mix, one after the other, until the next does not fit -> requests_p50, requests_p1 (percentiles over
    batches); tpot_us_p50, tpot_us_p99 (over requests, a token takes its batch's step; null where none fits); floor: a part of a step is
    known from below only."""
    size = {n: resident(policy, engine.heads, [n]) for n in set(lengths)}
    rng, most = np.random.default_rng(seed), memory.usable // min(size.values())
    drawn = [rng.choice(lengths, size=most + 1).tolist() for _ in range(draws)]
    kept = [d[: int(np.searchsorted(np.cumsum([size[n] for n in d]), memory.usable, side="right"))] for d in drawn]
    many = np.array([len(d) for d in kept])
    times = engine.times([step(policy, engine.heads, d, engine.how) for d in kept if d])
    tpot = np.repeat([t["step_us"] for t in times], many[many > 0])
    found: dict[str, Any] = {f"requests_p{p}": int(np.percentile(many, p, method="lower")) for p in (50, 1)}
    found |= {f"tpot_us_p{p}": float(np.percentile(tpot, p)) if len(tpot) else None for p in (50, 99)}
    return found | {"floor": any(t["high_us"] is None for t in times)}


def beyond(lengths: Sequence[int], tokens: int | None) -> dict[str, float]:
    """Of a mix of lengths, the share of requests, and of their tokens, that reach a crossover."""
    long = [n for n in lengths if tokens is not None and n >= tokens]
    return {"requests": len(long) / len(lengths), "tokens": sum(long) / sum(lengths)}


def sharing(engine: Engine, policy: Fixed, length: int, batch: int, prefix: int) -> dict[str, float]:
    """A step, µs, of requests with the same first `prefix` tokens: those rows read once for all, and by each. A kernel is somewhere
    between. Raises WrongUse for a policy that reads a part: which pages its requests share only a trace can tell."""
    if policy.read is not None or policy.hold is not None:
        raise WrongUse(
            f"{policy.name}: how much of a shared prefix it reads once, only a trace can tell (distinct pages of a batch)"
        )
    each = step(policy, engine.heads, [length] * batch, engine.how)
    saved = (batch - 1) * min(prefix, length - 1) * row_bytes(engine.heads) * engine.heads.kv_heads * engine.heads.layers
    once = [replace(x, bytes=(x.bytes or 0) - saved) if x.cls == "dense_attn" else x for x in each]
    low, high = (r["step_us"] for r in engine.times([once, each]))
    return {"read_once": low, "read_by_each": high}


def recovery(engine: Engine, tokens: int, weights: int) -> dict[str, Any]:
    """What an evicted span costs when it is wanted again: its bytes from the host, µs with grade (null: no link is known), and prefilled
    again, µs: at least the weights over the peak, for any number of tokens, which is a floor and no more."""
    bytes_ = tokens * row_bytes(engine.heads) * engine.heads.kv_heads * engine.heads.layers
    fetch = engine.times([[Launch("host_fetch", bytes_, engine.heads.layers, engine.heads.layers, 1)]])[0]
    us = fetch["parts"].get("host_fetch") or None
    gpu = engine.prices.model.gpu
    return {
        "tokens": tokens,
        "bytes": bytes_,
        "fetch_us": us,
        "fetch_grade": fetch["grade"],
        "prefill_floor_us": weights / (gpu.bandwidth_gbps * 1e3) if gpu and weights else None,
    }
