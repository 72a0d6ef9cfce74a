"""Which parts of the context are read? Position across, one row per policy, evidence framed."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.charts.rows import policy_axis
from kvsim.report.theme import EVIDENCE, Style

WIDTH = 960


def read_by_position(cells: pl.DataFrame, evidence: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """cells (policy, start, stop, share), evidence (start, stop, label) -> the share of heads and steps that read each position."""
    last, tokens = int(cells["stop"].max()), int((cells["stop"] - cells["start"]).max())  # type: ignore[arg-type]
    width = -(-last // tokens) * max(1, WIDTH * tokens // last)  # whole pixels a cell, or its edges show as hairlines
    x = alt.X(
        "start:Q", title="position in the context (tokens)", scale=alt.Scale(domain=[0, -(-last // tokens) * tokens], nice=False),
        axis=alt.Axis(format=",d", tickCount=10),
    )  # fmt: skip
    colour = alt.Color(
        "share:Q",
        title="share of heads and steps that read it",
        scale=alt.Scale(domain=[0, 1], scheme="viridis"),
        legend=alt.Legend(format=".0%", titleOrient="left"),
    )
    said = [
        "policy:N",
        alt.Tooltip("start:Q", title="from position"),
        alt.Tooltip("stop:Q", title="to position"),
        alt.Tooltip("share:Q", format=".1%"),
    ]
    base = alt.Chart(theme.prepare(cells)).mark_rect(aria=False)
    strips = base.encode(x=x, x2="stop:Q", y=policy_axis(look).axis(alt.Axis(grid=False)), color=colour, tooltip=said)
    return layered(
        strips,
        *evidence_frames(evidence),
        width=width,
        height=26 * len(look),
        description="How often each part of the context is read, one row per policy, evidence framed.",
    )


def evidence_frames(spans: pl.DataFrame, named: bool = True) -> list[alt.Chart]:
    """Frames around evidence (start, stop, label) over the whole height, the label above."""
    if spans.is_empty():
        return []
    base = alt.Chart(theme.prepare(spans)).encode(x=alt.X("start:Q"))
    frame = base.mark_rect(aria=False, fill=None, stroke=EVIDENCE[0], strokeWidth=2).encode(x2="stop:Q")
    text = base.mark_text(align="left", baseline="bottom", dy=-3, fontWeight=600, color=EVIDENCE[0], limit=200, aria=False)
    return [frame, text.encode(y=alt.value(0), text="label:N")] if named else [frame]
