"""check_policy: the laws that every policy keeps, tried on small made-up lanes. For a policy's own test:

assert kvsim.check_policy(my_policy(hold=kvsim.tokens(24))) == []"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from kvsim.engine.run import Columns, Job, run_layer
from kvsim.engine.source import Source
from kvsim.errors import KvsimError, WrongUse
from kvsim.geometry import FUTURE, Indexer, Layer, QueryStats, Request
from kvsim.policies import allocate
from kvsim.policies.blame import told
from kvsim.policies.language import complete, parse
from kvsim.policies.protocol import Chain, Part
from kvsim.units import READ_UNITS, pages

Rows = dict[str, np.ndarray]
COUNTED = ("held_tokens", "quant_tokens", "evicted_tokens", "read_tokens", "resident_bytes", "read_bytes", "meta_resident_bytes")
WEIGHED = ("mass_recall", "mass_evicted", "rel_l2", "read_tokens")
STEPS, SEEDS = 20, 3
METHODS = ("start", "step", "place", "score")  # what the engine calls of a policy


def check_policy(policy: str | Part | Chain) -> list[str]:
    """What is wrong with a policy, one line each; nothing when it keeps the laws.

    Tried: it is frozen; it runs on prompts of 1 and of many tokens and on ties, twice alike; it writes into nothing that it is shown;
    another request beside it changes nothing, and its state goes on from a copy; a shorter trace, or another future, gives the same
    beginning; a ranking is the same for every budget; permuted heads permute the result (unless it draws by a `seed`)."""
    chain = complete(parse(policy) if isinstance(policy, str) else policy)
    found: list[str] = []
    for name, law in LAWS.items():
        try:
            said = law(chain)
        except KvsimError as e:
            said = str(e)
        except Exception as e:  # whatever a policy does wrong is a finding, with its own words
            said = told(e)
        if said and said not in [f.partition(": ")[2] for f in found]:
            found.append(f"{name}: {said}")
    return found


# ------------------------------------------------------------------------------------------------ lanes
def lane(
    prompt: int = 37, steps: int = STEPS, kv_heads: int = 3, group: int = 2, dim: int = 8, seed: int = 0, whole: bool = False
) -> Source:
    """A made-up (request, layer) that can supply every need; whole=True: small integers, so that scores tie."""
    rng, total = np.random.default_rng(seed), prompt + steps
    draw: Callable[..., Any] = (lambda *s: rng.integers(-2, 3, s)) if whole else (lambda *s: rng.standard_normal(s))
    k, v, k_pre = (draw(kv_heads, total, dim).astype(np.float32) for _ in range(3))
    rows = min(prompt, 32)
    q, window = (draw(n, kv_heads * group, dim).astype(np.float32) for n in (steps, rows))
    layer = Layer(0, "full", kv_heads * group, kv_heads, dim, dim, dim**-0.5, 4 * dim, "bfloat16", among=(0,))
    request = Request(0, prompt, total, "synthetic", np.zeros(total, np.int8))
    at = np.arange(steps)
    mass = np.abs(draw(kv_heads * group, prompt)).astype(np.float32)
    norm = np.abs(draw(kv_heads * group, total)).astype(np.float32)
    spread = draw(kv_heads * group, dim, dim).astype(np.float32)
    stats = QueryStats(draw(kv_heads * group, dim).astype(np.float32), spread @ spread.swapaxes(1, 2) / dim, 0, prompt)
    indexer, before = _indexer(draw, steps, total), draw(*q.shape).astype(np.float32)
    return Source(layer, request, k, v, at, prompt + at, q, window, k_pre, mass, norm, stats, indexer, before)


def _indexer(draw: Callable[..., Any], steps: int, total: int) -> Indexer:
    q, w, k = (draw(*shape).astype(np.float32) for shape in ((steps, 2, 4), (steps, 2), (total, 4)))
    return Indexer(q, w, k, "relu_weighted")


def _rows(chain: Chain, source: Source, *beside: Chain) -> tuple[Rows, Rows]:
    """What a run says of every kv head, [Hkv, N, ...], and of every query head, [Hq, N, ...]: counts, masses and sets."""
    tables = run_layer(source, [*map(Job, beside), Job(chain)], plans=True)[-1]
    steps, group = len(source.steps), source.layer.group
    ledger = {c: np.stack([np.broadcast_to(p.get(c, 0), steps) for p in tables["ledger"]]) for c in COUNTED}
    heads = {
        c: np.concatenate([np.broadcast_to(p[c], steps * group).reshape(steps, group).T for p in tables["heads"]])
        for c in WEIGHED
    }
    if tables["tiers"]:
        ledger["tiers"] = np.stack([_placement(part, source) for part in tables["tiers"]])
    if tables["plans"]:
        heads["pages"] = np.concatenate([_plan(part, source) for part in tables["plans"]])
    return ledger, heads


def _placement(part: Columns, source: Source) -> np.ndarray:
    """i8[N, T]: the tier of every position of a kv head after each step."""
    changes = dict(zip(part["step"], part["runs"], strict=True))
    out = np.zeros((len(source.steps), source.request.total), np.int8)
    now, born = np.zeros(source.request.total, np.int8), 0
    for at, (step, t) in enumerate(
        [(-1, source.request.prompt - 1), *zip(source.steps.tolist(), source.t.tolist(), strict=True)], -1
    ):
        now[born : t + 1], born = 2, t + 1
        for run in changes.get(step, []):
            now[run["start"] : run["stop"]] = run["tier"]
        if at >= 0:
            out[at] = now
    return out


def _plan(part: Columns, source: Source) -> np.ndarray:
    """bool[G, N, T]: the pages that the query heads of a kv head read; a set for the whole group has q_head -1."""
    out = np.zeros((source.layer.group, len(source.steps), source.request.total), bool)
    for head, step, ids in zip(part["q_head"], part["step"], part["pages"], strict=True):
        out[slice(None) if head < 0 else head % source.layer.group, step, ids] = True
    return out


def _differs(a: tuple[Rows, Rows], b: tuple[Rows, Rows], steps: int = STEPS, exactly: bool = True) -> str:
    """The first column that differs within the first steps; tokens that only one of the two has are left out."""
    for x, y in zip(a, b, strict=True):
        for name in x:
            p, q = x[name][:, :steps], y[name][:, :steps]
            if p.ndim == 3:
                p, q = (z[..., : min(p.shape[2], q.shape[2])] for z in (p, q))
            if not (np.allclose(p, q, atol=1e-6) if name in WEIGHED and not exactly else np.array_equal(p, q)):
                return name
    return ""


# ------------------------------------------------------------------------------------------------ a policy under observation
def _around(chain: Chain, call: Callable[[Any, str, Any, tuple[Any, ...]], Any]) -> Chain:
    """The chain with call(part, name, method, arguments) in the place of every method that the engine calls."""
    busy: list[str] = []

    def wrapped(name: str) -> Any:
        def around(self: Any, *given: Any) -> Any:
            method = getattr(super(type(self), self), name)
            if busy:  # a policy may call a method of its own
                return method(*given)
            busy.append(name)
            try:
                return call(self, name, method, given)
            finally:
                busy.pop()

        return around

    parts = []
    for part in chain.parts:
        mine = {name: wrapped(name) for name in METHODS if hasattr(part, name)}
        twin = copy.copy(part)
        object.__setattr__(twin, "__class__", type(type(part).__name__, (type(part),), mine))
        parts.append(twin)
    return Chain(tuple(parts))


def _shown(given: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """The arrays that a policy was shown, by name; the state is its own."""
    found: dict[str, Any] = {}
    for x in given:
        if type(x).__name__ in ("Seen", "View"):
            fields = {f"{type(x).__name__.lower()}.{f.name}": getattr(x, f.name) for f in dataclasses.fields(x)}
            found |= fields | {f"view.summary[{name!r}]": y for name, y in getattr(x, "summary", {}).items()}
    return {name: x for name, x in found.items() if isinstance(x, np.ndarray)}


def _watched(part: Any, name: str, method: Any, given: tuple[Any, ...]) -> Any:
    before = {where: x.copy() for where, x in _shown(given).items()}
    result = method(*given)
    for where, x in _shown(given).items():
        if not np.array_equal(x, before[where], equal_nan=x.dtype.kind == "f"):
            raise WrongUse(f"{type(part).__name__}.{name} writes into {where}")
    return result


class _Beside:
    """Before every call the same call is made for another request; a keep's state is stepped once too often and goes on as a copy."""

    def __init__(self) -> None:
        self.other: dict[str, tuple[Any, ...]] = {}

    def record(self, part: Any, name: str, method: Any, given: tuple[Any, ...]) -> Any:
        self.other.setdefault(f"{part.kind}.{name}", copy.copy(given))
        return method(*given)

    def disturb(self, part: Any, name: str, method: Any, given: tuple[Any, ...]) -> Any:
        if name != "step":
            method(*self.other[f"{part.kind}.{name}"])
            return method(*given)
        state, seen = given
        part.start(*self.other[f"{part.kind}.start"])
        method(copy.deepcopy(state), seen)
        twin = copy.deepcopy(state)
        result = method(twin, seen)
        state.slots, state.other = twin.slots, twin.other
        return result


