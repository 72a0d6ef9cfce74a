"""Does each policy use the tokens it was asked to use?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.rows import ROW, policy_axis
from kvsim.report.theme import INK, STEPS, Style

MARKS = {  # what: shape, colour
    "asked": ("M-0.12,-1.3H0.12V1.3H-0.12Z", INK),
    "used per query head": ("circle", STEPS[0]),
    "used per KV head": ("diamond", STEPS[1]),
    "held per KV head": ("circle", STEPS[2]),
}
SIDES = {
    "read": ("tokens read per step", {"asked": "asked", "got": "used per query head", "union": "used per KV head"}),
    "hold": ("tokens held after a step", {"asked": "asked", "got": "held per KV head"}),
}


def asked_against_used(found: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """found (policy label, side, asked, got, union) -> a bar where the budget is, marks where the policy is."""
    panels = []
    there = [side for side in SIDES if side in set(found["side"])]
    kinds = list(dict.fromkeys(k for side in there for k in SIDES[side][1].values()))
    shapes = theme.few(kinds, [MARKS[k][0] for k in kinds])
    colours = theme.few(kinds, [MARKS[k][1][0] for k in kinds])
    for side in there:
        title, names = SIDES[side]
        rows = found.filter(pl.col("side") == side).select("policy", *(pl.col(n).alias(said) for n, said in names.items()))
        tall = rows.unpivot(index="policy", variable_name="what", value_name="tokens").drop_nulls("tokens")
        policies = [s for s in look if s.label in set(rows["policy"])]
        base = alt.Chart(theme.prepare(tall)).encode(y=policy_axis(policies))
        x = alt.X("tokens:Q", title=title, scale=alt.Scale(zero=True), axis=alt.Axis(format=",d", tickCount=6))
        marks = base.mark_point(filled=True, size=90, opacity=1).encode(
            x=x,
            shape=alt.Shape("what:N", **shapes),
            color=alt.Color("what:N", **colours),
            tooltip=["policy:N", alt.Tooltip("what:N", title=" "), alt.Tooltip("tokens:Q", format=",.1f")],
        )
        panels.append(marks.properties(width=330, height=ROW * len(policies)))
    return alt.hconcat(
        *panels,
        spacing=30,
        description="The budget each policy was asked to keep, and the tokens it read per query head and KV head or held.",
    )
