"""What a replay was asked for, resolved against the trace: whatever is unknown or cannot be supplied is refused before any work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvsim import __version__
from kvsim.engine.run import Job
from kvsim.errors import WrongUse
from kvsim.geometry import Layer, Request
from kvsim.policies.language import Policy, parse_policy
from kvsim.policies.protocol import Chain, Part, Read
from kvsim.policies.rules import Rule
from kvsim.replay.baselines import Entry, chains_of, with_baselines
from kvsim.tables import RARE, RUN_SCHEMA
from kvsim.trace.open import Supply, Trace

Task = tuple[int, int]  # request, layer
AnyPolicy = str | Part | Chain | Policy
ALLOCATORS = ("head", "layer")


@dataclass(frozen=True, eq=False)
class Asked:
    """All that decides what stands in the tables of a run. A layer that reuses the rows of another one (kv_source_layer) is
    replayed and billed as if they were its own."""

    entries: tuple[Entry, ...]
    requests: tuple[Request, ...]
    layers: tuple[Layer, ...]  # bytes as billed
    steps: tuple[int, ...] | None  # the decode steps that are written; None: all captured
    supplies: Mapping[Task, Supply]
    kv_dtype: str
    allocator: str = "head"
    plans: bool = False
    explain: bool = False
    baselines: bool = False

    @property
    def ids(self) -> list[str]:
        return [e.policy.id for e in self.entries]

    @property
    def tasks(self) -> list[Task]:
        """In the order of the tables."""
        return [(r.id, layer.id) for r in self.requests for layer in self.layers]

    @property
    def options(self) -> dict[str, Any]:
        return {
            "requests": [r.id for r in self.requests],
            "layers": [layer.id for layer in self.layers],
            "steps": None if self.steps is None else list(self.steps),
            "plans": self.plans,
            "explain": self.explain,
            "baselines": self.baselines,
            "allocator": self.allocator,
        }


def resolve(
    trace: Trace,
    policies: AnyPolicy | Iterable[AnyPolicy],
    *,
    layers: Iterable[int] | None = None,
    requests: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    plans: bool = False,
    explain: bool = False,
    baselines: bool = False,
    kv_dtype: str | None = None,
    allocator: str = "head",
) -> Asked:
    """Names, ids and options as they were given -> what they are. Raises WrongUse for one that is not there."""
    several = [policies] if isinstance(policies, AnyPolicy) else list(policies)
    resolved = list({p.id: p for p in map(parse_policy, several)}.values())
    if not resolved:
        raise WrongUse("no policy to replay; give at least one, for example quest(read=tokens(512))")
    if allocator not in ALLOCATORS:
        raise WrongUse(f"allocator {allocator!r}: expected {' or '.join(map(repr, ALLOCATORS))}, whose rows keep a physical page")
    dtype, captured = trace.kv_dtype(kv_dtype), trace.captured_layers
    mine = chosen("layers", layers, [x.id for x in captured], trace)
    whose = chosen("requests", requests, [r.id for r in trace.requests], trace)
    only = [r for r in trace.requests if r.id in whose]
    supplies = {(r.id, x.id): trace.supplies(r, x) for r in only for x in captured if x.id in mine}
    there = sorted({int(step) for supply in supplies.values() for step in supply.steps})
    return Asked(
        entries=tuple(with_baselines(resolved) if baselines else map(Entry, resolved)),
        requests=tuple(only),
        layers=tuple(x.billed(dtype, trace.dtype) for x in captured if x.id in mine),
        steps=None if steps is None else tuple(chosen("steps", steps, there, trace)),
        supplies=supplies,
        kv_dtype=dtype,
        allocator=allocator,
        plans=plans,
        explain=explain,
        baselines=baselines,
    )


def jobs_of(policy: Policy, layer: Layer) -> list[Job]:
    """The chains of one policy in one layer, each with its kv heads. Raises WrongUse for a head that the layer does not have."""
    *named, (rest, _) = policy.at(layer.id, layer.kv_heads)
    jobs = [Job(chain, heads) for chain, heads in named]
    taken = {h for _, heads in named for h in heads or ()}
    left = tuple(h for h in range(layer.kv_heads) if h not in taken)
    return jobs + ([Job(rest, left if taken else None)] if left else [])


def chosen(what: str, asked: Iterable[int] | None, there: Sequence[int], trace: Trace) -> list[int]:
    """The ids asked for, ascending, or all of `there`. Raises WrongUse for one that is not there."""
    if asked is None:
        return list(there)
    ids = sorted(set(asked))
    if missing := [i for i in ids if i not in set(there)]:
        raise WrongUse(f"{what} {spans(missing)}: trace {trace.id} captured the {what} {spans(there)}; ask for some of these")
    if not ids:
        raise WrongUse(
            f"no {what} asked for; trace {trace.id} captured the {what} {spans(there)}, all of them are replayed by default"
        )
    return ids


def spans(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def about(trace: Trace, asked: Asked, created: str) -> dict[str, Any]:
    """run.json: all that a reader must know to trust the tables; nothing of the machine or the user."""
    source = {k: v for k, v in (trace.manifest.get("source") or {}).items() if k != "config"}
    return {
        "schema": RUN_SCHEMA,
        "kvsim": __version__,
        "created": created,
        "open_loop": True,
        "trace": {
            "id": trace.id,
            "sha256": trace.sha256,
            "dtype": trace.dtype,
            "partial": trace.partial,
            "source": source,
            "capture": trace.manifest.get("capture") or {},
        },
        "kv_dtype": asked.kv_dtype,
        "policies": [_policy(e) for e in asked.entries],
        "layers": [_layer(layer.billed(asked.kv_dtype, trace.dtype)) for layer in trace.layers],
        "requests": [_request(r, asked) for r in asked.requests],
        "options": asked.options,
    }


def modules_of(policy: Policy) -> set[str]:
    """Where the parts of a policy, and their indexes, are defined."""
    parts = [part for chain in chains_of(policy) for part in chain.parts]
    return {type(x).__module__ for part in parts for x in (part, getattr(part, "index", None))}


def _policy(entry: Entry) -> dict[str, Any]:
    policy = entry.policy
    names = " >> ".join(type(part).__name__ for part in policy.default.parts)
    return {
        "id": policy.id,
        "form": policy.form,
        "name": policy.name or names,
        "version": _version(policy),
        "role": entry.role,
        "beside": entry.beside,
        "ragged": any(ragged(chain.part("read")) for chain in chains_of(policy)),
    }


def ragged(read: Read) -> bool:
    """Whether how many pages it reads depends on the query, so that shapes vary from step to step: under a stopping rule, and where all
    heads of a group attend to the union of their own sets. What only grows with the context is not ragged."""
    return isinstance(read.read, Rule) or read.heads == "share"


def _version(policy: Policy) -> str:
    """kvsim's version, or of parts from elsewhere the sha256 of their files: the same name may not be the same policy."""
    modules = [m for m in modules_of(policy) if m.split(".")[0] not in ("kvsim", "builtins")]
    files = {getattr(sys.modules[m], "__file__", None) for m in modules}
    hashes = sorted(sha256(Path(f).read_bytes()).hexdigest()[:12] for f in files if f and Path(f).is_file())
    return "+".join([f"kvsim {__version__}", *hashes])


def _layer(layer: Layer) -> dict[str, Any]:
    names = (
        "kind",
        "q_heads",
        "kv_heads",
        "key_dim",
        "value_dim",
        "row_bytes",
        "window",
        "softcap",
        "kv_source_layer",
        "captured",
    )
    rare = {name: x for name in RARE if (x := getattr(layer, name)) is not None}
    return (
        {"layer": layer.id} | {name: getattr(layer, name) for name in names} | {"learned_sinks": layer.sinks is not None} | rare
    )


def _request(r: Request, asked: Asked) -> dict[str, Any]:
    steps = {int(step) for x in asked.layers for step in asked.supplies[r.id, x.id].steps}
    return {
        "request": r.id,
        "prompt_tokens": r.prompt,
        "total_tokens": r.total,
        "mode": r.mode,
        "spans": [{"label": s.label, "start": s.start, "stop": s.stop, "kind": s.kind} for s in r.spans],
        "steps": len(steps if asked.steps is None else steps & set(asked.steps)),
    }
