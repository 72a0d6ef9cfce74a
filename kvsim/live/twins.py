"""Open loop beside closed: the same policies, replayed by the same engine on what row 0, full attention, was fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from threadpoolctl import threadpool_limits

from kvsim import tables
from kvsim.engine.run import Job, Tables, run_layer
from kvsim.engine.source import Source
from kvsim.live.needs import chains, shared_limits
from kvsim.policies.language import Policy


def twins(
    sources: Mapping[int, Source], policies: Sequence[Policy], plans: bool = False, heads_only: bool = False
) -> list[dict[str, pa.Table]]:
    """Of every policy, the tables that a replay of these layers would write, heads with all query heads and steps; heads_only: no others."""
    with threadpool_limits(1, user_api="blas"):  # as in a replay: threads would sum in another order
        return _twins(sources, policies, partial(run_layer, plans=plans, heads_only=heads_only))


def _twins(
    sources: Mapping[int, Source], policies: Sequence[Policy], run: Callable[..., list[Tables]]
) -> list[dict[str, pa.Table]]:
    limits = [shared_limits(policy, dict(sources)) for policy in policies]
    found: list[dict[str, list[pa.Table]]] = [{} for _ in policies]
    for i, source in sources.items():
        jobs = [
            [Job(x.chain, x.heads, limits[n].get(i)) for x in chains(policy, source.layer)] for n, policy in enumerate(policies)
        ]
        results = iter(run(source, [job for mine in jobs for job in mine]))
        for policy, mine, into in zip(policies, jobs, found, strict=True):
            for _ in mine:
                _add(into, next(results), {"request": source.request.id, "layer": i, "policy": policy.id})
    return [{name: pa.concat_tables(parts) for name, parts in x.items() if parts} for x in found]


def _add(into: dict[str, list[pa.Table]], found: Tables, at: dict[str, Any]) -> None:
    for name, pieces in found.items():
        into.setdefault(name, []).extend(made for x in pieces if (made := tables.table(name, x | at)).num_rows)
