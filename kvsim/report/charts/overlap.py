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


def pages_reused(found: pl.DataFrame, whose: Sequence[str], look: Sequence[Style]) -> alt.HConcatChart:
    """found (policy, distance, whose, pages, missed, missed_own, evidence_...) -> a panel per entry of `whose`: a line per policy over the
    distance of layers, and a bar where the layer's own pages lie."""
    focus, opacity = focus_on_policy()
    channels = theme.policy_channels(look, "line")
    columns = {"missed": "missed", "missed_own": "with its own pages"}
    columns |= {"evidence_missed": "evidence missed", "evidence_missed_own": "evidence, own pages"}
    said = [*tooltip((), distance="layers apart"), alt.Tooltip("pages:Q", format=".1f")]
    said += [alt.Tooltip(f"{n}:Q", format=".2%", title=title) for n, title in columns.items() if found[n].is_not_null().any()]
    x = alt.X("distance:O", title="layers below", axis=alt.Axis(labelAngle=0))
    panels = []
    for one in whose:
        base = alt.Chart(theme.prepare(found.filter(pl.col("whose") == one))).encode(x=x, opacity=opacity, tooltip=said)
        scale, axis = alt.Scale(zero=True), alt.Axis(format=".0%", tickCount=5)
        y = alt.Y("missed:Q", title=["missed mass with the pages", one], scale=scale, axis=axis)
        line = base.mark_line(aria=False, point=True).encode(y=y, **channels)
        own = base.mark_tick(aria=False, thickness=2, size=18).encode(y=alt.Y("missed_own:Q"), color=channels["color"])
        panels.append(layered(line, own, width=300, height=260))
    return (
        alt.hconcat(*(p.add_params(focus) if i == 0 else p for i, p in enumerate(panels)), spacing=40)
        .resolve_scale(y="shared")
        .properties(
            description="What a layer would miss with the pages of a layer below it, by their distance, beside its own pages."
        )
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
