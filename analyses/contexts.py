"""The contexts that a question rests on: traces of the study by cell, the bundled ones, or a user's own; and their replays, kept in build/runs.

A context is one request of one trace: what intervals are drawn over."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import kvsim
from kvsim.errors import KvsimError
from kvsim.metrics.interval import FEWEST
from kvsim.policies.language import canonical, complete
from kvsim.replay.calibrate import calibrate
from kvsim.trace.open import Trace, open_trace
from tools import study

ROOT = Path(__file__).resolve().parents[1]
BUNDLED, OTHER = (ROOT / "traces" / f"smollm2-{task}" for task in ("needle", "reversal"))
RUNS = ROOT / "build" / "runs"

WHOLE, EVERY = 64, 7  # a role of more than 64 steps is replayed at every seventh; refresh intervals are no multiples of seven
FEW_STEPS = 16  # replayed steps of a role in a context: fewer are no evidence
LAYERS = 3  # at most, evenly spread over those captured
ROLES = {0: "context", 1: "question", 2: "forced text", 3: "answer"}


@dataclass(frozen=True)
class Context:
    """One trace of one cell (task/length/model of the study; else the trace's name without its number), how many of its layers, and other
    contexts, from which something may be learned before it is judged on this one."""

    cell: str
    path: Path
    most: int = LAYERS
    beside: tuple[Path, ...] = ()

    @property
    def trace(self) -> Trace:
        return _opened(self.path)

    @property
    def layers(self) -> list[int]:
        """At most `most` of those captured, evenly spread, the first and the last among them."""
        return spread([x.id for x in self.trace.captured_layers], self.most)

    @property
    def inner(self) -> list[int]:
        """The captured layers a third and two thirds deep: what costly questions are measured on."""
        ids = [x.id for x in self.trace.captured_layers]
        return sorted({ids[len(ids) // 3], ids[max(0, 2 * len(ids) // 3 - 1)]})

    @property
    def mostly(self) -> str:
        """The role of most decode steps, in words: beside its figures stand those that count over all steps, whatever their role."""
        return ROLES[int(np.argmax(sum(np.bincount(r.roles[r.prompt :], minlength=len(ROLES)) for r in self.trace.requests)))]

    def calibrated(self, policy: str, layers: Sequence[int]) -> Path:
        """What kvsim.calibrate makes of the contexts beside this one, kept as replays are."""
        traces = [_opened(p) for p in self.beside]
        asked = f"{kvsim.__version__} {_code()} {policy} {layers} {[t.sha256 for t in traces]}"
        file = RUNS / f"calibration-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.npz"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            calibrate(traces, policy, file, layers=layers)
        return file

    def replay(self, policies: Mapping[str, Any], **options: Any) -> Tables:
        """Policies (expressions) by the names that charts and figures call them by -> the tables of their run. options: those of kvsim.replay;
        by default the context's layers, and all steps of a role with few, every seventh of one with many."""
        trace = self.trace
        steps = sorted({s for r in trace.requests for s in chosen(r.roles[r.prompt :])})
        given = {"layers": self.layers, "steps": steps, **options}
        ids = {name: identity(p) for name, p in policies.items()}
        asked = f"{kvsim.__version__} {_code()} {trace.sha256} {sorted(set(ids.values()))} {sorted(given.items())}"
        out = RUNS / f"{trace.id}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
        run = kvsim.Run(out) if out.exists() else kvsim.replay(trace, list(policies.values()), out, **given)
        check_same(run, trace)
        return Tables(run, trace, ids)


@dataclass(frozen=True)
class Tables:
    """The tables of one run, with policies by their names here and `role` in words."""

    run: kvsim.Run
    trace: Trace
    ids: Mapping[str, str]

    def __call__(self, table: str) -> pl.DataFrame:
        """heads, ledger, curves, explain, … with `policy` as named; ledger with its step's role; rows of roles with too few steps are left out.
        A table without roles (tiers, recurrence, slack, …) keeps what it has."""
        frame = self.run.scan(table)
        columns = frame.collect_schema().names()
        if "role" not in columns and "step" in columns:
            frame = frame.join(
                self.run.scan("heads").select("request", "step", "role").unique(), on=["request", "step"], how="left"
            )
        return self.named(frame.collect())

    def named(self, frame: pl.DataFrame) -> pl.DataFrame:
        """A frame with the run's own ids -> the same with policies and roles in words, without roles that have too few steps."""
        if "role" in frame.columns:
            told = pl.col("role").cast(pl.Int64).replace_strict(ROLES, return_dtype=pl.String)
            frame = frame.filter(pl.col("role").is_in(self.roles())).with_columns(role=told)
        names = pl.DataFrame({"name": list(self.ids), "policy": list(self.ids.values())})
        mine = frame.with_columns(pl.col("policy").cast(pl.String)).join(names, on="policy")
        return mine.with_columns(policy=pl.col("name")).drop("name")

    def roles(self) -> list[int]:
        """Those with enough replayed steps."""
        each = self.run.scan("heads").group_by("role").agg(pl.struct("request", "step").n_unique().alias("steps"))
        return each.filter(pl.col("steps") >= FEW_STEPS).collect()["role"].to_list()

    def row_bytes(self) -> dict[int, int]:
        """Layer -> bytes of one cached token of one kv head, K and V."""
        return {x["layer"]: x["row_bytes"] for x in self.run.info["layers"]}


def of_study(cell: str, fewest: int = FEWEST) -> list[Context]:
    """The captured contexts of a cell of the study. Raises KvsimError below `fewest`."""
    asked = study.all_cells()[cell]
    paths = [asked.trace(study.root(), i) for i in range(study.CONTEXTS)]
    there = [p for p in paths if (p / "manifest.json").exists()]
    if len(there) < fewest:
        raise KvsimError(
            f"{cell}: {len(there)} contexts under {study.root()}, a finding needs {fewest}; "
            f"capture them with: python tools/study.py {cell} --contexts {fewest}"
        )
    return [Context(cell, p, beside=other_half(there, i)) for i, p in enumerate(there)]


def of_paths(paths: Iterable[Path]) -> list[Context]:
    """A user's traces: the cell is the trace's name, without the number that a study gives its contexts."""
    cells: dict[str, list[Path]] = {}
    for p in paths:
        cells.setdefault(re.sub(r"-\d+$", "", open_trace(p).id), []).append(p)
    return [Context(cell, p, beside=other_half(mine, i)) for cell, mine in cells.items() for i, p in enumerate(mine)]


def other_half(paths: Sequence[Path], i: int) -> tuple[Path, ...]:
    """Of the first FEWEST contexts of a cell every second, so that the one at place i is not among them: as many for each of them,
    however many there are."""
    return tuple(p for j, p in enumerate(paths[:FEWEST]) if (i - j) % 2)


def small() -> Context:
    """One layer of a bundled trace: what a test measures again. One context, so no finding."""
    return Context("bundled", BUNDLED, most=1, beside=(OTHER,))


def check_same(run: kvsim.Run, trace: Trace) -> None:
    """Raises KvsimError for a run of another trace or of tables that are not today's."""
    found = run.info["trace"]["sha256"]
    if found != trace.sha256:
        raise KvsimError(
            f"{run.path}: a run of another trace (sha256 {found[:12]}, {trace.id} has {trace.sha256[:12]}); remove it"
        )


def forget() -> None:
    """Removes every run that is kept."""
    shutil.rmtree(RUNS, ignore_errors=True)


def identity(policy: Any) -> str:
    """A policy as tables name it."""
    return canonical(complete(kvsim.parse(policy) if isinstance(policy, str) else policy))


def spread(layers: Sequence[int], most: int = LAYERS) -> list[int]:
    """At most `most` of them, evenly spread, the first and the last among them; one: the middle one."""
    if most == 1:
        return [layers[len(layers) // 2]]
    at = np.linspace(0, len(layers) - 1, min(most, len(layers))).round().astype(int)
    return [layers[i] for i in at]


def chosen(roles: np.ndarray) -> list[int]:
    """The role of every decode step -> the steps to replay: all of a role with few, every seventh of one with many."""
    steps: list[int] = []
    for role in np.unique(roles):
        mine = np.flatnonzero(roles == role)
        steps += mine[:: 1 if len(mine) <= WHOLE else EVERY].tolist()
    return sorted(steps)


@cache
def _opened(path: Path) -> Trace:
    return open_trace(path)


@cache
def _code() -> str:
    """What of kvsim decides a table: a run of other code is another run."""
    parts = ("codecs", "engine", "kernels", "metrics", "policies", "replay", "trace", "truth")
    files = sorted(f for part in parts for f in (ROOT / "kvsim" / part).rglob("*.py")) + sorted((ROOT / "kvsim").glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]
