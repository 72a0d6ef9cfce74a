"""What every question has: policies measured on contexts, claims of the notes, charts, numbers that are kept, and a README that they write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

import kvsim
from analyses.contexts import ROOT, Context, of_study, small
from analyses.figures import KEY, SCHEMA, Claim, Figures, by_cell, judge
from kvsim.errors import KvsimError
from kvsim.metrics.interval import FEWEST
from kvsim.report.html import Figure

SHORT = ("needle/short/smollm2", "reversal/short/smollm2", "plain/short/smollm2")
WIDE = "needle/short/gemma3"  # keys of 256 channels, one kv head, most layers with a window
LONG = "needle/long/smollm2"
Tabled = tuple[list[str], list[list[str]], list[str]]
ROUNDED = 1e-6  # so far a claim's number of another capture may lie beside its interval, of 1 + its size: without spread it has no width
CLOSE = 1e-4  # a row measured again is the same up to so much of 1 + its size: a CPU without fused multiply-adds rounds otherwise


@dataclass(frozen=True)
class Chart:
    """draw: the frame of figures (cell, contexts, figure, line, at, value, low, high) -> a chart (analyses.panels has the usual ones);
    figures: those it draws; how: how to read it, and what is not drawn."""

    name: str
    title: str
    how: str
    figures: Sequence[str]
    draw: Callable[[pl.DataFrame], Any]

    def figure(self, frame: pl.DataFrame) -> Figure:
        mine = frame.filter(pl.col("figure").is_in(self.figures))
        return Figure(self.name, self.title, self.how, self.draw(mine), "", mine)


@dataclass(frozen=True)
class Question:
    """measure: a context -> rows without cell and context (analyses.figures.rows); cells: those of the study that findings rest on; labels:
    lines that the page's switch may single out; part: contexts of each cell that are measured again by `make analyses`; table: cells -> columns,
    rows and footnotes of a table that README and page show after the findings."""

    name: str
    title: str
    lead: str
    measure: Callable[[Context], pl.DataFrame]
    claims: Sequence[Claim]
    charts: Sequence[Chart]
    cells: Sequence[str] = SHORT
    labels: Sequence[str] = ()
    part: int = 1
    table: Callable[[Sequence[Figures]], Tabled] | None = None

    @property
    def folder(self) -> Path:
        return ROOT / "analyses" / self.name

    @property
    def command(self) -> str:
        return f"python -m analyses {self.name}"

    @cached_property
    def kept(self) -> Numbers:
        return Numbers.read(self.folder / "numbers.parquet")


@dataclass(frozen=True)
class Numbers:
    """Rows with what they were measured on: digests are the sha256 of the traces' manifests by context, models name theirs."""

    table: pl.DataFrame
    digests: dict[str, str]
    models: list[str]
    version: str = kvsim.__version__

    @staticmethod
    def measured(question: Question, contexts: Iterable[Context], progress: Callable[[str], None] = lambda line: None) -> Numbers:
        parts, digests, models = [], {}, set()
        for c in contexts:
            progress(f"{question.name}: {c.trace.id}")
            named = question.measure(c).with_columns(
                cell=pl.when(pl.col("role") == "").then(pl.lit(c.cell)).otherwise(pl.format("{}: {}", pl.lit(c.cell), "role")),
                context=pl.lit(c.trace.id),
            )
            parts.append(named.select(list(SCHEMA)).cast(SCHEMA))  # type: ignore[arg-type]  # names to types
            digests[c.trace.id] = c.trace.sha256
            source = c.trace.manifest["source"]
            models.add(", weights ".join(str(source[x]) for x in ("model", "weight_format") if source.get(x)))
        return Numbers(pl.concat(parts), digests, sorted(models))

    @staticmethod
    def read(file: Path) -> Numbers:
        """Raises KvsimError for numbers of another version of kvsim, or no such file."""
        if not file.is_file():
            raise KvsimError(f"{file}: not there; measure it: python -m analyses {file.parent.name} --write")
        about = json.loads(pq.read_metadata(file).metadata[b"kvsim"])
        if about["kvsim"] != kvsim.__version__:
            raise KvsimError(
                f"{file}: numbers of kvsim {about['kvsim']}, this is {kvsim.__version__}; measure again: "
                f"python -m analyses {file.parent.name} --write"
            )
        return Numbers(pl.read_parquet(file), about["traces"], about["models"], about["kvsim"])

    def write(self, file: Path, command: str) -> None:
        about = {"kvsim": self.version, "traces": self.digests, "models": self.models, "command": command}
        table: pa.Table = self.table.to_arrow().replace_schema_metadata({b"kvsim": json.dumps(about, sort_keys=True).encode()})
        pq.write_table(table, file, compression="zstd", use_dictionary=True)

    def figures(self, few: bool = False) -> list[Figures]:
        """Of the cells that may carry a finding; few: of those that have too few contexts, too."""
        return [f for f in by_cell(self.table) if few or len(f.contexts) >= FEWEST]

    def of(self, contexts: Sequence[str]) -> Numbers:
        """Those of some contexts."""
        digests = {c: self.digests[c] for c in contexts}
        return Numbers(self.table.filter(pl.col("context").is_in(list(contexts))), digests, self.models, self.version)

    def replaced(self, other: Numbers) -> Numbers:
        """With another measurement of some contexts in place of ours. Raises KvsimError for a context that we have not."""
        if strange := [c for c in other.digests if c not in self.digests]:
            raise KvsimError(f"{strange[0]} is not among the kept numbers; measure all of them again with --write")
        mine = self.table.filter(~pl.col("context").is_in(list(other.digests)))
        order = pl.DataFrame({"context": list(self.digests)}).with_row_index("order")
        table = pl.concat([mine, other.table]).join(order, on="context").sort("order", maintain_order=True).drop("order")
        return Numbers(table, self.digests | other.digests, self.models, self.version)

    def beside(self, older: Numbers, cells: Sequence[str]) -> Numbers:
        """With what an older measurement says of cells (of the study) that this one has not."""
        mine = pl.col("cell").str.split(": ").list.first()
        there = self.table.select(mine)["cell"].unique().to_list()
        left = older.table.filter(mine.is_in(list(cells)) & ~mine.is_in(there))
        digests = {c: older.digests[c] for c in left["context"].unique(maintain_order=True)}
        models = sorted({*self.models, *(older.models if digests else ())})
        return Numbers(pl.concat([self.table, left]), self.digests | digests, models, self.version)

    def moved(self, other: Numbers) -> list[str]:
        """A line per row of `other` that is not ours, and per figure that left its interval here; of the same traces (see `strayed`)."""
        keys = ["cell", "context", "figure", "line", "at"]
        other = other.of([c for c, digest in other.digests.items() if self.digests.get(c) == digest])
        same = pl.col("context").is_in(list(other.digests))
        both = self.table.filter(same).join(other.table, on=keys, how="full", suffix="_now", coalesce=True)
        far = pl.any_horizontal((pl.col(x) - pl.col(f"{x}_now")).abs() > CLOSE * (1 + pl.col(x).abs()) for x in ("top", "below"))
        gone = pl.any_horizontal(pl.col(x).is_null() for x in ("top", "top_now"))
        out = [
            f"{r['context']} ({r['cell']}): {r['figure']} / {r['line']} / {r['at']} was {_of(r, '')}, is {_of(r, '_now')}"
            for r in both.filter(far.fill_null(False) | gone).to_dicts()
        ]
        now = {f.cell: f for f in self.replaced(other).figures()}
        for f in self.figures():
            after = now[f.cell].frame().select(*KEY, "value")
            left = f.frame().join(after, on=KEY, suffix="_now").filter(~pl.col("value_now").is_between("low", "high"))
            out += [
                f"{f.cell}: {r['figure']} / {r['line']} / {r['at']} left [{r['low']:.4g}, {r['high']:.4g}]: {r['value_now']:.4g}"
                for r in left.to_dicts()
            ]
        return out


