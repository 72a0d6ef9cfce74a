"""The baselines that stand beside a read policy: the same budget, page size and forced pages, another ranking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvsim.policies.keep.full import full
from kvsim.policies.language import Policy, complete
from kvsim.policies.protocol import Chain
from kvsim.policies.read.everything import everything
from kvsim.policies.read.oracle import oracle
from kvsim.policies.read.random_read import random_read
from kvsim.policies.read.recency import recency
from kvsim.replay.asked import Entry
from kvsim.units import READ_UNITS


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
        policy = entry.policy
        for chain in dict.fromkeys((policy.default, *(c for _, c in policy.layers), *(c for _, _, c in policy.heads))):
            for baseline in beside(chain):
                yield Entry(Policy(baseline), "baseline", policy.id)


def beside(chain: Chain) -> list[Chain]:
    """oracle, recency and random_read over everything, as the chain reads; none when its read has no fixed budget."""
    read = chain.part("read")
    if not isinstance(read.read, READ_UNITS):
        return []
    same = {name: getattr(read, name) for name in ("read", "page", "sinks", "recent", "tail")}
    return [complete(baseline(**same)) for baseline in (oracle, recency, random_read)]
