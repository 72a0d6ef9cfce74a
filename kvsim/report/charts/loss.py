"""Where does the loss come from? The attention mass by its fate, and the layers and heads that lose most."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report.theme import FATES, LEAST_ERROR, PICKED, Style, error_axis, error_scale, prepare

PERCENT = alt.Axis(format=".0%", tickCount=5)


def mass_by_fate(parts: pl.DataFrame, quality: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """parts (policy, part, order, mass), quality (policy, rel_l2) -> bars of the dense attention mass by fate, output error beside them."""
    domain = [p for p in FATES if p in set(parts.filter(pl.col("mass") > 0)["part"])]
    shown = prepare(parts.filter(pl.col("part").is_in(domain)))
    y = alt.Y("policy:N", sort=[s.label for s in look], title=None)
    height = 22 * len(look)
    bars = (
        alt.Chart(shown)
        .mark_bar()
        .encode(
            x=alt.X("mass:Q", title="dense attention mass", scale=alt.Scale(domain=[0, 1]), axis=PERCENT),
            y=y,
            order="order:Q",
            color=alt.Color("part:N", title=None, sort=domain, scale=alt.Scale(domain=domain, range=[FATES[p][0] for p in domain])),
            tooltip=["policy:N", alt.Tooltip("part:N", title="fate"), alt.Tooltip("mass:Q", format=".2%")],
        )
        .properties(width=560, height=height)
    )
    errors = prepare(quality.select("policy", "rel_l2").with_columns(error=pl.col("rel_l2").clip(LEAST_ERROR, None)))
    dots = (
        alt.Chart(errors)
        .mark_point(filled=True, size=80, opacity=1, color=PICKED[0])
        .encode(
            x=alt.X("error:Q", title="output error (relative L2, log scale)", scale=error_scale(errors["error"]), axis=error_axis()),
            y=y.axis(alt.Axis(labels=False, ticks=False, grid=True)),
            tooltip=["policy:N", alt.Tooltip("rel_l2:Q", format=".3g", title="output error")],
        )
        .properties(width=300, height=height)
    )
    return alt.hconcat(bars, dots, spacing=28).properties(
        description="Stacked bars of dense attention mass by what became of it, one per policy, with the output error of the policy beside."
    )


def layer_head_map(cells: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """cells (policy, layer, q_head, rel_l2, missed_mass, evidence_recall) -> a map of output error by layer and query head for one
    policy, chosen from a menu; a click on a cell shows that head under every policy beside it."""
    labels = [s.label for s in look]
    data = prepare(cells.with_columns(error=pl.col("rel_l2").clip(LEAST_ERROR, None)))
    worst = data.filter(pl.col("policy") == labels[0]).sort("rel_l2", descending=True, nulls_last=True).row(0, named=True)
    shown = alt.param("shown", value=labels[0], bind=alt.binding_select(options=labels, name="policy on the map: "))
    pick = alt.selection_point("pick", fields=["layer", "q_head"], toggle=False, clear="dblclick", value=[{n: worst[n] for n in ("layer", "q_head")}])
    layers, heads = data["layer"].n_unique(), data["q_head"].n_unique()
    low, high = _range(data["error"])
    where = [alt.Tooltip("layer:O"), alt.Tooltip("q_head:O", title="query head"), alt.Tooltip("policy:N")]
    values = [
        alt.Tooltip("rel_l2:Q", format=".3g", title="output error"),
        alt.Tooltip("missed_mass:Q", format=".2%", title="missed mass"),
        alt.Tooltip("evidence_recall:Q", format=".1%", title="evidence recall"),
    ]
    grid = (
        alt.Chart(data)
        .transform_filter("datum.policy == shown")
        .mark_rect(cursor="pointer")
        .encode(
            x=alt.X("q_head:O", title="query head", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("layer:O", title=None, axis=alt.Axis(labelExpr="'layer ' + datum.label", labelOverlap=True)),
            color=alt.Color(
                "error:Q",
                title="output error",
                scale=alt.Scale(type="log", domain=[low, high], clamp=True, scheme="viridis"),
                legend=alt.Legend(format="~g", values=[0.001, 0.01, 0.1, 1, 10], orient="bottom", offset=8),
            ),
            stroke=alt.when(pick, empty=False).then(alt.value(PICKED[0])).otherwise(alt.value(None)),
            strokeWidth=alt.when(pick, empty=False).then(alt.value(3)).otherwise(alt.value(0)),
            tooltip=where + values,
        )
        .add_params(pick)
        .properties(width=_span(heads, 400), height=max(_span(layers, 400), 22 * len(look)))
    )
    map_ = alt.hconcat(grid, title=alt.Title("Output error by layer and query head", subtitle="click a cell; double click shows all heads"))
    y = alt.Y("policy:N", sort=labels, title=None)
    panels = [
        _detail(data, pick, y, "error", alt.X("error:Q", title="output error (log scale)", scale=error_scale(data["error"]), axis=error_axis()), where + values),
        _detail(data, pick, y.axis(None), "missed_mass", alt.X("missed_mass:Q", title="missed mass", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", values=[0, 0.5, 1])), where + values),
    ]
    said = "isDefined(pick.layer) ? 'Layer ' + pick.layer + ', query head ' + pick.q_head + ' under every policy' : 'All heads under every policy'"
    detail = alt.hconcat(*(p.properties(width=230, height=22 * len(look)) for p in panels), spacing=18).properties(
        title=alt.Title(alt.expr(said), subtitle="dot: the head picked on the map; ticks: the other heads")
    )
    return alt.hconcat(map_, detail, spacing=40).add_params(shown).properties(
        description="Map of output error by layer and query head for one policy, and the picked head under every policy beside it."
    )


def _detail(data: pl.DataFrame, pick: alt.Parameter, y: alt.Y, field: str, x: alt.X, tooltip: list[alt.Tooltip]) -> alt.LayerChart:
    base = alt.Chart(data).encode(x=x, y=y)
    ticks = base.mark_tick(opacity=0.4, thickness=1, color="#8A929B", aria=False)
    dots = base.mark_point(filled=True, size=80, opacity=1, color=PICKED[0]).encode(tooltip=tooltip).transform_filter(pick)
    return alt.layer(ticks, dots)


def _range(errors: pl.Series) -> tuple[float, float]:
    """The middle nine tenths, at least a decade wide, so that one head does not flatten the map."""
    low, high = (errors.quantile(q) or LEAST_ERROR for q in (0.05, 0.95))
    return low, max(high, 10 * low)


def _span(cells: int, most: int) -> int:
    return max(160, min(cells * 24, most), cells * 9)
