"""Charts of analyses in the report's looks: a column of panels per cell, a row per measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy
from kvsim.report.charts.measure import MEASURES, layered
from kvsim.report.theme import Style

WIDTH, HEIGHT = 250, 190
GAP = 84  # between columns, axis included, so that an empty panel does not move its neighbours
FEW = 12  # places along x where each gets a point
WIDE = alt.Axis(minExtent=38, tickCount=5)  # so that columns stand under one another


def look(styles: dict[str, tuple[str, list[int]]]) -> list[Style]:
    """Colour and dash of every line by its name."""
    return [Style(name, name, colour, dash, "circle") for name, (colour, dash) in styles.items()]


def share(measure: str, low: float = 0, high: float = 1, title: str | None = None) -> alt.Y:
    name = (title or MEASURES[measure].title) + (f", from {low:.0%}" if low else "")
    scale = alt.Scale(domain=[low, high])
    return alt.Y(f"{measure}:Q", title=name, scale=scale, axis=alt.Axis(minExtent=38, format=".0%", tickCount=5))


def error(values: pl.Series) -> alt.Y:
    """Only as far as the values reach: the report's axis begins at rounding, far below what is compared here. Values within a factor of 5
    stand on a linear axis from 0: a logarithmic one has hardly a tick between them."""
    least, most = theme.ends(values, (0.01, 1.0))
    if most < 5 * least:
        axis = alt.Axis(minExtent=38, format="~g", tickCount=5)
        return alt.Y("rel_l2:Q", title="output error (relative L2)", scale=alt.Scale(domain=[0, most * 1.1]), axis=axis)
    low, high = least / 1.3, most * 1.3
    ticks = [x for x in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3) if low <= x <= high]
    axis = alt.Axis(minExtent=38, format="~g", grid=True, values=ticks)
    scale = alt.Scale(type="log", nice=False, domain=[low, high])
    return alt.Y("rel_l2:Q", title=MEASURES["rel_l2"].title, scale=scale, axis=axis)


def lines(
    data: pl.DataFrame,
    cells: Sequence[str],
    y: dict[str, alt.Y],
    x: alt.X,
    styles: Sequence[Style],
    said: str,
    none: str = "",
    diamonds: str = "oracle",
) -> alt.VConcatChart:
    """A row per measure, a column per cell, a line per policy; a click on the legend keeps one. none: what an empty panel says; points of
    policies whose names begin with `diamonds` are such."""
    focus, opacity = focus_on_policy()
    channels = theme.policy_channels(styles, "line")
    shape = alt.ShapeValue("circle", condition={"test": f"indexof(datum.policy, '{diamonds}') === 0", "value": "diamond"})
    across = str(x.shorthand).split(":")[0]

    def panel(cell: str, measure: str) -> alt.LayerChart:
        mine = theme.labelled(data.filter(pl.col("cell") == cell), styles).select("policy", across, measure).drop_nulls(measure)
        if mine.is_empty():
            return layered(alt.Chart(pl.DataFrame({"none": [0]})).mark_text().encode(text=alt.value(none)))
        tip = [alt.Tooltip("policy:N"), alt.Tooltip(f"{across}:N"), alt.Tooltip(f"{measure}:Q", format=".3f")]
        base = alt.Chart(theme.prepare(mine)).encode(x=x, y=y[measure], opacity=opacity, tooltip=tip)
        layers = [base.mark_line(aria=False).encode(**channels)]
        if mine[across].n_unique() <= FEW:
            layers.append(base.mark_point(aria=False, filled=True, size=45).encode(color=channels["color"], shape=shape))
        chart = layered(*layers)
        return chart.add_params(focus) if (cell, measure) == (cells[0], next(iter(y))) else chart

    return grid(panel, cells, list(y), said)


def grid(
    panel: Callable[[str, str], alt.Chart | alt.LayerChart], cells: Sequence[str], measures: Sequence[str], said: str
) -> alt.VConcatChart:
    """Panels with the cell's name above the first of each column."""
    rows = []
    for m in measures:
        given = [
            {"title": alt.Title(c, fontSize=12, offset=22)} if m == measures[0] else {} for c in cells
        ]  # fmt: skip
        row = [panel(c, m).properties(width=WIDTH, height=HEIGHT, **more) for c, more in zip(cells, given, strict=True)]
        rows.append(alt.hconcat(*row, spacing=GAP, bounds="flush"))
    return alt.vconcat(*rows, spacing=34, description=said)
