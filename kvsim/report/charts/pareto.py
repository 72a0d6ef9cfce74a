"""What does a policy hold, what does it read, and is what it loses little enough?"""

from __future__ import annotations

import math
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
WIDTH, HEIGHT = 900, 400
NEAR = 8  # pixels: marks that lie closer are drawn around one another


def held_against_read(points: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """points (policy label, SAID) -> bytes resident across, bytes read up, both of full attention's. Menus say what
    error and evidence recall are good enough: those policies are drawn large, and a line joins the ones of which no other holds and reads
    less. Of marks that would hide one another all but the top one are hollow, and larger the deeper they lie."""
    focus, opacity = focus_on_policy()
    told = [m for m in GOALS if points[m].is_not_null().any()]
    good = " && ".join(f"({m}_goal === 0 || datum.{m} {'<=' if m == 'rel_l2' else '>='} {m}_goal)" for m in told) or "true"
    rows = theme.prepare(with_neighbours(points).select("policy", "also", "above", *SAID))
    base = alt.Chart(rows).transform_calculate(good=good)
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
    channels = theme.policy_channels(look, "point") | {"opacity": opacity, "size": alt.Size("size:Q", scale=None)}
    sized = base.transform_calculate(size="(datum.good ? 150 : 30) * pow(1 + 0.6 * datum.above, 2)")
    sized = sized.encode(
        x=x, y=y, tooltip=tooltip(()) + [alt.Tooltip("also:N", title="also here")] + tooltip(SAID)[1:], **channels
    )
    rings = sized.transform_filter("datum.above > 0").mark_point(filled=False, strokeWidth=2)
    dots = sized.transform_filter("datum.above === 0").mark_point(filled=True)
    said = "Bytes resident against bytes read, one point per policy, with the front of those that lose little enough."
    chart = layered(
        line.encode(order="resident_share:Q"), rings, dots.add_params(focus), width=WIDTH, height=HEIGHT, description=said
    )
    return chart.add_params(*(_menu(m) for m in told))


def with_neighbours(points: pl.DataFrame) -> pl.DataFrame:
    """The points with the policies whose marks lie within NEAR pixels (also: their labels, the first drawn last), and how many of these
    are drawn later, on top (above)."""
    at = list(zip(_pixels(points["resident_share"], WIDTH), _pixels(points["read_share"], HEIGHT), strict=True))
    near = [[j for j, b in enumerate(at) if j != i and math.dist(a, b) <= NEAR] for i, a in enumerate(at)]
    labels = points["policy"].to_list()
    return points.with_columns(
        also=pl.Series([", ".join(labels[j] for j in reversed(js)) or "no other" for js in near], dtype=pl.String),
        above=pl.Series([sum(j > i for j in js) for i, js in enumerate(near)], dtype=pl.Int32),
    )


def _pixels(shares: pl.Series, size: int) -> list[float]:
    low, high = _domain(shares)
    return [size * math.log(max(x, low) / low) / math.log(high / low) for x in shares]


def _domain(shares: pl.Series) -> tuple[float, float]:
    low, high = theme.ends(shares, (0.5, 1.0))
    return max(low, TICKS[0]) / 1.3, max(high, 1.0) * 1.3


def _scale(shares: pl.Series) -> alt.Scale:
    return alt.Scale(type="log", base=2, nice=False, domain=list(_domain(shares)))


def _menu(measure: str) -> alt.Parameter:
    form = "at most {:g}" if measure == "rel_l2" else "at least {:.0%}"
    labels = ["any", *(form.format(g) for g in GOALS[measure])]
    bind = alt.binding_select(options=[0, *GOALS[measure]], labels=labels, name=f"{MEASURES[measure].said}: ")
    return alt.param(f"{measure}_goal", value=0, bind=bind)
