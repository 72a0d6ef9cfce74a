"""What did one head keep and read? Position across, decode steps down, one strip per policy, a menu for the head, evidence framed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.charts.profile import evidence_frames
from kvsim.report.theme import STATES

WIDTH = 1000


class Extent(NamedTuple):
    """What a strip spans: cells across and tokens a cell; first and last decode step."""

    cells: int
    tokens: int
    first: int
    last: int


class Strip(NamedTuple):
    """One policy at one head: `said` stands at the right above it; rows are rectangles of metrics.raster."""

    head: str
    policy: str
    said: str
    rows: pl.DataFrame


def kept_and_read(strips: Sequence[Strip], evidence: pl.DataFrame, extent: Extent) -> alt.VConcatChart:
    """strips, evidence (start, stop, label) -> a strip per policy under one another, for the head that a menu names."""
    heads, policies = (list(dict.fromkeys(x)) for x in ([s.head for s in strips], [s.policy for s in strips]))
    width = extent.cells * max(1, WIDTH // extent.cells)  # whole pixels a cell, or its edges show as hairlines
    charts = []
    for i, policy in enumerate(policies):
        mine = [s for s in strips if s.policy == policy]
        said = theme.prepare(pl.DataFrame({"head": [s.head for s in mine], "said": [s.said for s in mine]}))
        text = (
            alt.Chart(said).transform_filter("datum.head === head").mark_text(align="right", baseline="bottom", dy=-6, aria=False)
        )
        layers = [_strip(s, extent, last=i == len(policies) - 1) for s in mine]
        layers += [text.encode(x=alt.value("width"), y=alt.value(0), text="said:N"), *evidence_frames(evidence, named=i == 0)]
        title = alt.Title(policy, fontSize=12, offset=6)
        charts.append(layered(*layers, width=width, height=80, title=title))
    menu = alt.binding_select(options=heads, name="query head: ") if len(heads) > 1 else alt.Undefined
    return (
        alt.vconcat(*charts, spacing=14)
        .resolve_scale(color="shared", opacity="shared")
        .add_params(alt.param("head", value=heads[0], bind=menu))
        .properties(
            description="One head, position across and decode steps down: what each policy read, kept unread, or no longer had."
        )
    )


def _strip(strip: Strip, extent: Extent, last: bool) -> alt.Chart:
    """Only the last strip names its positions."""
    across = alt.Axis(format=",d", tickCount=10, labels=last, title="position in the context (tokens)" if last else None)
    steps = list(dict.fromkeys((extent.first, extent.last)))
    down = alt.Axis(values=steps, grid=False, title=None, labelExpr="'step ' + datum.label")
    states = theme.few(list(STATES), [c for c, _ in STATES.values()])
    return (
        alt.Chart(theme.prepare(strip.rows.with_columns(head=pl.lit(strip.head))))
        .transform_filter("datum.head === head")
        .mark_rect(aria=False)
        .encode(
            x=alt.X("start:Q", scale=alt.Scale(domain=[0, extent.cells * extent.tokens], nice=False), axis=across),
            x2="stop:Q",
            y=alt.Y("first:Q", scale=alt.Scale(domain=[extent.last + 1, extent.first], nice=False), axis=down),
            y2="last:Q",
            color=alt.Color("state:N", **states),
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
