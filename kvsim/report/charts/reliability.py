"""Was the risk that was foretold the risk there was?"""

from __future__ import annotations

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.theme import INK, STEPS, TICK

SIZE = 330


def foretold_against_observed(found: pl.DataFrame) -> alt.LayerChart:
    """found (foretold, observed, total), a row per bin of foretold risk: points on the line where both are the same; their area is how many
    queries a bin has."""
    sides = alt.Scale(domain=[0, 1], nice=False)
    x = alt.X("foretold:Q", title="risk foretold, mean of the bin", scale=sides, axis=alt.Axis(format="%"))
    y = alt.Y("observed:Q", title="share of queries that covered too little", scale=sides, axis=alt.Axis(format="%"))
    same = alt.Chart(alt.InlineData(values=[{"foretold": 0, "observed": 0}, {"foretold": 1, "observed": 1}])).encode(x=x, y=y)
    base = alt.Chart(theme.prepare(found.sort("foretold"))).encode(x=x, y=y)
    area = alt.Size(
        "total:Q", title="queries × levels", scale=alt.Scale(range=[40, 500], zero=True), legend=alt.Legend(format="~s")
    )
    said = [alt.Tooltip("foretold:Q", format=".3f"), alt.Tooltip("observed:Q", format=".3f"), alt.Tooltip("total:Q", format=",d")]
    return layered(
        same.mark_line(color=TICK[0], strokeDash=[5, 4], aria=False),
        base.mark_line(color=INK[0], strokeWidth=1, aria=False),
        base.mark_circle(color=STEPS[0][0], opacity=0.9).encode(size=area, tooltip=said),
        width=SIZE,
        height=SIZE,
    ).properties(
        description="Foretold risk of covering too little against the observed share; on the diagonal both are the same."
    )
