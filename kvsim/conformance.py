"""check_policy: the laws that every policy keeps, tried on small made-up lanes. For a policy's own test:

assert kvsim.check_policy(my_policy(hold=kvsim.tokens(24))) == []"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from kvsim.engine.run import Job, run_layer
from kvsim.engine.source import Source
from kvsim.errors import KvsimError
from kvsim.geometry import FUTURE, Layer, Request
from kvsim.policies.language import complete, parse
from kvsim.policies.protocol import Chain, Keep, Part

Rows = dict[str, np.ndarray]
COUNTED = ("held_tokens", "quant_tokens", "evicted_tokens", "read_tokens", "resident_bytes", "read_bytes", "meta_resident_bytes")
WEIGHED = ("mass_recall", "mass_evicted", "rel_l2", "read_tokens")


def check_policy(policy: str | Part | Chain) -> list[str]:
    """What is wrong with a policy, one line each; nothing when it keeps the laws.

    Tried: it runs on prompts of 1 and of many tokens and on ties; permuted heads permute the result (unless it draws by a `seed`);
    a shorter trace gives the beginning of the result; a request leaves nothing behind for the next; its state can be copied;
    it is frozen, writes into nothing that it is shown, and returns rankings only."""
    chain = complete(parse(policy) if isinstance(policy, str) else policy)
    found: list[str] = []
    for name, law in (
        ("frozen", _frozen),
        ("small", _small),
        ("ties", _ties),
        ("state", _state),
        ("copies", _copies),
        ("prefix", _prefix),
        ("heads", _heads),
    ):
        try:
            said = law(chain)
        except KvsimError as e:
            said = str(e)
        except Exception as e:  # whatever a policy does wrong is a finding, with its own words
            said = f"{type(e).__name__}: {e}"
        if said and said not in [f.partition(": ")[2] for f in found]:
            found.append(f"{name}: {said}")
    return found


# ------------------------------------------------------------------------------------------------ lanes
def lane(
    prompt: int = 37, steps: int = 20, kv_heads: int = 3, group: int = 2, dim: int = 8, seed: int = 0, whole: bool = False
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
    return Source(
        layer, request, k, v, at, prompt + at, q, window, k_pre, mass, np.abs(draw(kv_heads * group, total)).astype(np.float32)
    )


def _rows(chain: Chain, source: Source) -> tuple[Rows, Rows]:
    """ledger [Hkv, N] and heads [Hq, N] of a run."""
    tables = run_layer(source, [Job(chain)])[0]
    steps = len(source.steps)
    ledger = {c: np.stack([np.broadcast_to(p.get(c, 0), steps) for p in tables["ledger"]]) for c in COUNTED}
    group = source.layer.group
    heads = {
        c: np.concatenate([np.broadcast_to(p[c], steps * group).reshape(steps, group).T for p in tables["heads"]])
        for c in WEIGHED
    }
    return ledger, heads


def _differs(a: tuple[Rows, Rows], b: tuple[Rows, Rows], exactly: bool = True) -> str:
    for x, y in zip(a, b, strict=True):
        for name in x:
            close = np.array_equal(x[name], y[name]) if exactly or name in COUNTED else np.allclose(x[name], y[name], atol=1e-6)
            if not close:
                return name
    return ""


# ------------------------------------------------------------------------------------------------ laws
def _frozen(chain: Chain) -> str:
    for part in chain.parts:
        if not dataclasses.is_dataclass(part) or not type(part).__dataclass_params__.frozen:
            return f"{type(part).__name__} is not a frozen dataclass: parameters are fixed, what changes belongs in State"
    return ""


def _small(chain: Chain) -> str:
    _rows(chain, lane(prompt=1, steps=3))
    return ""


def _ties(chain: Chain) -> str:
    changed = _differs(_rows(chain, lane(whole=True)), _rows(chain, lane(whole=True)))
    return f"two runs over equal input differ in {changed}" if changed else ""


def _state(chain: Chain) -> str:
    first = _rows(chain, lane())
    _rows(chain, lane(prompt=29, seed=1))
    changed = _differs(first, _rows(chain, lane()))
    return f"a request changes the next one ({changed} differs): what a policy remembers belongs in State" if changed else ""


def _copies(chain: Chain) -> str:
    keep = chain.part("keep")
    twin = Chain(tuple(_Copying(keep=keep) if p is keep else p for p in chain.parts))
    changed = _differs(_rows(chain, lane()), _rows(twin, lane()))
    return f"a copied state does not go on as the original ({changed} differs)" if changed else ""


def _prefix(chain: Chain) -> str:
    if any(FUTURE in p.needs for p in chain.parts) or 'of="total"' in str(chain) or "of='total'" in repr(chain):
        return ""
    whole, half = _rows(chain, lane()), _rows(chain, _shortened(lane(), 9))
    changed = _differs(tuple({c: x[:, :9] for c, x in part.items()} for part in whole), half)  # type: ignore[arg-type]
    return f"it looks ahead: a shorter trace gives other rows ({changed} differs)" if changed else ""


def _heads(chain: Chain) -> str:
    if any(hasattr(p, "seed") for p in chain.parts):
        return ""
    source = lane()
    kv, group = np.array([2, 0, 1]), source.layer.group
    q = (kv[:, None] * group + np.arange(group)[::-1]).ravel()
    turned = dataclasses.replace(
        source, k=source.k[kv], v=source.v[kv], k_pre=source.k_pre[kv], q=source.q[:, q], window_q=source.window_q[:, q],  # type: ignore[index]
        mass=source.mass[q], wo_norm=source.wo_norm[q], _one={},  # type: ignore[index]
    )  # fmt: skip
    ledger, heads = _rows(chain, source)
    expected = {c: x[kv] for c, x in ledger.items()}, {c: x[q] for c, x in heads.items()}
    changed = _differs(expected, _rows(chain, turned), exactly=False)
    return f"it depends on the order of the heads ({changed} differs)" if changed else ""


def _shortened(source: Source, steps: int) -> Source:
    total = source.request.prompt + steps
    request = dataclasses.replace(source.request, total=total, roles=source.request.roles[:total])
    cut = {name: getattr(source, name)[:, :total] for name in ("k", "v", "k_pre", "wo_norm")}
    return dataclasses.replace(
        source, request=request, steps=source.steps[:steps], t=source.t[:steps], q=source.q[:steps], _one={}, **cut
    )


@dataclasses.dataclass(frozen=True)
class _Copying(Keep):
    """A keep whose state goes through a deep copy before every step, as fork and rollback do; the copy left behind steps too."""

    keep: Any

    @property
    def hold(self) -> Any:  # type: ignore[override]
        return self.keep.hold

    @property
    def codecs(self) -> Any:  # type: ignore[override]
        return self.keep.codecs

    @property
    def needs(self) -> Any:
        return self.keep.needs

    def protected(self, limit: int) -> int:
        return int(self.keep.protected(limit))

    def start(self, prefix: Any, seen: Any) -> Any:
        return self.keep.start(prefix, seen)

    def step(self, state: Any, seen: Any) -> Any:
        self.keep.step(copy.deepcopy(state), seen)
        return self.keep.step(state, seen)
