"""A finished run: its tables as polars frames, and what is known about them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvsim.errors import BadTrace
from kvsim.places import at_hand, from_json
from kvsim.tables import RUN_SCHEMA, RUN_TABLES

if TYPE_CHECKING:
    import polars as pl

    from kvsim.s3 import S3Path


class Run:
    """The tables of a run directory (docs/tables.md): run.ledger, run.heads, ...; each is read when it is asked for.

    Raises BadTrace for what is not a finished run."""

    def __init__(self, path: str | Path | S3Path, owned: TemporaryDirectory[str] | None = None) -> None:
        self.path = at_hand(path)
        self._owned = owned  # a folder that lives as long as this object
        file = self.path / "run.json"
        again = "kvsim replay TRACE -p POLICY -o RUN writes one"
        if not file.is_file():
            begun = (self.path / "begun.json").is_file()
            what = "begun and not finished: repeat its replay to finish it" if begun else f"no run.json, so not a run; {again}"
            raise BadTrace(f"{self.path}: {what}")
        try:
            info = from_json(file.read_text("utf-8"))
        except ValueError as e:
            raise BadTrace(f"{file}: not JSON ({e}): the file was altered; replay again") from None
        if not isinstance(info, dict) or info.get("schema") != RUN_SCHEMA:
            found = info.get("schema") if isinstance(info, dict) else None
            raise BadTrace(f"{file}: schema is {found!r}, this kvsim reads {RUN_SCHEMA!r}; replay again")
        self.info: dict[str, Any] = info

    @classmethod
    def open(cls, path: str | Path) -> Run:
        return cls(path)

    def scan(self, table: str) -> pl.LazyFrame:
        """A table that is read no further than a query needs; one that the run did not write has no rows."""
        import polars as pl

        file = self.path / f"{table}.parquet"
        if file.is_file():
            return pl.scan_parquet(file)
        empty = pl.from_arrow(RUN_TABLES[table].empty_table())
        assert isinstance(empty, pl.DataFrame)
        return empty.lazy()

    def __getattr__(self, name: str) -> pl.DataFrame:
        """A table, by its name."""
        if name not in RUN_TABLES:
            raise AttributeError(f"a run has no {name!r}; its tables are {', '.join(RUN_TABLES)}")
        return self.scan(name).collect()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *RUN_TABLES]

    def __repr__(self) -> str:
        n, trace = len(self.info["policies"]), self.info["trace"]["id"]
        return f"Run({str(self.path)!r}: {n} {'policy' if n == 1 else 'policies'} on trace {trace})"
