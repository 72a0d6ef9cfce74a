"""What does a step move and what stays in memory, by class of bytes?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.charts.rows import ROW, policy_axis, stacked
from kvsim.report.theme import BYTES, INK, Style


def bytes_by_class(parts: pl.DataFrame, title: str, whole: float | None, look: Sequence[Style]) -> alt.LayerChart:
    """parts (policy, part, order, bytes), whole: what full attention reads or holds -> bars with their sums, full attention as a line."""
    sums = parts.group_by("policy", maintain_order=True).agg(pl.col("bytes").sum())
    said = pl.format("{} %", (pl.col("bytes") / whole * 100).round(1)) if whole else pl.lit("")
    sums = sums.with_columns(said.alias("share"))
    last = max(theme.ends(sums["bytes"], (1.0, 1.0))[1], whole or 0)
    x = alt.X(
        "bytes:Q", title=title, scale=alt.Scale(domain=[0, 1.08 * last], nice=False), stack="zero",
        axis=alt.Axis(labelExpr=theme.SIZES, values=theme.evenly(last)),
    )  # fmt: skip
    layers: list[alt.Chart] = [stacked(parts, x, BYTES, look)]
    end = alt.Chart(theme.prepare(sums)).encode(x=alt.X("bytes:Q"), y=policy_axis(look))
    layers.append(end.mark_text(align="left", dx=5, aria=False).encode(text="share:N"))
    if whole:
        line = alt.Chart(theme.prepare(pl.DataFrame({"whole": [whole]}))).encode(x="whole:Q")
        layers.append(line.mark_rule(aria=False, strokeDash=[4, 3], strokeWidth=1.5, color=INK[0]))
    return layered(
        *layers,
        width=760,
        height=ROW * len(look),
        description=f"{title}, by class, one bar per policy, with full attention as a line.",
    )
