"""Where does the loss come from? The attention mass by its fate, and the layers and heads that lose most."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.theme import FATES, PICKED, Style

ROW = 22  # pixels of one policy
PICK_TITLE = (
    "isDefined(pick.layer) ? 'Layer ' + pick.layer + ', query head ' + pick.q_head + ' under every policy'"
    " : 'All heads under every policy'"
)


def mass_by_fate(parts: pl.DataFrame, quality: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """parts (policy, part, order, mass), quality (policy, rel_l2) -> bars of the dense attention mass by fate, output error beside."""
    domain = [p for p in FATES if p in set(parts.filter(pl.col("mass") > 0)["part"])]
    y = alt.Y("policy:N", sort=[s.label for s in look], title=None)
    bars = (
        alt.Chart(theme.prepare(parts.filter(pl.col("part").is_in(domain))))
        .mark_bar()
        .encode(
            x=alt.X("mass:Q", title="dense attention mass", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis()),
            y=y,
            order="order:Q",
            color=alt.Color(
                "part:N", title=None, sort=domain, scale=alt.Scale(domain=domain, range=[FATES[p][0] for p in domain])
            ),
            tooltip=["policy:N", alt.Tooltip("part:N", title="fate"), alt.Tooltip("mass:Q", format=".2%")],
        )
    )
    errors = theme.prepare(theme.floored(quality.select("policy", "rel_l2")))
    dots = (
        alt.Chart(errors)
        .mark_point(filled=True, size=80, opacity=1, color=PICKED[0])
        .encode(
            x=alt.X("error:Q", title=theme.ERROR_TITLE, scale=theme.error_scale(errors["error"]), axis=theme.error_axis()),
            y=y.axis(alt.Axis(labels=False, ticks=False, grid=True)),
            tooltip=["policy:N", alt.Tooltip("rel_l2:Q", format=".3g", title="output error")],
        )
    )
    height = ROW * len(look)
    return alt.hconcat(
        bars.properties(width=560, height=height), dots.properties(width=300, height=height), spacing=28
    ).properties(
        description="Bars of the dense attention mass by what became of it, one per policy, with the policy's output error beside."
    )


def layer_head_map(cells: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """cells (policy, layer, q_head, rel_l2, missed_mass, evidence_recall) -> a map of output error by layer and query head for one
    policy, chosen from a menu; a click on a cell shows that head under every policy beside it."""
    labels = [s.label for s in look]
    data = theme.prepare(theme.floored(cells))
    worst = data.filter(pl.col("policy") == labels[0]).sort("rel_l2", descending=True, nulls_last=True).row(0, named=True)
    at_first = [{"layer": worst["layer"], "q_head": worst["q_head"]}]
    shown = alt.param("shown", value=labels[0], bind=alt.binding_select(options=labels, name="policy on the map: "))
    pick = alt.selection_point("pick", fields=["layer", "q_head"], toggle=False, clear="dblclick", value=at_first)
    grid = _grid(data, pick).properties(
        width=_span(data["q_head"].n_unique(), 400), height=max(_span(data["layer"].n_unique(), 400), ROW * len(look))
    )
    y = alt.Y("policy:N", sort=labels, title=None)
    error = alt.X("error:Q", title="output error (log scale)", scale=theme.error_scale(data["error"]), axis=theme.error_axis())
    missed = alt.X(
        "missed_mass:Q", title="missed mass", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", values=[0, 0.5, 1])
    )
    details = [
        _detail(data, pick, x, y_).properties(width=230, height=ROW * len(look)) for x, y_ in ((error, y), (missed, y.axis(None)))
    ]
    titled = (
        alt.hconcat(
            grid, title=alt.Title("Output error by layer and query head", subtitle="click a cell; a double click shows all heads")
        ),
        alt.hconcat(
            *details,
            spacing=18,
            title=alt.Title(alt.expr(PICK_TITLE), subtitle="dot: the head picked on the map; ticks: the others"),
        ),
    )
    return (
        alt.hconcat(*titled, spacing=40)
        .add_params(shown)
        .properties(
            description="Map of output error by layer and query head for one policy; the picked head under every policy beside it."
        )
    )


def _grid(data: pl.DataFrame, pick: alt.Parameter) -> alt.Chart:
    domain, decades = _colours(data["error"])
    picked = alt.when(pick, empty=False)
    return (
        alt.Chart(data)
        .transform_filter("datum.policy === shown")
        .mark_rect(cursor="pointer")
        .encode(
            x=alt.X("q_head:O", title="query head", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("layer:O", title=None, axis=alt.Axis(labelExpr="'layer ' + datum.label", labelOverlap=True)),
            color=alt.Color(
                "error:Q",
                title="output error",
                scale=alt.Scale(type="log", domain=domain, clamp=True, scheme="viridis"),
                legend=alt.Legend(format="~g", values=decades, orient="bottom", offset=8),
            ),
            stroke=picked.then(alt.value(PICKED[0])).otherwise(alt.value(None)),
            strokeWidth=picked.then(alt.value(3)).otherwise(alt.value(0)),
            tooltip=_tooltip(),
        )
        .add_params(pick)
    )


def _detail(data: pl.DataFrame, pick: alt.Parameter, x: alt.X, y: alt.Y) -> alt.LayerChart:
    base = alt.Chart(data).encode(x=x, y=y)
    ticks = base.mark_tick(opacity=0.4, thickness=1, color="#8A929B", aria=False)
    dots = base.mark_point(filled=True, size=80, opacity=1, color=PICKED[0]).encode(tooltip=_tooltip()).transform_filter(pick)
    return ticks + dots


def _tooltip() -> list[alt.Tooltip]:
    return [
        alt.Tooltip("layer:O"),
        alt.Tooltip("q_head:O", title="query head"),
        alt.Tooltip("policy:N"),
        alt.Tooltip("rel_l2:Q", format=".3g", title="output error"),
        alt.Tooltip("missed_mass:Q", format=".2%", title="missed mass"),
        alt.Tooltip("evidence_recall:Q", format=".1%", title="evidence recall"),
    ]


def _colours(errors: pl.Series) -> tuple[list[float], list[float]]:
    """-> the domain, around every error above the floor and at least a decade wide; the decades inside it."""
    low, high = theme.ends(errors.filter(errors > theme.LEAST_ERROR), (theme.LEAST_ERROR, 1.0))
    first = math.floor(math.log10(low) + 1e-9)
    domain = [float(f"1e{first}"), max(high, float(f"1e{first + 1}"))]
    return domain, [float(f"1e{n}") for n in range(first, math.floor(math.log10(domain[1]) + 1e-9) + 1)]


def _span(cells: int, most: int) -> int:
    """Pixels along one side of the map."""
    return max(160, min(cells * 24, most), cells * 9)
