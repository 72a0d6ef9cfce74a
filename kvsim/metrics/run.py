"""A finished run directory as lazy polars frames: read, checked against the schemas, never recomputed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kvsim import tables
from kvsim.errors import BadTrace, WrongUse
from kvsim.metrics.form import wrong
from kvsim.places import at_hand, from_json

NEEDED = ("ledger", "heads")


@dataclass(frozen=True)
class Policy:
    """One policy of a run. role: "asked", "baseline" or "not recorded"; beside: the id of the policy that a baseline stands beside."""

    id: str  # its canonical form, or the name and hash of a policy file
    role: str = "not recorded"
    beside: str | None = None
    form: str = ""  # all of it as text, where the id is but a name
    rows: bool = True  # the tables have rows of it


@dataclass(frozen=True)
class RunTables:
    """The tables of a run. A table that was not written is an empty frame of the same columns; NaN and infinity are null."""

    path: Path
    about: dict[str, Any]  # run.json
    policies: tuple[Policy, ...]
    tables: dict[str, pl.LazyFrame]

    @property
    def ledger(self) -> pl.LazyFrame:
        return self.tables["ledger"]

    @property
    def heads(self) -> pl.LazyFrame:
        return self.tables["heads"]

    @property
    def layers(self) -> pl.LazyFrame:
        """layer i16, row_bytes i64 (one token of one kv head, as billed; null where run.json has none)."""
        rows = [{"layer": r["layer"], "row_bytes": r.get("row_bytes")} for r in self.about.get("layers") or [] if "layer" in r]
        return pl.LazyFrame(rows, schema={"layer": pl.Int16, "row_bytes": pl.Int64})

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The requests as run.json has them: request, prompt_tokens, total_tokens, mode, spans, steps."""
        return list(self.about.get("requests") or [])


def open_run(path: str | Path) -> RunTables:
    """A run directory -> RunTables.

    Raises BadTrace for a directory that is not a complete run, another schema version, or a table without its columns."""
    path = at_hand(path)
    about = _about(path)
    _check_files(path, about)
    frames = {name: _table(path / f"{name}.parquet", name) for name in tables.RUN_TABLES}
    for name in NEEDED:
        if frames[name].head(1).collect().is_empty():
            raise BadTrace(f"{path / name}.parquet: no rows, expected one per policy, layer, head and decode step; replay again")
    return RunTables(path, about, _policies(about, frames["heads"]), frames)


def part(
    run: RunTables,
    policies: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    requests: Sequence[int] | None = None,
) -> RunTables:
    """The run with only these policies (ids), layers and requests; None: all. Raises WrongUse when one of them has no rows in it."""
    wanted = {"policy": policies, "layer": layers, "request": requests}
    given = {name: list(x) for name, x in wanted.items() if x is not None}
    if not given:
        return run
    there = run.heads.select(pl.col(n).unique().sort().implode() for n in given).collect().row(0, named=True)
    for name, asked in given.items():
        missing = [str(x) for x in asked if x not in there[name]]
        if missing or not asked:
            known, option = ", ".join(map(str, there[name])), {"policy": "--policies"}.get(name, f"--{name}s")
            raise WrongUse(f"{run.path}: no rows of {name} {', '.join(missing)}; {option} takes some of {known}")
    kept = [pl.col(n).is_in(x) for n, x in given.items()]
    frames = {name: frame.filter(kept) for name, frame in run.tables.items()}
    if frames["heads"].head(1).collect().is_empty():
        raise WrongUse(f"{run.path}: no rows of these policies, layers and requests together; leave one of the options out")
    about = dict(run.about)
    for key, name in (("noise_floor", "layer"), ("noise_floor", "request"), ("requests", "request")):
        if name in given and isinstance(about.get(key), list):
            about[key] = [r for r in about[key] if r.get(name) in given[name]]
    mine = given.get("policy")
    return RunTables(run.path, about, tuple(p for p in run.policies if mine is None or p.id in mine), frames)


def _check_files(path: Path, about: dict[str, Any]) -> None:
    """Every table is the one that run.json tells of. Raises BadTrace."""
    told = about.get("tables")
    for name, entry in (told if isinstance(told, dict) else {}).items():
        file = path / f"{name}.parquet"
        if Path(name).name != name or not isinstance(entry, dict) or not os.path.isfile(file):
            raise BadTrace(f"{file}: missing, though run.json tells of it; replay again")
        with file.open("rb") as f:
            if file.stat().st_size != entry.get("bytes") or hashlib.file_digest(f, "sha256").hexdigest() != entry.get("sha256"):
                raise BadTrace(f"{file}: not the table that run.json tells of, so it was altered or cut short; replay again")


def _about(path: Path) -> dict[str, Any]:
    file = path / "run.json"
    if not file.is_file() and (path / "manifest.json").is_file():
        raise BadTrace(f"{path}: a trace, and no run of one; kvsim replay {path} -p POLICY -o RUN makes one")
    if not file.is_file() and (runs := sorted(str(f.parent) for f in path.glob("*/run.json"))):
        raise BadTrace(f"{path}: a folder of runs; name one of them: {', '.join(runs)}")
    if not file.is_file():
        raise BadTrace(f"{path}: no run.json, so not a finished run; kvsim replay TRACE -p POLICY -o {path} writes one")
    try:
        about = from_json(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise BadTrace(f"{file}: not JSON ({e}); replay again") from None
    schema = about.get("schema") if isinstance(about, dict) else None
    if schema != tables.RUN_SCHEMA:
        raise BadTrace(f"{file}: schema {schema!r}, expected {tables.RUN_SCHEMA!r}; replay with this version of kvsim")
    if problem := wrong(about):
        raise BadTrace(f"{file}: {problem}; replay again")
    return dict(about)


def _table(file: Path, name: str) -> pl.LazyFrame:
    schema = tables.RUN_TABLES[name]
    empty = pl.from_arrow(schema.empty_table())
    assert isinstance(empty, pl.DataFrame)
    types = {n: pl.String if n == "policy" else t for n, t in empty.schema.items()}
    if not file.is_file():
        if name in NEEDED:
            raise BadTrace(f"{file}: missing, though every run has it; replay again")
        return pl.LazyFrame(schema=types)
    scan = pl.scan_parquet(file)
    there = scan.collect_schema().names()
    lost = [f.name for f in schema if not f.nullable and f.name not in there]
    if lost:
        raise BadTrace(f"{file}: no column {', '.join(lost)}, expected those of kvsim.tables; replay again")
    return scan.select(_column(n, t) if n in there else pl.lit(None, t).alias(n) for n, t in types.items())


def _column(name: str, dtype: Any) -> pl.Expr:
    x = pl.col(name).cast(dtype)
    return pl.when(x.is_finite()).then(x) if dtype in (pl.Float32, pl.Float64) else x


def _policies(about: dict[str, Any], heads: pl.LazyFrame) -> tuple[Policy, ...]:
    """In the order of run.json; ids that only the tables know come last."""
    seen = heads.select(pl.col("policy").unique(maintain_order=True)).collect()["policy"].to_list()
    said = [
        Policy(p["id"], p.get("role") or "not recorded", p.get("beside"), p.get("form") or "", p["id"] in seen)
        for p in about.get("policies") or []
    ]
    return tuple(said) + tuple(Policy(p) for p in seen if p not in {x.id for x in said})
