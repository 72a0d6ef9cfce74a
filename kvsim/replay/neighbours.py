"""The second pass of a replay with plans: the reuse table, which needs the plans of several layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from kvsim.replay.parts import SECOND, Parts, finished, read_table, write_part
from kvsim.trace.open import Trace


@dataclass(frozen=True, eq=False)
class Reuse:
    """What every worker is given once; its tasks are those of the replay, whose parts are all written."""

    trace: Trace
    asked: Asked
    parts: Parts

    def left(self) -> list[Task]:
        """The tasks that have a layer below them to be compared with, and were not done before an interrupt."""
        layers = {x.id for x in self.asked.layers}
        beside = [t for t in self.asked.tasks if any(t[1] - n in layers for n in DISTANCES)] if self.asked.plans else []
        done = set(finished(self.parts, beside, SECOND)) if beside else ()
        return [t for t in beside if t not in done]

    def name(self, task: Task) -> str:
        return f"request {task[0]}, layer {task[1]}, beside the layers below it"

    def do(self, task: Task) -> None:
        """Adds the reuse table of one (request, layer) to its part."""
        request = next(r for r in self.asked.requests if r.id == task[0])
        layers = {x.id: x for x in self.asked.layers}
        below = {n: task[1] - n for n in (OWN, *DISTANCES) if task[1] - n in layers}
        same = {n: layer for n, layer in below.items() if _heads(layers[layer]) == _heads(layers[task[1]])}
        plans = {n: read_table(self.parts, (task[0], layer), "plans") for n, layer in same.items()}
        source: Source | None = None
        found: list[dict[str, pa.Table]] = []
        for place, entry in enumerate(self.asked.entries):
            pieces = []
            mine = _of_policy(plans, place) if _keeps_everything(entry.policy, layers[task[1]]) else {}
            if len(mine) > 1:
                source = source or source_of(self.trace.lane(request, layers[task[1]]))
                with threadpool_limits(1, user_api="blas"):
                    pieces = reuse(source, mine)
            at = {"request": task[0], "layer": task[1], "policy": entry.policy.id}
            rows = [tables.table("reuse", piece | at) for piece in pieces]
            found.append({"reuse": pa.concat_tables(rows)} if any(r.num_rows for r in rows) else {})
        write_part(self.parts, task, [found], receipt=SECOND)


def _keeps_everything(policy: Policy, layer: Layer) -> bool:
    return all(isinstance(job.chain.part("keep"), full) for job in jobs_of(policy, layer))


def _of_policy(tables: dict[int, list[pa.Table]], place: int) -> dict[int, Plan]:
    """{distance: plan}; nothing where the layer itself has none."""
    found = {n: plan for n, rows in tables.items() if rows and rows[place].num_rows and (plan := _plan(rows[place]))}
    return found if OWN in found else {}


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
