"""What quality does a budget buy? Recall is never drawn without output error beside it."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report.theme import BYTES, LEAST_ERROR, TOKENS, Style, dash_by_rank, doublings, error_axis, error_scale, policy_channels, prepare

TITLES = {
    "mass_recall": "attention-mass recall",
    "rel_l2": "output error (relative L2, log scale)",
    "evidence_recall": "evidence recall",
    "far_recall": "far recall (without the first 4 and the last 64 tokens)",
}
X = {
    "tokens": ("read per query head and step (tokens, log scale)", TOKENS),
    "bytes": ("read per kv head and step (bytes, log scale)", BYTES),
}
TOOLTIP = [
    alt.Tooltip("policy:N"),
    alt.Tooltip("tokens:Q", format=",.0f", title="tokens read per query head"),
    alt.Tooltip("bytes:Q", format=",.0f", title="bytes read per kv head"),
    alt.Tooltip("mass_recall:Q", format=".3f"),
    alt.Tooltip("far_recall:Q", format=".3f"),
    alt.Tooltip("evidence_recall:Q", format=".3f"),
    alt.Tooltip("rel_l2:Q", format=".3g", title="output error"),
]


def quality_against(x: str, curves: pl.DataFrame, points: pl.DataFrame, look: Sequence[Style]) -> alt.ConcatChart:
    """curves, points (policy label, steps, tokens, bytes, the four measures) -> one panel per measure that has data, against `x`.

    Lines: every budget of a read policy. Points: each policy at the budget it ran with. `steps` names the decode steps a row is over;
    with several of them a menu chooses."""
    curves, points = (f.with_columns(error=pl.col("rel_l2").clip(LEAST_ERROR, None)) for f in (curves, points))
    rank = {s.label: i for i, s in enumerate(look)}
    curves = curves.with_columns(rank=pl.col("policy").replace_strict(rank, return_dtype=pl.Int32))
    both = pl.concat([curves.select(points.columns), points])
    axis = _x_axis(x, both)
    focus = alt.selection_point("focus", fields=["policy"], bind="legend")
    chosen = both["steps"].unique(maintain_order=True).to_list()
    menu = alt.param("steps", value=chosen[0], bind=alt.binding_select(options=chosen, name="decode steps: ")) if len(chosen) > 1 else None
    panels = [
        _panel(measure, axis, prepare(curves), prepare(points), look, focus, menu)
        for measure in TITLES
        if both[measure].is_not_null().any() or measure in ("mass_recall", "rel_l2")
    ]
    panels[0] = panels[0].add_params(focus)
    chart = alt.concat(*panels, columns=2, spacing=34)
    return (chart.add_params(menu) if menu is not None else chart).properties(
        description=f"Panels of {', '.join(m.replace('_', ' ') for m in TITLES)} against {x} {X[x][0]}, one line or point per policy."
    )


def _x_axis(x: str, both: pl.DataFrame) -> alt.X:
    title, labels = X[x]
    told = both[x].drop_nulls()
    low, high = (float(told.min()), float(told.max())) if len(told) else (1.0, 2.0)  # type: ignore[arg-type]
    ticks = doublings(low, high)
    scale = alt.Scale(type="log", base=2, nice=False, domain=[max(low, 1) / 1.08, max(high, 2) * 1.08])
    return alt.X(f"{x}:Q", title=title, scale=scale, axis=alt.Axis(values=ticks, labelExpr=labels, labelOverlap="greedy"))


def _panel(measure: str, x: alt.X, curves: pl.DataFrame, points: pl.DataFrame, look: Sequence[Style], focus: alt.Parameter, menu: alt.Parameter | None) -> alt.LayerChart:
    if measure == "rel_l2":
        y = alt.Y("error:Q", scale=error_scale(pl.concat([curves["error"], points["error"]])), axis=error_axis())
    else:
        y = alt.Y(f"{measure}:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5))
    y = y.title(TITLES[measure])
    channels = policy_channels(look, "point")
    lines = alt.Chart(curves).mark_line(aria=False).encode(x=x, y=y, color=channels["color"], strokeDash=dash_by_rank(look), detail="policy:N", tooltip=TOOLTIP)
    spots = alt.Chart(points).mark_point(filled=True, size=80).encode(x=x, y=y, tooltip=TOOLTIP, **channels)
    dim = alt.when(focus).then(alt.value(1)).otherwise(alt.value(0.1))
    layers = [lines.encode(opacity=dim), spots.encode(opacity=dim)]
    if menu is not None:
        layers = [c.transform_filter("datum.steps == steps") for c in layers]
    return alt.layer(*layers).properties(width=470, height=260)
