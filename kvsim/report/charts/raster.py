"""What did one head keep and read? Position across, decode steps down, one strip per policy, evidence marked."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report.theme import EVIDENCE, STATES, prepare

WIDTH = 1000


def kept_and_read(strips: Sequence[tuple[str, pl.DataFrame]], evidence: pl.DataFrame, cells: int, tokens: int, steps: tuple[int, int]) -> alt.VConcatChart:
    """strips (title, rectangles of metrics.raster), evidence (start, stop, label), cells across, tokens a cell, first and last step."""
    spans = prepare(evidence)
    strip = [_strip(title, rows, (0, cells * tokens), steps, last=i == len(strips) - 1) for i, (title, rows) in enumerate(strips)]
    if evidence.height:
        strip = [alt.layer(c, *_evidence(spans, named=i == 0)).properties(title=c.title) for i, c in enumerate(strip)]
    width = cells * max(1, WIDTH // cells)  # whole pixels a cell, or its edges show as hairlines
    return (
        alt.vconcat(*(c.properties(width=width, height=80) for c in strip), spacing=14)
        .resolve_scale(color="shared", opacity="shared")
        .properties(description="For one head: position in the context across, decode steps down; what each policy read, kept unread, or no longer had.")
    )


def _strip(title: str, rows: pl.DataFrame, positions: tuple[int, int], steps: tuple[int, int], last: bool) -> alt.Chart:
    across = alt.Axis(format=",d", tickCount=10, labels=last)
    down = alt.Axis(format="d", values=list(dict.fromkeys(steps)), grid=False, titleX=-30, titleY=96, titleAlign="left", titleBaseline="top")
    return (
        alt.Chart(prepare(rows), title=alt.Title(title, fontSize=12, offset=6))
        .mark_rect(aria=False)
        .encode(
            x=alt.X("start:Q", title="position in the context (tokens)" if last else None, scale=alt.Scale(domain=positions, nice=False), axis=across),
            x2="stop:Q",
            y=alt.Y("first:Q", title="decode step" if last else None, scale=alt.Scale(domain=[steps[1] + 1, steps[0]], nice=False), axis=down),
            y2="last:Q",
            color=alt.Color("state:N", title=None, sort=list(STATES), scale=alt.Scale(domain=list(STATES), range=[c for c, _ in STATES.values()])),
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
