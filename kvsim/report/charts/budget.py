"""What quality does a budget buy? Recall is never drawn without output error beside it."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.theme import Style

TITLES = {
    "mass_recall": "attention-mass recall",
    "rel_l2": theme.ERROR_TITLE,
    "evidence_recall": "evidence recall",
    "far_recall": "far recall (without the first 4 and the last 64 tokens)",
}
X = {
    "tokens": ("read per query head and step (tokens, log scale)", theme.TOKENS),
    "bytes": ("read per KV head and step (bytes, log scale)", theme.BYTES),
}
TOOLTIP = [
    alt.Tooltip("policy:N"),
    alt.Tooltip("tokens:Q", format=",.0f", title="tokens read per query head"),
    alt.Tooltip("bytes:Q", format=",.0f", title="bytes read per KV head"),
    alt.Tooltip("mass_recall:Q", format=".3f", title="mass recall"),
    alt.Tooltip("far_recall:Q", format=".3f", title="far recall"),
    alt.Tooltip("evidence_recall:Q", format=".3f", title="evidence recall"),
    alt.Tooltip("rel_l2:Q", format=".3g", title="output error"),
]


def quality_against(x: str, curves: pl.DataFrame, points: pl.DataFrame, look: Sequence[Style]) -> alt.ConcatChart:
    """curves, points (policy label, steps, tokens, bytes, the four measures) -> one panel per measure that has data, against `x`.

    Lines: every budget of a read policy. Points: each policy at the budget it ran with. `steps` names the decode steps a row is
    over; with several of them a menu chooses."""
    rank = {s.label: i for i, s in enumerate(look)}
    curves = theme.floored(curves).with_columns(rank=pl.col("policy").replace_strict(rank, return_dtype=pl.Int32))
    points = theme.floored(points)
    both = pl.concat([curves.select(points.columns), points])
    base = alt.Chart().encode(x=_x_axis(x, both[x]), tooltip=TOOLTIP)
    focus = alt.selection_point("focus", fields=["policy"], bind="legend")
    channels = theme.policy_channels(look, "point") | {"opacity": alt.when(focus).then(alt.value(1)).otherwise(alt.value(0.1))}
    shape = channels.pop("shape")
    lines = base.properties(data=theme.prepare(curves)).mark_line(aria=False)
    lines = lines.encode(detail="policy:N", strokeDash=theme.dash_by_rank(look), **channels)
    spots = base.properties(data=theme.prepare(points)).mark_point(filled=True, size=80).encode(shape=shape, **channels)
    choices = both["steps"].unique(maintain_order=True).to_list()
    if len(choices) > 1:
        lines, spots = (c.transform_filter("datum.steps === steps") for c in (lines, spots))
    told = [m for m in TITLES if both[m].is_not_null().any() or m in ("mass_recall", "rel_l2")]
    panels = [alt.layer(lines, spots).encode(y=_y_axis(m, both)).properties(width=470, height=260) for m in told]
    chart = alt.concat(panels[0].add_params(focus), *panels[1:], columns=2, spacing=34).properties(
        description=f"{', '.join(TITLES[m] for m in told)}: one panel each against {X[x][0]}, one line or point per policy."
    )
    if len(choices) == 1:
        return chart
    return chart.add_params(alt.param("steps", value=choices[0], bind=alt.binding_select(options=choices, name="decode steps: ")))


def _x_axis(x: str, values: pl.Series) -> alt.X:
    title, labels = X[x]
    low, high = theme.ends(values, (1.0, 2.0))
    low, high = (low / 2, high * 2) if high < 2 * low else (low / 1.08, high * 1.08)
    scale = alt.Scale(type="log", base=2, nice=False, domain=[max(low, 0.5), max(high, 1)])
    return alt.X(
        f"{x}:Q",
        title=title,
        scale=scale,
        axis=alt.Axis(values=theme.doublings(low, high), labelExpr=labels, labelOverlap="greedy"),
    )


def _y_axis(measure: str, both: pl.DataFrame) -> alt.Y:
    if measure == "rel_l2":
        return alt.Y("error:Q", title=TITLES[measure], scale=theme.error_scale(both["error"]), axis=theme.error_axis())
    return alt.Y(f"{measure}:Q", title=TITLES[measure], scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis())
