"""What did one head keep and read? Position across, decode steps down, one strip per policy, evidence marked."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report.theme import EVIDENCE, STATES, prepare, tokens_axis

WIDTH = 860


def kept_and_read(strips: Sequence[tuple[str, pl.DataFrame]], evidence: pl.DataFrame, total: int, steps: tuple[int, int]) -> alt.VConcatChart:
    """strips (title, rectangles of metrics.raster), evidence (start, stop, label), tokens in all, first and last step -> strips."""
    x = alt.X("start:Q", title=None, scale=alt.Scale(domain=[0, total], nice=False), axis=tokens_axis(tickCount=10))
    y = alt.Y(
        "first:Q",
        title=None,
        scale=alt.Scale(domain=[steps[1] + 1, steps[0]], nice=False),
        axis=alt.Axis(format="d", values=[steps[0], steps[1]], grid=False),
    )
    charts = [_strip(title, cells, x, y) for title, cells in strips]
    if evidence.height:
        marks = _evidence(prepare(evidence), x)
        charts = [alt.layer(c, *(marks if i == 0 else marks[:1])).properties(title=c.title) for i, c in enumerate(charts)]
    sized = [c.properties(width=WIDTH, height=80) for c in charts]
    sized[-1] = sized[-1].properties(height=80)
    return alt.vconcat(*sized, spacing=16).resolve_scale(color="shared", opacity="shared").properties(
        description="For one head: position in the context across, decode steps down; what each policy read, kept unread, or no longer had."
    )


def _strip(title: str, cells: pl.DataFrame, x: alt.X, y: alt.Y) -> alt.Chart:
    states = list(STATES)
    return (
        alt.Chart(prepare(cells), title=alt.Title(title, fontSize=12, offset=6))
        .mark_rect(aria=False)
        .encode(
            x=x,
            x2="stop:Q",
            y=y,
            y2="last:Q",
            color=alt.Color("state:N", title=None, sort=states, scale=alt.Scale(domain=states, range=[STATES[s][0] for s in states])),
            opacity=alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0.12, 1]), legend=None),
            tooltip=[
                alt.Tooltip("start:Q", title="from position"),
                alt.Tooltip("stop:Q", title="to position"),
                alt.Tooltip("first:Q", title="from step"),
                alt.Tooltip("last:Q", title="to step"),
                alt.Tooltip("state:N"),
                alt.Tooltip("share:Q", format=".0%", title="share of its tokens"),
            ],
        )
    )


def _evidence(spans: pl.DataFrame, x: alt.X) -> list[alt.Chart]:
    base = alt.Chart(spans).encode(x=x)
    frame = base.mark_rect(aria=False, fill=None, stroke=EVIDENCE[0], strokeWidth=2).encode(x2="stop:Q")
    return [frame, base.mark_text(align="left", baseline="bottom", dy=-3, fontWeight=600, color=EVIDENCE[0]).encode(y=alt.value(0), text="label:N")]
