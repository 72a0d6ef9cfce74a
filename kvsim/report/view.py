"""One run as it is drawn: its tables, the look of its policies, its noise floor, and the little that every section needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import altair as alt
import polars as pl

from kvsim.metrics.diagnostics import diagnostics
from kvsim.metrics.floor import Floor, floor
from kvsim.metrics.quality import roles
from kvsim.metrics.raster import Place, telling_places
from kvsim.metrics.run import RunTables
from kvsim.report import facts, theme
from kvsim.report.html import Figure
from kvsim.report.theme import Style, styles

ASKED, BASELINES = 30, 10  # policies that a page tells apart
ROWS_DOWN = 40  # (policy, layer) pairs under one another
LEGEND = "A click on the legend keeps one policy."
STATISTICS = (
    "The menu shows, instead of the mean over heads, the 5th percentile of heads (of what is lost the 95th), or the worst head."
)


@dataclass(frozen=True)
class View:
    """name: goes before the names of its figures."""

    run: RunTables
    look: list[Style]
    floor: Floor | None
    name: str = ""

    @classmethod
    def of(cls, run: RunTables, name: str = "") -> View:
        """Policies in the order they were asked for, baselines last; of a longer list the first of both."""
        sides = [[p.id for p in run.policies if p.rows and (p.role == "baseline") == b] for b in (False, True)]
        return cls(run, styles([*sides[0][:ASKED], *sides[1][:BASELINES]]), floor(run.about), name)

    @property
    def shown(self) -> list[str]:
        """A sentence, when the run has more policies than a page can tell apart."""
        many = sum(p.rows for p in self.run.policies)
        return [f"The page shows {len(self.look)} of {many} policies, the first of them."] if len(self.look) < many else []

    def labelled(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame with labels for policies, marks of the first policy last."""
        return theme.labelled(frame, self.look)

    def of_label(self, labels: Iterable[str]) -> list[Style]:
        """The styles of these policies, in the order of the report."""
        there = set(labels)
        return [s for s in self.look if s.label in there]

    def figure(
        self,
        name: str,
        title: str,
        how: str,
        chart: alt.TopLevelMixin,
        data: pl.DataFrame,
        notes: Sequence[str] = (),
        clickable: bool = False,
    ) -> Figure:
        return Figure(f"{self.name}{name}", title, how, chart, " ".join(notes), data, clickable)

    def without(self, drawn: pl.DataFrame | Sequence[str], why: str) -> list[str]:
        """A sentence that names the policies a figure does not draw, if any, and why."""
        there = set(drawn["policy"] if isinstance(drawn, pl.DataFrame) else drawn)
        missing = [s.label for s in self.look if s.label not in there]
        return [f"Not drawn, because {why}: {', '.join(missing)}."] if missing else []

    def few_layers(self, found: pl.DataFrame, rows: int = ROWS_DOWN) -> tuple[pl.DataFrame, list[str]]:
        """A frame with a row per policy and layer, cut to evenly spread layers so that it has at most about `rows`; and a sentence that
        says so."""
        layers = found["layer"].unique().sort().to_list()
        some = layers[:: -(-len(layers) * found["policy"].n_unique() // rows)]
        cut = len(some) < len(layers)
        return found.filter(pl.col("layer").is_in(some)), [
            f"Layers {facts.spans(some)}: {len(some)} of {len(layers)}."
        ] if cut else []

    @cached_property
    def evidence(self) -> bool:
        """Whether any prompt of the run marks evidence."""
        return bool(self.run.heads.select(pl.col("evidence_dense").is_not_null().any()).collect().item())

    @property
    def pieces(self) -> int:
        """The most spans of evidence that a prompt of the run holds."""
        return max((sum(s.get("kind") == "evidence" for s in r.get("spans") or []) for r in self.run.requests), default=0)

    @cached_property
    def answer(self) -> int:
        """The role of the steps that a figure shows which can show but one: of those there are, the last in order of a chat."""
        return int(roles(self.run.heads)["role"].max())  # type: ignore[arg-type]

    @property
    def answers(self) -> pl.LazyFrame:
        """The rows of heads in steps of that role."""
        return self.run.heads.filter(pl.col("role") == self.answer)

    @property
    def alone(self) -> list[str]:
        """A sentence, when there are steps of other roles too."""
        many = roles(self.run.heads).height
        return [f"Over steps of one role alone: {facts.role(self.answer)}."] if many > 1 else []

    @cached_property
    def diagnostics(self) -> pl.DataFrame:
        there = {n: t for n in ("evidence", "plans") if not (t := self.run.tables[n]).head(1).collect().is_empty()}
        return diagnostics(self.run.heads, **there)

    def metrics(self, *names: str) -> pl.DataFrame:
        """policy, metric, value: means over contexts and layers of some of the diagnostics, in steps of `answer` alone, sorted."""
        mine = self.diagnostics.filter(pl.col("role") == self.answer, pl.col("metric").is_in(names))
        return mine.group_by("policy", "metric").agg(pl.col("value").mean()).sort("policy", "metric")

    @cached_property
    def places(self) -> dict[str, Place]:
        """{why: head}: the heads that tell most, all of one context."""
        return telling_places(self.run.heads, self.run.ledger)

    @property
    def request(self) -> int:
        """The context that is drawn where only one can be."""
        return next(iter(self.places.values())).request

    @cached_property
    def selective(self) -> dict[str, bool]:
        """{policy: whether it reads a part of what it holds}."""
        unread = self.run.heads.group_by("policy").agg(pl.col("mass_unread").max() > 0).collect()
        return dict(unread.rows())

    @cached_property
    def bands(self) -> pl.DataFrame:
        """role in words, first, last: the steps of each role, in order; no rows when the roles of several contexts overlap."""
        found = roles(self.run.heads).sort("first").with_columns(facts.role_words())
        apart = all(last < first for last, first in zip(found["last"], found["first"][1:], strict=False))
        return found if apart else found.clear()

    def spans(self) -> pl.DataFrame:
        """start, stop, label of the evidence in the context that is drawn."""
        told = next((r.get("spans") or [] for r in self.run.requests if r.get("request") == self.request), [])
        rows = [(s["start"], s["stop"], s.get("label") or "evidence") for s in told if s.get("kind") == "evidence"]
        return pl.DataFrame(rows, schema={"start": pl.Int64, "stop": pl.Int64, "label": pl.String}, orient="row")

    def together(self, rows: int) -> int:
        """How many steps one point stands for, so that policies × roles × steps × `rows` fit into a chart."""
        many = self.run.heads.select(pl.struct("policy", "role", "step").n_unique()).collect().item()
        return int(-(-many * rows // theme.ROW_CAP))
