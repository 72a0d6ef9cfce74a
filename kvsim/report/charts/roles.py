"""Is the loss on the question or on the answer? The measures by the role of the query's token, and by context."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import statistic_menu
from kvsim.report.charts.measure import layered, noise, quantity, tooltip
from kvsim.report.charts.rows import ROW, policy_axis, policy_colour
from kvsim.report.theme import STEPS, TICK, Style

MEASURES = ("rel_l2", "evidence_recall", "far_recall")
SHAPES = ("square", "circle", "diamond", "triangle-up")


def by_role(data: pl.DataFrame, roles: Sequence[str], look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """data (policy, role in words, statistic, the measures) -> one mark per policy and role, a panel per measure."""
    colours = theme.few(roles, [c[0] for c in STEPS][: len(roles)])
    shapes = theme.few(roles, SHAPES[: len(roles)])
    marks = alt.Chart(theme.prepare(data)).transform_filter("datum.statistic === statistic")
    marks = marks.mark_point(filled=True, size=80, opacity=1)
    marks = marks.encode(color=alt.Color("role:N", **colours), shape=alt.Shape("role:N", **shapes))
    return (
        _panels(data, marks, look, floor, "role")
        .add_params(statistic_menu())
        .properties(
            description="Output error, evidence recall and far recall of each policy, apart for each role of the query's token."
        )
    )


def by_context(each: pl.DataFrame, whole: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """each (policy, request, the measures), whole (policy, the measures) -> a tick per context, a dot for all of them together."""
    ticks = alt.Chart(theme.prepare(each)).mark_tick(aria=False, thickness=1, color=TICK[0], opacity=0.8)
    dots = alt.Chart(theme.prepare(whole)).mark_point(filled=True, size=80, opacity=1).encode(color=policy_colour(look))
    both = pl.concat([each.select(MEASURES), whole.select(MEASURES)])
    return _panels(both, layered(ticks, dots), look, floor, None).properties(
        description="Output error, evidence recall and far recall of each policy: a tick per context, a dot over all contexts."
    )


def _panels(
    data: pl.DataFrame, marks: alt.Chart | alt.LayerChart, look: Sequence[Style], floor: Floor | None, also: str | None
) -> alt.HConcatChart:
    panels: list[alt.LayerChart] = []
    for measure in [m for m in MEASURES if data[m].is_not_null().any()]:
        x = quantity(alt.X, measure, data[measure])
        said = tooltip([measure], **({also: also} if also else {}))
        behind = noise(floor, x) if measure == "rel_l2" else []
        panel = layered(*behind, marks.encode(x=x, y=policy_axis(look, named=not panels), tooltip=said))
        panels.append(panel.properties(width=260, height=ROW * len(look)))
    return alt.hconcat(*panels, spacing=26)
