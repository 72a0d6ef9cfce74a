"""The second pass of a replay with plans: the reuse table, which needs the plans of several layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from threadpoolctl import threadpool_limits

from kvsim import tables
from kvsim.engine.neighbour import DISTANCES, OWN, Plan, reuse
from kvsim.engine.source import Source
from kvsim.geometry import Layer
from kvsim.policies.keep.full import full
from kvsim.policies.language import Policy
from kvsim.replay.asked import Asked, Task, jobs_of
from kvsim.replay.lanes import source_of
from kvsim.replay.parts import add_table, has_table, read_part
from kvsim.trace.open import Trace


@dataclass(frozen=True, eq=False)
class Reuse:
    """What every worker is given once; its tasks are those of the replay, whose parts are all written."""

    trace: Trace
    asked: Asked
    parts: Path

    def left(self) -> list[Task]:
        """The tasks that have a layer below them to be compared with, and were not done before an interrupt."""
        layers = {x.id for x in self.asked.layers}
        beside = [t for t in self.asked.tasks if any(t[1] - n in layers for n in DISTANCES)] if self.asked.plans else []
        return [t for t in beside if not has_table(self.parts, t, "reuse")]

    def do(self, task: Task) -> None:
        """Adds the reuse table of one (request, layer) to its part."""
        request = next(r for r in self.asked.requests if r.id == task[0])
        layers = {x.id: x for x in self.asked.layers}
        source: Source | None = None
        found = []
        for place, entry in enumerate(self.asked.entries):
            pieces = []
            plans = self._plans(task, place, entry.policy, layers)
            if len(plans) > 1:
                source = source or source_of(self.trace.lane(request, layers[task[1]]))
                with threadpool_limits(1, user_api="blas"):
                    pieces = reuse(source, plans)
            at = {"request": task[0], "layer": task[1], "policy": entry.policy.id}
            found.append(pa.concat_tables([_EMPTY, *(tables.table("reuse", piece | at) for piece in pieces)]))
        if any(rows.num_rows for rows in found):
            add_table(self.parts, task, "reuse", found)

    def _plans(self, task: Task, place: int, policy: Policy, layers: dict[int, Layer]) -> dict[int, Plan]:
        """{distance: plan} of the layer and those below it; nothing where the policy does not keep everything."""
        if not all(isinstance(job.chain.part("keep"), full) for job in jobs_of(policy, layers[task[1]])):
            return {}
        below = {n: task[1] - n for n in (OWN, *DISTANCES) if task[1] - n in layers}
        same = {n: layer for n, layer in below.items() if _heads(layers[layer]) == _heads(layers[task[1]])}
        found = {n: read_part(self.parts, (task[0], layer), place).get("plans") for n, layer in same.items()}
        plans = {n: plan for n, rows in found.items() if rows is not None and (plan := _plan(rows))}
        return plans if OWN in plans else {}


_EMPTY = tables.RUN_TABLES["reuse"].empty_table()


def _heads(layer: Layer) -> Sequence[int]:
    return layer.q_heads, layer.kv_heads


def _plan(rows: pa.Table) -> Plan | None:
    """None where the heads of a layer have pages of several sizes."""
    rows = rows.combine_chunks()
    size = rows["page_size"].to_numpy()
    if len(set(size.tolist())) != 1:
        return None
    lists = rows["pages"].combine_chunks()
    kv_head, q_head, step = (rows[name].to_numpy().astype(np.int64) for name in ("kv_head", "q_head", "step"))
    start = np.append(0, np.cumsum(lists.value_lengths().to_numpy()))
    return Plan(kv_head, q_head, step, int(size[0]), lists.flatten().to_numpy(), start)
