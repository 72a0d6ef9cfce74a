"""Policies down the side, measures across: a dot for the mean, a bar for the tail, a cross for the worst head."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.measure import MEASURES, layered, noise, other, quantity, tooltip
from kvsim.report.theme import TICK, Style

ROW = 22  # pixels of one policy
FORMS = {"mass": ".2%", "ms": ".3~g"}  # of what is stacked; else a whole number
ERRORS = "Dot: the mean error. Bar: the 95th percentile of heads. Cross: the worst head."
READING = "Dot: the mean. Bar: the 5th percentile of heads, of output error the 95th. Cross: the worst head."


def policy_axis(look: Sequence[Style], named: bool = True) -> alt.Y:
    """Policies in the order of the report, down the side."""
    axis = alt.Axis(grid=True) if named else alt.Axis(labels=False, ticks=False, grid=True)
    return alt.Y("policy:N", sort=[s.label for s in look], title=None, axis=axis)


def policy_colour(look: Sequence[Style]) -> alt.Color:
    """The colour of a policy where its name stands on an axis."""
    scale = alt.Scale(domain=[s.label for s in look], range=[s.colour for s in look])
    return alt.Color("policy:N", scale=scale, legend=None)


def spread_panel(data: pl.DataFrame, measure: str, look: Sequence[Style], floor: Floor | None, named: bool) -> alt.LayerChart:
    """data: policy, MEASURE and, where they are known, MEASURE_tail and MEASURE_worst."""
    ends = [n for n in (f"{measure}_tail", f"{measure}_worst") if n in data.columns]
    values = pl.concat([data[n].cast(pl.Float64) for n in (measure, *ends)])
    x = quantity(alt.X, measure, values)
    base = alt.Chart(theme.prepare(data.select("policy", measure, *ends))).encode(y=policy_axis(look, named))
    said = [*tooltip([measure]), *(alt.Tooltip(f"{n}:Q", format=MEASURES[measure].form, title=_named(n)) for n in ends)]
    dot = base.mark_point(filled=True, size=80, opacity=1).encode(x=x, color=policy_colour(look), tooltip=said)
    marks: list[alt.Chart] = []
    if ends:
        tail, worst = (other(x, n) for n in ends)
        rule = base.mark_rule(aria=False, color=TICK[0], opacity=0.6).encode(x=x, x2=f"{ends[1]}:Q")
        bar = base.mark_tick(aria=False, thickness=2, size=12, color=TICK[0], opacity=1).encode(x=tail)
        cross = base.mark_point(aria=False, shape="M-1,-1L1,1M-1,1L1,-1", size=40, color=TICK[0], opacity=1).encode(x=worst)
        marks = [rule, bar, cross]
    behind = noise(floor, x) if MEASURES[measure].kind == "error" else []
    return layered(*behind, *marks, dot)


def spread_rows(
    data: pl.DataFrame, measures: Sequence[str], look: Sequence[Style], floor: Floor | None, width: int = 220
) -> alt.HConcatChart:
    """One panel per measure, side by side, the names of the policies at the first."""
    there = set(data["policy"])
    look = [s for s in look if s.label in there]
    panels = [
        spread_panel(data, m, look, floor, named=i == 0).properties(width=width, height=ROW * len(look))
        for i, m in enumerate(measures)
    ]
    return alt.hconcat(*panels, spacing=26)


def stacked(parts: pl.DataFrame, x: alt.X, colours: dict[str, tuple[str, str]], look: Sequence[Style]) -> alt.Chart:
    """parts (policy, part, order and the column of x) -> one bar a policy, its parts in order; parts that are nowhere are left out."""
    field = str(x.shorthand).split(":")[0]
    there = set(parts.filter(pl.col(field) > 0)["part"])
    domain = [p for p in colours if p in there]
    columns = 3 if sum(map(len, domain)) > 80 else len(domain)
    said = ["policy:N", "part:N", alt.Tooltip(f"{field}:Q", format=FORMS.get(field, ",.0f"))]
    return (
        alt.Chart(theme.prepare(parts.filter(pl.col("part").is_in(domain))))
        .mark_bar()
        .encode(
            x=x,
            y=policy_axis(look),
            order="order:Q",
            color=alt.Color("part:N", **theme.few(domain, [colours[p][0] for p in domain], columns=columns)),
            tooltip=said,
        )
    )


def _named(column: str) -> str:
    measure, _, end = column.rpartition("_")
    share = "p95" if MEASURES[measure].kind == "error" else "p5"
    return f"{MEASURES[measure].said}, {f'{share} of heads' if end == 'tail' else 'worst head'}"