def _of(row: dict[str, Any], suffix: str) -> str:
    top, below = row[f"top{suffix}"], row[f"below{suffix}"]
    return "not there" if top is None else f"{top / below:.6g}" if below else "empty"


def strayed(question: Question, now: Numbers) -> list[str]:
    """A line per claim whose number leaves its interval with contexts of another capture in place of ours. A capture on another machine has
    other bits, so neither its rows are ours nor what counts a few rare events; what a claim stands by must be."""
    kept = question.kept
    other = now.of([c for c, digest in now.digests.items() if kept.digests.get(c) != digest])
    if not other.digests:
        return []
    cells = [f for f in kept.replaced(other).figures() if f.cell in set(other.table["cell"])]
    out = []
    for claim in question.claims:
        ours = {v.cell: v for v in judge(claim, kept.figures())}
        for v in judge(claim, [f for f in cells if f.cell in ours]):
            was, room = ours[v.cell], ROUNDED * (1 + abs(v.value))
            if was.low is not None and was.high is not None and not was.low - room <= v.value <= was.high + room:
                out.append(f"{v.cell}: {claim.of} left [{was.low:{claim.form}}, {was.high:{claim.form}}]: {v.value:{claim.form}}")
    return out


def contexts_of(question: Question, say: Callable[[str], None] = lambda line: None) -> list[Context]:
    """The small part that a test measures again, and the study's contexts; cells with too few of them here are named and left out."""
    found = [small()]
    for cell in question.cells:
        try:
            found += of_study(cell)
        except KvsimError as e:
            say(f"{e}; what is kept of this cell stays as it is")
    return found


def measured_again(question: Question, say: Callable[[str], None] = lambda line: None) -> Numbers:
    """All that can be measured here, beside what is kept of the other cells. Raises KvsimError when that is of another version of kvsim."""
    now = Numbers.measured(question, contexts_of(question, say), say)
    there = {cell.split(": ")[0] for cell in now.table["cell"].unique()}
    return now if there.issuperset(question.cells) else now.beside(question.kept, question.cells)


def part_of(question: Question, say: Callable[[str], None] = lambda line: None) -> list[Context]:
    """What `make analyses` measures again: the small part, and the first contexts of every cell that is captured here; those of another capture
    than the kept numbers' are named."""
    kept, part = question.kept.digests, [small()]
    for cell in question.cells:
        first = [c for c in of_study(cell, 0) if c.trace.id in kept][: question.part]
        for c in first:
            if kept[c.trace.id] != c.trace.sha256:
                say(
                    f"{c.trace.id}: another capture than that of the kept numbers, so not its rows are compared, but the claims' numbers that "
                    "it leads to with their intervals"
                )
        part += first
    return part
