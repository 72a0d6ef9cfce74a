"""What did one head keep and read? Position across, decode steps down, one strip per policy, evidence framed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.theme import EVIDENCE, STATES

WIDTH = 1000


class Extent(NamedTuple):
    """What a strip spans: cells across and tokens a cell; first and last decode step."""

    cells: int
    tokens: int
    first: int
    last: int


def kept_and_read(strips: Sequence[tuple[str, pl.DataFrame]], evidence: pl.DataFrame, extent: Extent) -> alt.VConcatChart:
    """strips (title, rectangles of metrics.raster), evidence (start, stop, label) -> one strip under the other."""
    spans = theme.prepare(evidence)
    width = extent.cells * max(1, WIDTH // extent.cells)  # whole pixels a cell, or its edges show as hairlines
    charts: list[alt.Chart | alt.LayerChart] = []
    for i, (title, rows) in enumerate(strips):
        strip: alt.Chart | alt.LayerChart = _strip(rows, extent, last=i == len(strips) - 1)
        if evidence.height:
            strip = alt.LayerChart(layer=[strip, *_evidence(spans, named=i == 0)])
        charts.append(strip.properties(width=width, height=80, title=alt.Title(title, fontSize=12, offset=6)))
    return (
        alt.vconcat(*charts, spacing=14)
        .resolve_scale(color="shared", opacity="shared")
        .properties(
            description="One head, position across and decode steps down: what each policy read, kept unread, or no longer had."
        )
    )


def _strip(rows: pl.DataFrame, extent: Extent, last: bool) -> alt.Chart:
    """Only the last strip names its positions."""
    across = alt.Axis(format=",d", tickCount=10, labels=last, title="position in the context (tokens)" if last else None)
    steps = list(dict.fromkeys((extent.first, extent.last)))
    down = alt.Axis(values=steps, grid=False, title=None, labelExpr="'step ' + datum.label")
    return (
        alt.Chart(theme.prepare(rows))
        .mark_rect(aria=False)
        .encode(
            x=alt.X("start:Q", scale=alt.Scale(domain=[0, extent.cells * extent.tokens], nice=False), axis=across),
            x2="stop:Q",
            y=alt.Y("first:Q", scale=alt.Scale(domain=[extent.last + 1, extent.first], nice=False), axis=down),
            y2="last:Q",
            color=alt.Color(
                "state:N",
                title=None,
                sort=list(STATES),
                scale=alt.Scale(domain=list(STATES), range=[c for c, _ in STATES.values()]),
            ),
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


def _evidence(spans: pl.DataFrame, named: bool) -> list[alt.Chart]:
    base = alt.Chart(spans).encode(x="start:Q")
    frame = base.mark_rect(aria=False, fill=None, stroke=EVIDENCE[0], strokeWidth=2).encode(x2="stop:Q")
    text = base.mark_text(align="left", baseline="bottom", dy=-3, fontWeight=600, color=EVIDENCE[0], limit=200)
    return [frame, text.encode(y=alt.value(0), text="label:N")] if named else [frame]
