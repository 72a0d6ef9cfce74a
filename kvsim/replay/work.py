"""One (request, layer) of a replay: its arrays, the engine, its tables, written as one part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from threadpoolctl import threadpool_limits

from kvsim import tables
from kvsim.engine.run import run_layer
from kvsim.engine.source import Source
from kvsim.errors import KvsimError
from kvsim.geometry import Layer, Request
from kvsim.policies.blame import told
from kvsim.replay.asked import Asked, Task, jobs_of
from kvsim.replay.baselines import Entry
from kvsim.replay.floor import noise_floor
from kvsim.replay.lanes import source_for
from kvsim.replay.laws import check_laws, check_masses
from kvsim.replay.parts import Parts, read_part, write_part
from kvsim.replay.share import Limits
from kvsim.trace.open import Trace


@dataclass(frozen=True, eq=False)
class Work:
    """What every worker is given once."""

    trace: Trace
    asked: Asked
    parts: Parts
    strict: bool = False
    limits: Limits = field(default_factory=dict)
    at_once: int | None = None  # policies whose rows are in memory together; None: all

    def name(self, task: Task) -> str:
        return f"request {task[0]}, layer {task[1]}"

    def do(self, task: Task) -> None:
        """Replays one task and writes its part. Raises KvsimError, whatever went wrong."""
        request, layer = self._find(task)
        try:
            with threadpool_limits(1, user_api="blas"):
                chains = [job.chain for entry in self.asked.entries for job in jobs_of(entry.policy, layer)]
                lane, source = source_for(self.trace, request, layer, chains)
                write_part(self.parts, task, self._batches(source, layer), noise_floor(lane))
        except KvsimError:
            raise
        except (Exception, SystemExit) as e:
            raise KvsimError(f"{self.name(task)}: {told(e)}") from e

    def check(self, task: Task) -> None:
        """The laws of a part that is written already. Raises BrokenLaw."""
        self._check(*self._find(task), self.asked.entries, read_part(self.parts, task))

    def _check(self, request: Request, layer: Layer, entries: Sequence[Entry], found: Sequence[Mapping[str, pa.Table]]) -> None:
        for entry, by_name in zip(entries, found, strict=True):
            check_laws(entry.policy, request, layer, by_name)

    def _find(self, task: Task) -> tuple[Request, Layer]:
        request = next(r for r in self.asked.requests if r.id == task[0])
        return request, next(x for x in self.asked.layers if x.id == task[1])

    def _batches(self, source: Source, layer: Layer) -> Iterator[list[dict[str, pa.Table]]]:
        entries = self.asked.entries
        many = self.at_once or len(entries)
        for some in (entries[i : i + many] for i in range(0, len(entries), many)):
            found = self._tables(source, layer, some)
            for by_name in found:
                check_masses(self.name((source.request.id, layer.id)), by_name)
            if self.strict:
                self._check(source.request, layer, some, found)
            yield found

    def _tables(self, source: Source, layer: Layer, entries: Sequence[Entry]) -> list[dict[str, pa.Table]]:
        """Of every policy, its tables that have rows."""
        jobs = [
            [
                replace(j, limits=self.limits.get((entry.policy.id, source.request.id, layer.id)))
                for j in jobs_of(entry.policy, layer)
            ]
            for entry in entries
        ]
        results = iter(
            run_layer(
                source,
                [j for mine in jobs for j in mine],
                steps=self.asked.steps,
                plans=self.asked.plans,
                explain=self.asked.explain,
                allocator=self.asked.allocator,
            )
        )
        at = {"request": source.request.id, "layer": layer.id}
        found = []
        for entry, mine in zip(entries, jobs, strict=True):
            parts: dict[str, list[pa.Table]] = {}
            for _ in mine:
                for name, pieces in next(results).items():
                    parts.setdefault(name, []).extend(
                        tables.table(name, piece | at | {"policy": entry.policy.id}) for piece in pieces
                    )
            found.append({name: pa.concat_tables(pieces) for name, pieces in parts.items() if any(p.num_rows for p in pieces)})
        return found
