"""When is evidence missed? Evidence recall and output error along the decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.theme import EVIDENCE, Style

WIDTH = 1000


def evidence_by_step(steps: pl.DataFrame, bands: pl.DataFrame, look: Sequence[Style]) -> alt.VConcatChart:
    """steps (policy, role, step, evidence_recall, rel_l2, evidence_dense), bands (role, first, last) -> panels over the decode steps.

    Evidence recall, where a dot grows with the dense attention mass on evidence; output error; that mass itself. bands name the role
    of the query's token; none when the roles of several contexts overlap."""
    data = theme.prepare(theme.floored(steps))
    focus = alt.selection_point("focus", fields=["policy"], bind="legend")
    channels = theme.policy_channels(look, "line")
    x = alt.X("step:Q", title=None, scale=alt.Scale(nice=False), axis=alt.Axis(format="d", tickMinStep=1))
    base = alt.Chart(data).encode(
        x=x,
        detail=["policy:N", "role:N"],
        opacity=alt.when(focus).then(alt.value(1)).otherwise(alt.value(0.1)),
        tooltip=[
            "policy:N",
            alt.Tooltip("step:Q", title="decode step"),
            alt.Tooltip("role:N", title="query's token"),
            alt.Tooltip("evidence_recall:Q", format=".1%", title="evidence recall"),
            alt.Tooltip("rel_l2:Q", format=".3g", title="output error"),
            _mass_tooltip(),
        ],
    )
    lines = base.mark_line(aria=False, strokeWidth=1.4).encode(**channels)
    share = alt.Y("evidence_recall:Q", title="evidence recall", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis())
    size = alt.Size("evidence_dense:Q", scale=alt.Scale(range=[2, 110]), legend=None)
    dots = base.mark_circle(aria=False).encode(y=share, size=size, color=channels["color"])
    recall = alt.layer(*(_bands(bands) if bands.height > 1 else []), lines.encode(y=share), dots).add_params(focus)
    error = lines.encode(
        y=alt.Y("error:Q", title=theme.ERROR_TITLE, scale=theme.error_scale(data["error"]), axis=theme.error_axis())
    )
    heights = ((recall, 220), (error, 160), (_mass(data, x), 60))
    return (
        alt.vconcat(*(c.properties(width=WIDTH, height=h) for c, h in heights), spacing=36)
        .resolve_scale(x="shared")
        .properties(
            description="Evidence recall and output error per decode step, one line per policy, over the dense mass on evidence."
        )
    )


def _mass(data: pl.DataFrame, x: alt.X) -> alt.Chart:
    mass = data.group_by("step").agg(pl.col("evidence_dense").mean()).sort("step")
    y = alt.Y(
        "evidence_dense:Q", title="dense attention mass on evidence (mean of heads)", axis=alt.Axis(format="~%", tickCount=3)
    )
    area = alt.Chart(theme.prepare(mass)).mark_area(color=EVIDENCE[0], opacity=0.6, interpolate="step")
    return area.encode(x=x.title("decode step"), y=y, tooltip=[alt.Tooltip("step:Q", title="decode step"), _mass_tooltip()])


def _mass_tooltip() -> alt.Tooltip:
    return alt.Tooltip("evidence_dense:Q", format=".2%", title="dense mass on evidence")


def _bands(bands: pl.DataFrame) -> list[alt.Chart]:
    """Alternating shades behind the steps of each role, its name at the foot."""
    left, right = (pl.col("first") - 0.5).alias("left"), (pl.col("last") + 0.5).alias("right")
    base = alt.Chart(theme.prepare(bands.with_row_index("n").select("n", "role", left, right))).encode(x=alt.X("left:Q"))
    shade = alt.when("datum.n % 2 == 0").then(alt.value(0.08)).otherwise(alt.value(0.2))
    name = base.mark_text(align="left", baseline="bottom", dx=4, dy=-4, fontStyle="italic")
    return [
        base.mark_rect(aria=False, color="#8A929B").encode(x2="right:Q", opacity=shade),
        name.encode(y=alt.value("height"), text="role:N"),
    ]
