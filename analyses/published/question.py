"""Published claims audited: what the notes and four papers say in numbers, worked out by the parts that count bytes here."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from analyses.figures import HOLDS, NOT
from analyses.published.notes_on_qevict import of_qevict
from analyses.published.notes_on_quest import of_quest
from analyses.published.papers import of_papers
from analyses.reckoning import Reckoning, Sum
from kvsim.report.html import Figure


def sums() -> list[Sum]:
    return [*of_qevict(), *of_quest(), *of_papers()]


def charts(every: Sequence[Sum]) -> list[Figure]:
    rows = [
        (f"{s.said} ({s.where.split(',')[0]})", s.found / s.published, s.verdict, s.told, s.number)
        for s in every
        if s.published and s.found > 0 and s.verdict in (HOLDS, NOT)
    ]
    frame = pl.DataFrame(rows, schema=["statement", "ratio", "verdict", "published", "worked out"], orient="row")
    colours = alt.Scale(domain=[HOLDS, NOT], range=["#0072B2", "#D55E00"])
    ticks = alt.Axis(format="~g", values=[0.01, 0.1, 0.5, 1, 2, 5, 20])
    base = alt.Chart(frame).encode(
        y=alt.Y("statement:N", sort=None, title=None, axis=alt.Axis(labelLimit=470, labelFontSize=10)),
        x=alt.X(
            "ratio:Q",
            title="worked out / published",
            scale=alt.Scale(type="log"),
            axis=ticks,
        ),
        tooltip=["statement", "published", "worked out", "verdict"],
    )
    points = base.mark_point(filled=True, size=55, aria=False).encode(
        color=alt.Color("verdict:N", scale=colours, legend=alt.Legend(orient="top")),
        shape=alt.Shape("verdict:N", scale=alt.Scale(domain=[HOLDS, NOT], range=["circle", "diamond"])),
    )
    one = alt.Chart(pl.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 3], aria=False).encode(x="one:Q")
    chart = alt.layer(one, points).properties(
        width=330, height=17 * len(rows), description="Every number worked out, over the published one."
    )
    how = (
        "1 is the published number. A statement of a limit (at least, at most, more than) holds on one side of 1. "
        "Not drawn: numbers that are 0, and statements that the notes leave open. Full attention is no policy here."
    )
    return [Figure("ratios", "How far off are they?", how, chart, "", frame)]


QUESTION = Reckoning(
    name="published",
    title="Published claims audited",
    lead="What three notes and four papers say in numbers, worked out again: by the codecs and indexes that count bytes here, by bytes over "
    "bandwidths, and by a cost model fitted to six published times. A statement that cannot be true as printed is told with its reason.",
    sums=sums,
    charts=charts,
    notes=(
        "A printed number may be rounded: one per cent is allowed. A predicted time has an interval, in which the published one must lie.",
        "What bytes allow is an upper end: a claim below it is possible, not shown.",
    ),
)
