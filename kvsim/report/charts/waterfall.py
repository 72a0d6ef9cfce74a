"""What became of the dense attention mass, as steps that fall from all of it to what was read as it is."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.theme import FATES, TICK

WHOLE = "dense attention"
FALLS = {  # column: what it is called, in the order of falling
    "evicted": "gone for good",
    "unread": "kept, not read",
    "sink": "learned sink",
    "host": "read from the host",
    "coded": "read, coded",
    "exact": "read, full precision",
}


def waterfall(parts: pl.DataFrame) -> alt.LayerChart:
    """parts (columns of FALLS; shares that sum to 1), their mean over rows -> one bar a part, each beginning where the one before ends."""
    there = [n for n in FALLS if n in parts.columns and parts[n].max()]
    return falling(alt.Chart(theme.prepare(parts)), there, [f"datum.{n}" for n in there]).properties(
        width=430,
        height=190,
        description="Dense attention mass: evicted, not read, read in codes, read as it is; the parts add up to all.",
    )


def falling(base: alt.Chart, there: Sequence[str], values: Sequence[str]) -> alt.LayerChart:
    """The same of rows whose parts are expressions: one of `values` for each column in `there`."""
    names = [WHOLE, *(FALLS[n] for n in there)]
    rows = (
        base.transform_calculate(part=repr(names), value=f"[1, {', '.join(values)}]", order=f"sequence({len(names)})")
        .transform_flatten(["part", "value", "order"])
        .transform_filter("isValid(datum.value)")
        .transform_aggregate(value="mean(value)", groupby=["part", "order"])
        .transform_window([alt.WindowFieldDef(op="sum", field="value", **{"as": "sum"})], sort=[alt.SortField("order")])  # type: ignore[arg-type]
        .transform_calculate(
            low="datum.order === 0 ? 0 : 2 - datum.sum", high="datum.order === 0 ? 1 : 2 - datum.sum + datum.value"
        )
    )
    colours = [TICK[0], *(FATES[n][0] for n in names[1:])]
    x = alt.X(
        "part:N",
        sort=names,
        title=None,
        scale=alt.Scale(domain=names),
        axis=alt.Axis(labelAngle=0, labelExpr="split(datum.label, ', ')", labelLimit=90),
    )
    y = alt.Y(
        "low:Q",
        title="dense attention mass",
        scale=alt.Scale(domain=[0, 1.08], nice=False),
        axis=alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1]),
    )
    said = ["part:N", alt.Tooltip("value:Q", format=".2%")]
    colour = alt.Color("part:N", scale=alt.Scale(domain=names, range=colours), legend=None)
    bars = rows.mark_bar().encode(x=x, y=y, y2="high:Q", color=colour, tooltip=said)
    numbers = rows.mark_text(baseline="bottom", dy=-3, aria=False).encode(x=x, y="high:Q", text=alt.Text("value:Q", format=".1%"))
    return layered(bars, numbers)
