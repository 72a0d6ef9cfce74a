"""The baselines that stand beside a read policy: the same budget, page size and forced pages, another ranking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvsim.policies.keep.full import full
from kvsim.policies.language import Policy, complete
from kvsim.policies.protocol import Chain
from kvsim.policies.read.everything import everything
from kvsim.policies.read.oracle import oracle
from kvsim.policies.read.random_read import random_read
from kvsim.policies.read.recency import recency
from kvsim.units import READ_UNITS


@dataclass(frozen=True)
class Entry:
    """A policy of a run. role: "asked" or "baseline"; beside: the id of the policy that a baseline stands beside."""

    policy: Policy
    role: str = "asked"
    beside: str | None = None


def with_baselines(policies: Iterable[Policy]) -> list[Entry]:
    """The policies asked for, then what each is measured against; nothing twice."""
    asked = [Entry(p) for p in policies]
    found = {e.policy.id: e for e in asked}
    for entry in [*asked, *_added(asked)]:
        found.setdefault(entry.policy.id, entry)
    return list(found.values())


def _added(asked: Iterable[Entry]) -> Iterator[Entry]:
    yield Entry(Policy(full() >> everything()), "baseline")
    for entry in asked:
        for chain in chains_of(entry.policy):
            for baseline in beside(chain):
                yield Entry(Policy(baseline), "baseline", entry.policy.id)


def chains_of(policy: Policy) -> list[Chain]:
    """Every chain of a policy, for whichever layers and heads, once."""
    return list(dict.fromkeys((policy.default, *(c for _, c in policy.layers), *(c for _, _, c in policy.heads))))


def beside(chain: Chain) -> list[Chain]:
    """oracle, recency and random_read over everything, as the chain reads; none when its read has no fixed budget."""
    read = chain.part("read")
    if not isinstance(read.read, READ_UNITS):
        return []
    same = {name: getattr(read, name) for name in ("read", "page", "sinks", "recent", "tail")}
    return [complete(baseline(**same)) for baseline in (oracle, recency, random_read)]