# ------------------------------------------------------------------------------------------------ laws
def _frozen(chain: Chain) -> str:
    for part in chain.parts:
        if not dataclasses.is_dataclass(part) or not type(part).__dataclass_params__.frozen:
            return f"{type(part).__name__} is not a frozen dataclass: parameters are fixed, what changes belongs in State"
    return ""


def _small(chain: Chain) -> str:
    for source in (lane(prompt=1, steps=3), lane(prompt=1, steps=1, kv_heads=1, group=1, dim=1)):
        try:
            allocate.hold_limit(chain.part("keep"), 1, source.request, source.layer)
            if chain.codecs is not None:
                chain.codecs.check(source.layer)
        except WrongUse:
            continue  # a share of one token may be less than what is protected, a calibration is of other heads and keys
        _rows(chain, source)
    return ""


def _ties(chain: Chain) -> str:
    changed = _differs(_rows(chain, lane(whole=True)), _rows(chain, lane(whole=True)))
    return f"two runs over equal input differ in {changed}" if changed else ""


def _writes(chain: Chain) -> str:
    _rows(_around(chain, _watched), lane())
    return ""


def _state(chain: Chain) -> str:
    first = _rows(chain, lane())
    _rows(chain, lane(prompt=29, seed=1))
    changed = _differs(first, _rows(chain, lane()))
    return f"a request changes the next one ({changed} differs): what a policy remembers belongs in State" if changed else ""


