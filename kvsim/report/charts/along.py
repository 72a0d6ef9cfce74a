"""Lines along the decode steps or the layers, one per policy, several measures under or beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.metrics.spread import SUFFIX
from kvsim.report import theme
from kvsim.report.charts.measure import MEASURES, layered, noise, quantity, tooltip
from kvsim.report.theme import Style

WIDTH = 1000
FEW = 24  # places along x where each gets a point


def step_axis(title: str | None = None) -> alt.X:
    return alt.X("step:Q", title=title, scale=alt.Scale(nice=False), axis=alt.Axis(format="d", tickMinStep=1))


def statistic_menu() -> alt.Parameter:
    """Which statistic over heads is drawn; the charts filter their rows by it."""
    options = list(SUFFIX)
    return alt.param("statistic", value=options[0], bind=alt.binding_select(options=options, name="over heads: "))


def focus_on_policy() -> tuple[alt.Parameter, Any]:
    """A click on the legend keeps one policy: the selection, and the opacity of its marks."""
    focus = alt.selection_point("focus", fields=["policy"], bind="legend")
    return focus, alt.when(focus).then(alt.value(1)).otherwise(alt.value(0.1))


def lines(
    data: pl.DataFrame,
    measures: Sequence[tuple[str, int]],
    look: Sequence[Style],
    x: alt.X | Sequence[alt.X],
    floor: Floor | None = None,
    also: Sequence[alt.Chart] = (),
    **given: str,
) -> list[alt.LayerChart]:
    """One panel per (measure, height) over x, or over an x each; the panels share a legend that isolates a policy.

    data: policy, the column of x, the measures; with `statistic`, only the rows that the menu names are drawn. also: layers behind the
    first panel. given: further columns of the tooltip with their titles, as far as the data has them."""
    focus, opacity = focus_on_policy()
    names, axes = [m for m, _ in measures], [x] * len(measures) if isinstance(x, alt.X) else list(x)
    base = alt.Chart(theme.prepare(data))
    if "statistic" in data.columns:
        base = base.transform_filter("datum.statistic === statistic")
    detail = ["policy:N", *(["role:N"] if "role" in data.columns else [])]
    base = base.encode(
        opacity=opacity, detail=detail, tooltip=tooltip(names, **{n: t for n, t in given.items() if n in data.columns})
    )
    panels = []
    for i, (measure, height) in enumerate(measures):
        y = quantity(alt.Y, measure, data[measure].cast(pl.Float64))
        behind: list[Any] = [*(also if i == 0 else ()), *(noise(floor, y) if MEASURES[measure].kind == "error" else [])]
        line = base.mark_line(aria=False, strokeWidth=1.5).encode(x=axes[i], y=y, **theme.policy_channels(look, "line"))
        marks = base.mark_point(aria=False, filled=True, size=18).encode(x=axes[i], y=y, color=line.encoding.color)
        layers = [*behind, line, *([marks] if data[_column(axes[0])].n_unique() <= FEW else [])]
        chart = layered(*layers, height=height)
        panels.append(chart.add_params(focus) if i == 0 else chart)
    return panels


def _column(x: alt.X) -> str:
    return str(x.shorthand).split(":")[0]


def down(panels: Sequence[alt.LayerChart], with_menu: bool, description: str) -> alt.VConcatChart:
    """The panels one under the other, over one axis."""
    chart = alt.vconcat(*(p.properties(width=WIDTH) for p in panels), spacing=36).resolve_scale(x="shared")
    chart = chart.add_params(statistic_menu()) if with_menu else chart
    return chart.properties(description=description)
