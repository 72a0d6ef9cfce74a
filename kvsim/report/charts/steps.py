"""When is evidence missed? Evidence recall and output error along the decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report.charts.budget import LEAST_ERROR
from kvsim.report.theme import EVIDENCE, Style, policy_channels, prepare

WIDTH = 860


def evidence_by_step(steps: pl.DataFrame, weight: pl.DataFrame, bands: pl.DataFrame, look: Sequence[Style]) -> alt.VConcatChart:
    """steps (policy, role, step, evidence_recall, rel_l2), weight (step, evidence_dense), bands (role, first, last) -> panels over steps.

    Evidence recall, output error, and how much of the dense attention lies on evidence at all; bands name the role of the query's token."""
    data = prepare(steps.with_columns(error=pl.col("rel_l2").clip(LEAST_ERROR, None)))
    focus = alt.selection_point(fields=["policy"], bind="legend")
    x = alt.X("step:Q", title=None, scale=alt.Scale(nice=False), axis=alt.Axis(format="d", tickMinStep=1))
    lines = alt.Chart(data).mark_line(aria=False, strokeWidth=1.6, point=alt.OverlayMarkDef(size=18)).encode(
        x=x,
        detail=["policy:N", "role:N"],
        opacity=alt.when(focus).then(alt.value(1)).otherwise(alt.value(0.1)),
        tooltip=[
            "policy:N",
            alt.Tooltip("step:Q", title="decode step"),
            alt.Tooltip("role:N", title="token"),
            alt.Tooltip("evidence_recall:Q", format=".1%"),
            alt.Tooltip("rel_l2:Q", format=".3g", title="output error"),
        ],
        **policy_channels(look, "line"),
    )  # fmt: skip
    recall = lines.encode(y=alt.Y("evidence_recall:Q", title="evidence recall", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5)))
    error = lines.encode(
        y=alt.Y("error:Q", title="output error (relative L2, log scale)", scale=alt.Scale(type="log"), axis=alt.Axis(format="~g", values=[0.001, 0.01, 0.1, 1, 10, 100]))
    )
    mass = alt.Chart(prepare(weight)).mark_area(color=EVIDENCE[0], opacity=0.6, interpolate="step").encode(
        x=x.title("decode step"),
        y=alt.Y("evidence_dense:Q", title="dense attention mass on evidence (mean of heads)", axis=alt.Axis(format=".1%", tickCount=3)),
        tooltip=[alt.Tooltip("step:Q", title="decode step"), alt.Tooltip("evidence_dense:Q", format=".2%", title="dense mass on evidence")],
    )  # fmt: skip
    top = alt.layer(*_bands(bands), recall.add_params(focus)) if bands.height > 1 else recall.add_params(focus)
    return alt.vconcat(
        top.properties(width=WIDTH, height=200), error.properties(width=WIDTH, height=160), mass.properties(width=WIDTH, height=60), spacing=36
    ).resolve_scale(x="shared").properties(
        description="Evidence recall and output error per decode step, one line per policy, over the dense attention mass on evidence."
    )  # fmt: skip


def _bands(bands: pl.DataFrame) -> list[alt.Chart]:
    """Alternating shades behind the steps of each role, with its name at the top."""
    data = prepare(bands.with_row_index("n").with_columns(left=pl.col("first") - 0.5, right=pl.col("last") + 0.5).select("n", "role", "left", "right"))
    base = alt.Chart(data).encode(x=alt.X("left:Q"))
    shade = base.mark_rect(aria=False, color="#8A929B").encode(x2="right:Q", opacity=alt.when("datum.n % 2 == 0").then(alt.value(0.08)).otherwise(alt.value(0.2)))
    return [shade, base.mark_text(align="left", dx=4, fontStyle="italic").encode(y=alt.value(8), text="role:N")]