def _beside(chain: Chain) -> str:
    beside = _Beside()
    _rows(_around(chain, beside.record), lane(prompt=29, seed=1))
    changed = _differs(_rows(chain, lane()), _rows(_around(chain, beside.disturb), lane()))
    where = "what a policy remembers belongs in State, as plain arrays"
    return f"another request beside it, or a copy of its state, changes a request ({changed} differs): {where}" if changed else ""


def _past(chain: Chain) -> str:
    if any(FUTURE in part.needs for part in chain.parts):
        return ""
    whole = _rows(chain, lane())
    for steps in (1, 4, 9):
        if changed := _differs(whole, _rows(chain, _other_future(lane(), steps)), steps):
            return f"it looks ahead: another future changes the past ({changed} differs)"
    if "total" in repr(chain):  # a share of the request's length knows it
        return ""
    changed = _differs(whole, _rows(chain, _shortened(lane(), 9)), 9)
    return f"it looks ahead: a shorter trace gives other rows ({changed} differs)" if changed else ""


def _budget(chain: Chain) -> str:
    """Policies that differ in their budget alone share one ranking."""
    read = chain.part("read")
    if not isinstance(read.read, READ_UNITS):
        return ""
    mine = complete(read)
    others = [mine.with_part(dataclasses.replace(read, read=pages(n))) for n in (1, 2)]
    changed = _differs(_rows(mine, lane()), _rows(mine, lane(), *others))
    return (
        f"the same ranking under another budget changes it ({changed} differs): a score may not look at read=" if changed else ""
    )


