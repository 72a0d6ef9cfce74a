"""Which layers and heads lose? A map of one policy; a click on a head shows it under every policy, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import step_axis
from kvsim.report.charts.measure import layered, noise, quantity, tooltip
from kvsim.report.charts.rows import ROW, policy_axis
from kvsim.report.theme import PICKED, TICK, Style

PICK_TITLE = (
    "isDefined(pick.layer) ? 'Layer ' + pick.layer + ', query head ' + pick.q_head + ' under every policy'"
    " : 'All heads under every policy'"
)
SAID = ("rel_l2", "missed_mass", "evidence_recall")
RECALL = "its evidence recall (a gap: hardly any of its dense mass lies there)"
SERIES = {"rel_l2": "errors", "evidence_recall": "recalls"}  # measure: the column with its values at each step, as text


def layer_head_map(
    cells: pl.DataFrame, steps: Sequence[int], highest: float, look: Sequence[Style], floor: Floor | None
) -> alt.VConcatChart:
    """cells (policy, layer, q_head, SAID, and per step as text: errors, recalls), highest: error of any head at any step -> a map of output
    error by layer and query head for one policy, chosen from a menu; a click on a cell, or the menus, show that head under every policy
    beside it and over `steps` below."""
    labels = [s.label for s in look]
    data = theme.prepare(cells.drop(SERIES.values()))
    worst = data.filter(pl.col("policy") == labels[0]).sort("rel_l2", descending=True, nulls_last=True).row(0, named=True)
    at_first = [{"layer": worst["layer"], "q_head": worst["q_head"]}]
    shown = alt.param("shown", value=labels[0], bind=alt.binding_select(options=labels, name="policy on the map: "))
    names = {"layer": "layer: ", "q_head": "query head: "}
    menus = {n: alt.binding_select(options=sorted(data[n].unique().to_list()), name=said) for n, said in names.items()}
    pick = alt.selection_point("pick", fields=list(names), on="click", toggle=False, clear="dblclick", value=at_first, bind=menus)  # type: ignore[arg-type]  # a menu per field
    grid = _grid(data, pick).properties(
        width=_span(data["q_head"].n_unique(), 400), height=max(_span(data["layer"].n_unique(), 400), ROW * len(look))
    )
    error = quantity(alt.X, "rel_l2", data["rel_l2"], title="output error (log scale)")
    missed = quantity(alt.X, "missed_mass", data["missed_mass"], title="missed mass", axis=alt.Axis(format=".0%", tickCount=3))
    details = [
        _detail(data, pick, error, policy_axis(look), noise(floor, error)),
        _detail(data, pick, missed, policy_axis(look, named=False), []),
    ]
    beside = alt.hconcat(*(d.properties(width=230, height=ROW * len(look)) for d in details), spacing=18)
    above = alt.hconcat(
        alt.hconcat(grid, title=_title("Output error by layer and query head", "click a cell; a double click shows all heads")),
        beside.properties(title=_title(alt.expr(PICK_TITLE), "dot: the head picked on the map; ticks: the others")),
        spacing=40,
    )
    below = _series(cells, steps, highest, pick, look, floor)
    return (
        alt.vconcat(above, alt.vconcat(*below, spacing=36), spacing=40)
        .add_params(shown)
        .resolve_scale(color="independent", strokeDash="independent")
        .properties(
            description="Map of output error by layer and query head for one policy; the picked head under every policy beside it."
        )
    )


def _grid(data: pl.DataFrame, pick: alt.Parameter) -> alt.Chart:
    domain, decades = _colours(data["rel_l2"])
    picked = alt.when(pick, empty=False)
    return (
        alt.Chart(data)
        .transform_filter("datum.policy === shown")
        .mark_rect(cursor="pointer")
        .encode(
            x=alt.X("q_head:O", title="query head", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("layer:O", title=None, axis=alt.Axis(labelExpr="'layer ' + datum.label", labelOverlap=True)),
            color=alt.Color(
                "rel_l2:Q",
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


def _detail(data: pl.DataFrame, pick: alt.Parameter, x: alt.X, y: alt.Y, behind: list[alt.Chart]) -> alt.LayerChart:
    base = alt.Chart(data).encode(x=x, y=y)
    ticks = base.mark_tick(opacity=0.4, thickness=1, color=TICK[0], aria=False)
    dots = base.mark_point(filled=True, size=80, opacity=1, color=PICKED[0]).encode(tooltip=_tooltip()).transform_filter(pick)
    return layered(*behind, ticks, dots)


def _series(
    cells: pl.DataFrame, steps: Sequence[int], highest: float, pick: alt.Parameter, look: Sequence[Style], floor: Floor | None
) -> list[alt.LayerChart]:
    """The picked head over the steps; a cell's text becomes rows only when its head is picked."""
    data = theme.prepare(cells.select("policy", "layer", "q_head", *SERIES.values()))
    panels = []
    for measure, column in SERIES.items():
        if not data[column].str.contains(r"\d").any():
            continue
        title = "its output error (relative L2, log scale)" if measure == "rel_l2" else RECALL
        y = quantity(alt.Y, measure, pl.Series([highest]), field="value", title=title)
        base = (
            alt.Chart(data)
            .transform_filter(pick)
            .transform_filter("isDefined(pick.layer)")
            .transform_calculate(text=f"split(datum.{column}, ' ')", at="split('" + " ".join(map(str, steps)) + "', ' ')")
            .transform_flatten(["text", "at"])
            .transform_calculate(value="datum.text === '' ? null : toNumber(datum.text)", step="toNumber(datum.at)")
        )
        line = base.mark_line(aria=False, strokeWidth=1.5).encode(
            x=step_axis("decode step"),
            y=y,
            tooltip=[*tooltip((), layer="layer", q_head="query head"), "step:Q", alt.Tooltip("value:Q", format=".3g")],
            **theme.policy_channels(look, "line"),
        )
        behind = noise(floor, y) if measure == "rel_l2" else []
        panels.append(layered(*behind, line, width=1000, height=160))
    return panels


def _tooltip() -> list[alt.Tooltip]:
    return tooltip(SAID, layer="layer", q_head="query head")


def _title(text: object, subtitle: str) -> alt.Title:
    return alt.Title(text, subtitle=subtitle, fontSize=13)  # type: ignore[arg-type]


def _colours(errors: pl.Series) -> tuple[list[float], list[float]]:
    """-> the domain, around the errors but the smallest, at least a decade wide; the decades inside it."""
    told = errors.filter(errors > theme.LEAST_ERROR)
    low, high = told.quantile(0.05) or theme.LEAST_ERROR, theme.ends(told, (1.0, 1.0))[1]
    first = math.floor(math.log10(low) + 1e-9)
    domain = [float(f"1e{first}"), max(high, float(f"1e{first + 1}"))]
    return domain, [float(f"1e{n}") for n in range(first, math.floor(math.log10(domain[1]) + 1e-9) + 1)]


def _span(cells: int, most: int) -> int:
    """Pixels along one side of the map."""
    return max(160, min(cells * 24, most), cells * 9)
