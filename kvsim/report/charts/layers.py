"""Which layers lose, and how loose is the index in each?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy, lines, statistic_menu
from kvsim.report.charts.measure import layered, other, quantity, tooltip
from kvsim.report.charts.rows import ROW
from kvsim.report.theme import INK, NOISE, STEPS, Style

MEASURES = ("rel_l2", "missed_mass", "evidence_recall")
WIDTH = 290


def layer_axis(title: str | None = "layer") -> alt.X:
    return alt.X("layer:O", title=title, axis=alt.Axis(labelAngle=0, labelOverlap=True))


def by_layer(data: pl.DataFrame, floors: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """data (policy, layer, statistic, the measures), floors (layer, p95) -> a line per policy over the layers, a panel per measure."""
    shown = [m for m in MEASURES if data[m].is_not_null().any()]
    known = floors.filter(pl.col("p95") > theme.LEAST_ERROR).with_columns(low=pl.lit(theme.LEAST_ERROR))
    ground = []
    if known.height:
        y = other(quantity(alt.Y, "rel_l2", data["rel_l2"].cast(pl.Float64)), "low")
        bars = alt.Chart(theme.prepare(known)).mark_bar(color=NOISE[0], opacity=0.35)
        ground = [bars.encode(x=layer_axis(), y=y, y2="p95:Q", tooltip=["layer:O", alt.Tooltip("p95:Q", title="rounding (p95)")])]
    panels = lines(data, [(m, 260) for m in shown], look, layer_axis(), also=ground, layer="layer")
    return (
        alt.hconcat(*(p.properties(width=WIDTH) for p in panels), spacing=34)
        .add_params(statistic_menu())
        .properties(description="Output error, missed mass and evidence recall by layer, one line per policy.")
    )


def slack_by_layer(bounds: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """bounds (policy, layer, slack_mean, slack_max and their p95) -> how far an index's bound lies above the truth, by layer."""
    focus, opacity = focus_on_policy()
    panels = []
    for name, title in (("slack_mean", "mean over pages"), ("slack_max", "loosest page")):
        y = alt.Y(f"{name}:Q", title=f"bound above the best logit (scaled logits), {title}", scale=alt.Scale(zero=True))
        base = alt.Chart(theme.prepare(bounds.select("policy", "layer", name, f"{name}_p95"))).encode(
            x=layer_axis(), opacity=opacity
        )
        channels = theme.policy_channels(look, "line")
        said = [*tooltip((), layer="layer"), alt.Tooltip(f"{name}:Q", format=".2f"), alt.Tooltip(f"{name}_p95:Q", format=".2f")]
        top = base.mark_tick(aria=False, thickness=2, size=14).encode(
            y=other(y, f"{name}_p95"), color=channels["color"], tooltip=said
        )
        mean = base.mark_line(aria=False).encode(y=y, tooltip=said, **channels)
        dots = base.mark_point(aria=False, filled=True, size=30).encode(y=y, color=channels["color"], tooltip=said)
        panels.append(layered(mean, dots, top, width=430, height=240))
    return alt.hconcat(
        panels[0].add_params(focus),
        *panels[1:],
        spacing=40,
        description="How far the index's upper bound lies above the best true logit of a page, by layer and policy.",
    )


def promised_and_missed(bounds: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """bounds (policy, layer, promised, missed, missed_p95) -> per policy and layer, the mass an index cannot rule out and what was missed."""
    rows = bounds.with_columns(row=pl.format("{}, layer {}", "policy", "layer"))
    order = [r for s in look for r in rows.filter(pl.col("policy") == s.label)["row"]]
    kinds = {
        "missed, mean": ("missed", "circle", STEPS[0]),
        "missed, p95 of heads and steps": ("missed_p95", "circle", STEPS[1]),
        "not ruled out by the bound": ("promised", "diamond", INK),
    }
    tall = rows.select("row", "policy", "layer", *(pl.col(n).alias(k) for k, (n, _, _) in kinds.items()))
    tall = tall.unpivot(index=["row", "policy", "layer"], variable_name="what", value_name="part").drop_nulls("part")
    x = alt.X("part:Q", title="share of the held attention mass", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis())
    y = alt.Y("row:N", sort=order, title=None, axis=alt.Axis(grid=True, labelLimit=320))
    base = alt.Chart(theme.prepare(tall))
    marks = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, y=y, shape=alt.Shape("what:N", **theme.few(list(kinds), [s for _, s, _ in kinds.values()])),
        color=alt.Color("what:N", **theme.few(list(kinds), [c[0] for _, _, c in kinds.values()])),
        tooltip=[*tooltip((), layer="layer", what="what"), alt.Tooltip("part:Q", format=".2%")],
    )  # fmt: skip
    return layered(
        marks,
        width=620,
        height=ROW * len(order),
        description="Per policy and layer: the mass that the bound cannot rule out, and the mass missed.",
    )