def _heads(chain: Chain) -> str:
    """Ties between heads go to the lower one, so a difference on one made-up prompt proves nothing."""
    if any(hasattr(part, "seed") for part in chain.parts):
        return ""
    changed = ""
    for seed in range(SEEDS):
        if not (changed := _turned(chain, lane(seed=seed))):
            return ""
    return f"it depends on the order of the heads ({changed} differs)"


def _turned(chain: Chain, source: Source) -> str:
    group = source.layer.group
    kv, inner = np.array([2, 0, 1]), np.arange(group)
    if chain.part("read").heads != "split":  # its private pages are dealt head by head
        inner = inner[::-1]
    q = (kv[:, None] * group + inner).ravel()
    assert source.k_pre is not None
    assert source.mass is not None
    assert source.wo_norm is not None
    assert source.q_stats is not None
    assert source.before is not None
    stats = dataclasses.replace(source.q_stats, mean=source.q_stats.mean[q], covariance=source.q_stats.covariance[q])
    turned = dataclasses.replace(
        source, k=source.k[kv], v=source.v[kv], k_pre=source.k_pre[kv], q=source.q[:, q], window_q=source.window_q[:, q],
        mass=source.mass[q], wo_norm=source.wo_norm[q], q_stats=stats, before=source.before[:, q], _one={},
    )  # fmt: skip
    ledger, heads = _rows(chain, source)
    expected = {c: x[kv] for c, x in ledger.items()}, {c: x[q] for c, x in heads.items()}
    return _differs(expected, _rows(chain, turned), exactly=False)


def _shortened(source: Source, steps: int) -> Source:
    total = source.request.prompt + steps
    request = dataclasses.replace(source.request, total=total, roles=source.request.roles[:total])
    cut = {name: getattr(source, name)[:, :total] for name in ("k", "v", "k_pre", "wo_norm")}
    x = source.indexer
    assert x is not None
    assert source.before is not None
    indexer = dataclasses.replace(x, q=x.q[:steps], w=x.w[:steps], k=x.k[:total])
    return dataclasses.replace(
        source,
        request=request,
        steps=source.steps[:steps],
        t=source.t[:steps],
        q=source.q[:steps],
        indexer=indexer,
        before=source.before[:steps],
        _one={},
        **cut,
    )


def _other_future(source: Source, steps: int) -> Source:
    """The same request up to its first steps; what comes after is that of another."""
    other, total = lane(seed=9), source.request.prompt + steps
    arrays = {name: getattr(source, name).copy() for name in ("k", "v", "k_pre", "wo_norm", "q", "before")}
    for name, x in arrays.items():
        after = np.s_[steps:] if name in ("q", "before") else np.s_[:, total:]
        x[after] = getattr(other, name)[after]
    mine, later = source.indexer, other.indexer
    assert mine is not None
    assert later is not None
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(mine, name)[:n], getattr(later, name)[n:]])
        for name, n in (("q", steps), ("w", steps), ("k", total))
    }
    return dataclasses.replace(source, indexer=dataclasses.replace(mine, **joined), _one={}, **arrays)


LAWS: dict[str, Callable[[Chain], str]] = {
    "frozen": _frozen,
    "small": _small,
    "ties": _ties,
    "writes": _writes,
    "state": _state,
    "beside": _beside,
    "past": _past,
    "budget": _budget,
    "heads": _heads,
}
