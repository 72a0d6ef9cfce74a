"""Do neighbouring layers read the same pages, and is every piece of evidence read?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy
from kvsim.report.charts.measure import layered, tooltip
from kvsim.report.charts.rows import ROW, policy_axis, spread_panel
from kvsim.report.theme import STEPS, Style

PIECES = {
    "any_span_read": ("of at least one piece", "diamond", STEPS[1]),
    "all_spans_read": ("of every piece", "circle", STEPS[0]),
}


def pages_alike(found: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """found (policy, distance, jaccard, chance) -> a line per policy over the distance of layers, and a bar where chance would be."""
    focus, opacity = focus_on_policy()
    x = alt.X("distance:O", title="layers apart", axis=alt.Axis(labelAngle=0))
    y = alt.Y("jaccard:Q", title="pages both read ÷ pages either read", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis())
    channels = theme.policy_channels(look, "line")
    said = [*tooltip((), distance="layers apart"), *(alt.Tooltip(f"{n}:Q", format=".1%") for n in ("jaccard", "chance"))]
    base = alt.Chart(theme.prepare(found)).encode(x=x, opacity=opacity, tooltip=said)
    line = base.mark_line(aria=False, point=True).encode(y=y, **channels)
    chance = base.mark_tick(aria=False, thickness=2, size=18).encode(y=alt.Y("chance:Q"), color=channels["color"])
    return layered(
        line.add_params(focus),
        chance,
        width=520,
        height=260,
        description="How alike the pages are that two layers read at one step, by their distance, beside chance.",
    )


def pieces_read(found: pl.DataFrame, spread: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """found (policy, what, share), spread (policy, rel_l2 with tail and worst) -> a mark for any and for every piece, output error beside."""
    kinds, shapes, colours = zip(*PIECES.values(), strict=True)
    x = alt.X(
        "share:Q", title="share of heads and steps that read some", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis()
    )
    marks = alt.Chart(theme.prepare(found)).mark_point(filled=True, size=80, opacity=1)
    marks = marks.encode(
        x=x,
        y=policy_axis(look),
        shape=alt.Shape("what:N", **theme.few(kinds, shapes)),
        color=alt.Color("what:N", **theme.few(kinds, [c[0] for c in colours])),
        tooltip=["policy:N", alt.Tooltip("what:N", title=" "), alt.Tooltip("share:Q", format=".1%")],
    )
    error = spread_panel(spread, "rel_l2", look, floor, named=False)
    size = {"height": ROW * len(look)}
    return (
        alt.hconcat(layered(marks, width=520, **size), error.properties(width=300, **size), spacing=28)
        .resolve_scale(color="independent")
        .properties(description="How often a policy read something of any and of every piece of evidence, and its output error.")
    )
