"""Charts of analyses in the report's looks: a column of panels per cell, a row per measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def sweep(
    frame: pl.DataFrame,
    y: dict[str, alt.Y],
    x: str,
    styles: Sequence[Style],
    said: str,
    places: Sequence[str] | None = None,
    numeric: bool = False,
    none: str = "",
    joined: bool = True,
) -> alt.VConcatChart:
    """Figures of `analyses.figures`: a row per figure (its axis with field `value`, the same in all columns), a column per cell, a line per line
    with its interval as a band or, at a few places without order of size, as a bar. x: the title of the axis; places: their order (default:
    that of the rows); joined: False where places have no order, so that no line joins them and lines stand side by side."""
    cells = frame["cell"].unique(maintain_order=True).to_list()
    y = {figure: alike(axis, frame.filter(pl.col("figure") == figure)) for figure, axis in y.items()}
    at = list(places or frame["at"].unique(maintain_order=True).to_list())
    if numeric:
        frame = frame.with_columns(pl.col("at").cast(pl.Float64))
        across: alt.X = alt.X("at:Q", title=x, axis=alt.Axis(tickCount=5))
    else:
        across = alt.X(
            "at:N",
            title=x,
            sort=at,
            scale=alt.Scale(domain=at) if joined else alt.Scale(domain=at, paddingInner=0.5, paddingOuter=0.25),
            axis=alt.Axis(labelAngle=0 if len(at) * max(map(len, at), default=0) < 45 else -40),
        )
    focus, opacity = focus_on_policy()
    channels = theme.policy_channels(styles, "line" if numeric else "point")
    named = frame.rename({"line": "policy"})
    apart = {} if joined else {figure: _apart(frame.filter(pl.col("figure") == figure), styles) for figure in y}

    def panel(cell: str, figure: str) -> alt.LayerChart:
        mine = theme.labelled(named.filter(pl.col("cell") == cell, pl.col("figure") == figure), styles)
        mine = mine.select("policy", "at", "value", "low", "high", "contexts").drop_nulls("value")
        if mine.is_empty():
            return layered(alt.Chart(pl.DataFrame({"none": [0]})).mark_text().encode(text=alt.value(none)))
        tip = [alt.Tooltip("policy:N"), alt.Tooltip("at", type="quantitative" if numeric else "nominal")]
        tip += [alt.Tooltip(f"{n}:Q", format=".4~g") for n in ("value", "low", "high")]
        base = alt.Chart(theme.prepare(mine)).encode(x=across, opacity=opacity, tooltip=tip, **apart.get(figure, {}))
        low, high = alt.Y("low:Q", title=y[figure]["title"]), alt.Y2("high:Q")
        colour = channels["color"]
        if numeric:
            band = base.mark_area(aria=False, opacity=0.15, interpolate="linear").encode(y=low, y2=high, color=colour)
            layers = [band.encode(opacity=alt.value(0.15)), base.mark_line(aria=False).encode(y=y[figure], **channels)]
        else:
            line = base.mark_line(aria=False, strokeWidth=1.2).encode(y=y[figure], color=colour)
            bars = base.mark_rule(aria=False, strokeWidth=1.5).encode(y=low, y2=high, color=colour)
            layers = [
                *([line] if joined else []),
                bars,
                base.mark_point(aria=False, filled=True, size=50).encode(y=y[figure], **channels),
            ]
        chart = layered(*layers)
        return chart.add_params(focus) if (cell, figure) == (cells[0], next(iter(y))) else chart

    return grid(panel, cells, list(y), said)


def axis(title: str, low: float | None = None, high: float | None = None, form: str = ",~r", log: bool = False) -> alt.Y:
    """An axis of `value`, from low to high (None: as far as the values reach)."""
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=low == 0)
    if high is not None:
        scale = alt.Scale(domain=[low or 0, high])
    ticks = {"values": LOG_TICKS, "grid": True} if log else {"tickCount": 5}
    return alt.Y("value:Q", title=title, scale=scale, axis=alt.Axis(minExtent=38, format=form, **ticks))


def _apart(frame: pl.DataFrame, styles: Sequence[Style]) -> dict[str, Any]:
    """Lines side by side at each place, where there are several."""
    there = [s.label for s in styles if s.policy in frame["line"]]
    return {"xOffset": alt.XOffset("policy:N", scale=alt.Scale(domain=there))} if len(there) > 1 else {}


def alike(axis: alt.Y, frame: pl.DataFrame) -> alt.Y:
    """The axis as far as values and intervals of all columns reach, so that columns compare; as it is where it has ends of its own."""
    scale = axis["scale"].to_dict()
    reached = pl.concat([frame[x].cast(pl.Float64) for x in ("value", "low", "high")]).drop_nulls()
    if "domain" in scale or reached.is_empty():
        return axis
    least, most = float(reached.min()), float(reached.max())  # type: ignore[arg-type]  # of numbers
    if scale.get("type") == "log":
        return axis.scale(**scale | {"domain": [least / 1.1, most * 1.1]})
    ends = [min(least, 0), max(most, 0)] if scale["zero"] else [least, most]
    return axis.scale(**scale | {"domain": ends, "nice": True})


LOG_TICKS = [x * 10.0**e for e in range(-4, 5) for x in (1, 2, 5)]
_COLOURS = ("#0072B2", *(light for light, _ in theme.STEPS), *(light for light, _ in theme.SPARE), theme.FAMILIES["snapkv"][0])


def styled(names: Sequence[str], **fixed: tuple[str, list[int]]) -> list[Style]:
    """Lines in the palette's order, each with a shape of its own; an oracle, random pages and full attention look as in the report."""
    kin = {"oracle": "oracle", "random": "random_read", "full": "full"}
    out: list[Style] = []
    rest = iter(_COLOURS * 2)
    taken = {theme.FAMILIES[f][3] for start, f in kin.items() if any(n.startswith(start) for n in names)}
    free = [x for x in theme.SHAPES if x not in taken]
    for i, name in enumerate(names):
        family = next((f for start, f in kin.items() if name.startswith(start)), None)
        colour, dash = (
            (theme.FAMILIES[family][0], theme.FAMILIES[family][2])
            if family
            else (next(rest), [1, 0] if i < len(_COLOURS) else [6, 3])
        )
        twin = family is not None and any(s.colour == colour for s in out)
        shape = theme.FAMILIES[family][3] if family and not twin else free[i % len(free)]
        out.append(Style(name, name, *fixed.get(name, (colour, dash)), shape))
    return out


def grid(
    panel: Callable[[str, str], alt.Chart | alt.LayerChart], cells: Sequence[str], measures: Sequence[str], said: str
) -> alt.VConcatChart:
    """A column a cell, its name above, and a row a measure; of a single cell three measures stand in a row."""
    rows = [[(c, m) for c in cells] for m in measures]
    if len(cells) == 1:
        rows = [[(cells[0], m) for m in measures[i : i + 3]] for i in range(0, len(measures), 3)]
    drawn = []
    for row in rows:
        given = [{"title": alt.Title(c, fontSize=12, offset=22)} if m == measures[0] else {} for c, m in row]
        each = [panel(c, m).properties(width=WIDTH, height=HEIGHT, **more) for (c, m), more in zip(row, given, strict=True)]
        drawn.append(alt.hconcat(*each, spacing=GAP, bounds="flush"))
    return alt.vconcat(*drawn, spacing=34, description=said)
