"""What quality does a budget buy? Recall is never drawn without output error beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from kvsim.metrics.budget import LOWEST, STEPS
from kvsim.metrics.floor import Floor
from kvsim.metrics.spread import MEAN, TAIL, WORST
from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy, statistic_menu
from kvsim.report.charts.measure import MEASURES, layered, noise, quantity, tooltip
from kvsim.report.theme import Style

PANELS = ("mass_recall", "rel_l2", "evidence_recall", "far_recall")
X = {
    "tokens": ("read per query head and step (tokens, log scale)", theme.TOKENS),
    "bytes": ("read per KV head and step (bytes, log scale)", theme.SIZES),
}
READ = {"tokens": "tokens read per query head", "bytes": "bytes read per KV head"}


def quality_against(
    x: str, curves: pl.DataFrame, points: pl.DataFrame, look: Sequence[Style], floor: Floor | None
) -> alt.ConcatChart:
    """curves, points (policy label, steps, statistic, tokens, bytes, the four measures) -> one panel per measure that has data.

    Lines: every budget of a read policy. Points: each policy at the budget it ran with. `steps` names the decode steps a row is
    over; a menu chooses them where there are several, another the statistic over heads."""
    rank = {s.label: i for i, s in enumerate(look)}
    curves = curves.with_columns(rank=pl.col("policy").replace_strict(rank, return_dtype=pl.Int32))
    both = pl.concat([curves.select(points.columns), points])
    choices = both["steps"].unique(maintain_order=True).to_list()
    chosen = "datum.statistic === statistic && datum.steps === steps"
    said = [alt.Tooltip(f"{n}:Q", format=",.0f", title=title) for n, title in READ.items()]
    base = alt.Chart().encode(x=_x_axis(x, both[x]), tooltip=[*tooltip(()), *said, *tooltip(PANELS)[1:]])
    focus, opacity = focus_on_policy()
    channels = theme.policy_channels(look, "point") | {"opacity": opacity}
    shape = channels.pop("shape")
    lines = base.properties(data=theme.prepare(curves)).transform_filter(chosen).mark_line(aria=False)
    lines = lines.encode(detail="policy:N", strokeDash=theme.dash_by_rank(look), **channels)
    spots = base.properties(data=theme.prepare(points)).transform_filter(chosen).mark_point(filled=True, size=80)
    spots = spots.encode(shape=shape, **channels)
    told = [m for m in PANELS if both[m].is_not_null().any() or m in ("mass_recall", "rel_l2")]
    panels = []
    for measure in told:
        y = quantity(alt.Y, measure, both[measure])
        behind = noise(floor, y) if measure == "rel_l2" else []
        panels.append(layered(*behind, *(c.encode(y=y) for c in (lines, spots)), width=470, height=260))
    chart = alt.concat(
        panels[0].add_params(focus),
        *panels[1:],
        columns=2,
        spacing=34,
        description=f"{', '.join(MEASURES[m].said for m in told)}: one panel each against {X[x][0]}, one line or point per policy.",
    )
    steps = alt.param("steps", value=choices[0], bind=_menu(choices, "decode steps: ") if len(choices) > 1 else alt.Undefined)
    return chart.add_params(statistic_menu(), steps)


# statistic: dash, colour
LINES: dict[str, tuple[list[int], tuple[str, str]]] = {
    MEAN: ([1, 0], theme.STEPS[0]),
    STEPS: ([7, 3, 1, 3], theme.STEPS[1]),
    TAIL: ([6, 3], theme.STEPS[2]),
    WORST: ([2, 2], theme.STEPS[3]),
    LOWEST: ([1, 4], theme.INK),
}


def below_the_mean(curves: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.ConcatChart:
    """curves (policy label, statistic, tokens, the four measures) -> for one read policy, chosen from a menu, every statistic at every
    budget, the band from the mean of heads to their tail shaded."""
    wide = curves.filter(pl.col("statistic") == MEAN).join(
        curves.filter(pl.col("statistic") == TAIL), on=["policy", "tokens"], suffix="_tail"
    )
    options = [s.label for s in look if s.label in set(curves["policy"])]
    shown = alt.param("shown", value=options[0], bind=_menu(options, "read policy: "))
    x = _x_axis("tokens", curves["tokens"])
    own = "datum.policy === shown"
    drawn = [n for n in LINES if curves.filter(pl.col("statistic") == n).height]
    colours = theme.few(
        drawn, [LINES[n][1][0] for n in drawn], columns=3, symbolType="stroke", symbolSize=400, symbolStrokeWidth=2
    )
    dashes = colours | {"scale": alt.Scale(domain=drawn, range=[LINES[n][0] for n in drawn])}
    panels = []
    for measure in [m for m in PANELS if curves[m].is_not_null().any()]:
        y = quantity(alt.Y, measure, curves[measure])
        told = theme.prepare(curves.select("policy", "statistic", "tokens", measure).drop_nulls(measure))
        line = alt.Chart(told).transform_filter(own).mark_line(aria=False).encode(
            x=x, y=y, color=alt.Color("statistic:N", **colours), strokeDash=alt.StrokeDash("statistic:N", **dashes),
            tooltip=[*tooltip(()), "statistic:N", alt.Tooltip("tokens:Q", format=",.0f"), *tooltip([measure])[1:]],
        )  # fmt: skip
        between = theme.prepare(wide.select("policy", "tokens", measure, f"{measure}_tail").drop_nulls())
        band = alt.Chart(between).transform_filter(own).mark_area(aria=False, opacity=0.12, color=LINES[MEAN][1][0])
        behind = noise(floor, y) if measure == "rel_l2" else []
        layers = [*behind, band.encode(x=x, y=y, y2=f"{measure}_tail:Q"), line]
        panels.append(layered(*layers, width=470, height=240))
    return (
        alt.concat(*panels, columns=2, spacing=34)
        .add_params(shown)
        .properties(description="Mean, 5th percentile and worst head of one read policy at every budget, one panel per measure.")
    )


def memory_saved(points: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """points (policy label, statistic, resident_share, measures) -> output error and recalls over what stays in memory."""
    focus, opacity = focus_on_policy()
    x = quantity(alt.X, "resident_share", points["resident_share"])
    channels = theme.policy_channels(look, "point") | {"opacity": opacity}
    base = alt.Chart(theme.prepare(points)).transform_filter("datum.statistic === statistic").mark_point(filled=True, size=90)
    panels = []
    for measure in [m for m in ("rel_l2", "evidence_recall", "far_recall") if points[m].is_not_null().any()]:
        y = quantity(alt.Y, measure, points[measure])
        marks = base.encode(x=x, y=y, tooltip=tooltip(["resident_share", measure]), **channels)
        behind = noise(floor, y) if measure == "rel_l2" else []
        panels.append(layered(*behind, marks, width=300, height=240))
    return (
        alt.hconcat(panels[0].add_params(focus), *panels[1:], spacing=40)
        .add_params(statistic_menu())
        .properties(description="Output error, evidence recall and far recall over the memory a policy keeps on the device.")
    )


def pages_shared(curves: pl.DataFrame, group: int, look: Sequence[Style]) -> alt.LayerChart:
    """curves (policy label, pages, ratio: pages read by the group over pages of one head) -> lines between 1 and the size of the group."""
    focus, opacity = focus_on_policy()
    low, high = theme.ends(curves["pages"], (1.0, 2.0))
    x = alt.X(
        "pages:Q",
        title="pages read per query head and step (log scale)",
        scale=alt.Scale(type="log", base=2, nice=False, domain=[low, max(high, 2 * low)]),
        axis=alt.Axis(values=theme.doublings(low, high), format=",d"),
    )
    y = alt.Y(
        "ratio:Q", title="pages of the group ÷ pages of one head", scale=alt.Scale(domain=[1, group], nice=False),
        axis=alt.Axis(values=list(range(1, group + 1)), format="d"),
    )  # fmt: skip
    said = [*tooltip(()), alt.Tooltip("pages:Q", format=",d"), alt.Tooltip("ratio:Q", format=".2f", title="group ÷ one head")]
    line = alt.Chart(theme.prepare(curves)).mark_line(aria=False).encode(
        x=x, y=y, opacity=opacity, tooltip=said, **theme.policy_channels(look, "line")
    )  # fmt: skip
    return layered(
        line.add_params(focus),
        width=620,
        height=260,
        description="How many different pages the query heads of a KV head read together, as a multiple of the pages of one head.",
    )


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


def _menu(options: Sequence[Any], name: str) -> alt.BindRadioSelect:
    return alt.binding_select(options=list(options), name=name)
