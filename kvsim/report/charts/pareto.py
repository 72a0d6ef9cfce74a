"""What does a policy hold, what does it read, and is what it loses little enough?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy
from kvsim.report.charts.measure import MEASURES, layered, quantity, tooltip
from kvsim.report.theme import TICK, Style

GOALS = {"rel_l2": (0.01, 0.03, 0.1, 0.3, 1.0), "evidence_recall": (0.5, 0.8, 0.9, 0.95, 0.99)}  # at most, at least
SAID = ("resident_share", "read_share", "rel_l2", "mass_recall", "evidence_recall", "far_recall")
TICKS = [2.0**n for n in range(-10, 4)]


def held_against_read(points: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """points (policy label, SAID) -> bytes resident across, bytes read up, both of full attention's. Menus say what
    error and evidence recall are good enough: those policies are drawn large, and a line joins the ones of which no other holds and reads
    less."""
    focus, opacity = focus_on_policy()
    told = [m for m in GOALS if points[m].is_not_null().any()]
    good = " && ".join(f"({m}_goal === 0 || datum.{m} {'<=' if m == 'rel_l2' else '>='} {m}_goal)" for m in told) or "true"
    base = alt.Chart(theme.prepare(points.select("policy", *SAID))).transform_calculate(good=good)
    axis = alt.Axis(format=".3~%", values=TICKS, grid=True)
    held, read = points["resident_share"], points["read_share"]
    x = quantity(alt.X, "resident_share", held, scale=_scale(held), axis=axis)
    y = quantity(alt.Y, "read_share", read, scale=_scale(read), axis=axis)
    least = alt.WindowFieldDef(op="min", field="read_share", **{"as": "least"})  # type: ignore[arg-type]
    front = (
        base.transform_filter("datum.good")
        .transform_window([least], sort=[alt.SortField("resident_share"), alt.SortField("read_share")], frame=[None, 0])
        .transform_filter("datum.read_share === datum.least")
        .encode(x=x, y=y)
    )
    line = front.mark_line(aria=False, interpolate="step-after", strokeDash=[4, 3], strokeWidth=1.5, color=TICK[0])
    size = alt.when("datum.good").then(alt.value(150)).otherwise(alt.value(30))
    channels = theme.policy_channels(look, "point") | {"opacity": opacity, "size": size}
    dots = base.mark_point(filled=True).encode(x=x, y=y, tooltip=tooltip(SAID), **channels)
    said = "Bytes resident against bytes read, one point per policy, with the front of those that lose little enough."
    chart = layered(line.encode(order="resident_share:Q"), dots.add_params(focus), width=900, height=400, description=said)
    return chart.add_params(*(_menu(m) for m in told))


def _scale(shares: pl.Series) -> alt.Scale:
    low, high = theme.ends(shares, (0.5, 1.0))
    return alt.Scale(type="log", base=2, nice=False, domain=[max(low, TICKS[0]) / 1.3, max(high, 1.0) * 1.3])


def _menu(measure: str) -> alt.Parameter:
    form = "at most {:g}" if measure == "rel_l2" else "at least {:.0%}"
    labels = ["any", *(form.format(g) for g in GOALS[measure])]
    bind = alt.binding_select(options=[0, *GOALS[measure]], labels=labels, name=f"{MEASURES[measure].said}: ")
    return alt.param(f"{measure}_goal", value=0, bind=bind)
