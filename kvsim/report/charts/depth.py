"""How deep must the ranking be read for a guarantee?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.loss import DEPTHS
from kvsim.report import theme
from kvsim.report.charts.measure import layered, other
from kvsim.report.charts.rows import ROW
from kvsim.report.theme import INK, PICKED, STEPS, TICK, Style


def pages_to_a_guarantee(depths: pl.DataFrame, read: pl.DataFrame, look: Sequence[Style]) -> alt.ConcatChart:
    """depths (policy, wanted, p50, mean, p95, most), read (policy, pages) -> one panel per policy: pages down the ranking until each
    guarantee, with the pages it did read as a line."""
    wanted = [w for w in DEPTHS.values() if w in set(depths["wanted"])]
    last = theme.ends(depths["most"], (1.0, 1.0))[1]
    x = alt.X("mean:Q", title="pages of the ranking", scale=alt.Scale(domain=[0, last], nice=False), axis=alt.Axis(format=",d"))
    panels = []
    for s in look:
        mine = depths.filter(pl.col("policy") == s.label)
        if mine.is_empty():
            continue
        base = alt.Chart(theme.prepare(mine)).encode(y=alt.Y("wanted:N", sort=wanted, title=None, axis=alt.Axis(grid=True)))
        said = ["policy:N", "wanted:N", *(alt.Tooltip(f"{n}:Q", format=".1f") for n in ("p50", "mean", "p95", "most"))]
        rule = base.mark_rule(aria=False, color=TICK[0]).encode(x=other(x, "p50"), x2="most:Q")
        mid = base.mark_tick(aria=False, thickness=2, size=14, color=INK[0]).encode(x=other(x, "p50"))
        end = base.mark_tick(aria=False, thickness=2, size=14, color=STEPS[1][0]).encode(x=other(x, "p95"))
        dot = base.mark_point(filled=True, size=70, opacity=1, color=STEPS[0][0]).encode(x=x, tooltip=said)
        line = alt.Chart(theme.prepare(read.filter(pl.col("policy") == s.label))).encode(x=other(x, "pages"))
        there = line.mark_rule(color=PICKED[0], strokeWidth=2, strokeDash=[4, 3], aria=False)
        text = line.mark_text(align="left", baseline="bottom", dx=4, color=PICKED[0], aria=False).encode(
            y=alt.value(0), text=alt.value("pages read")
        )
        title = alt.Title(s.label, fontSize=12, offset=12)
        panels.append(layered(there, text, rule, mid, end, dot, title=title, width=330, height=ROW * len(wanted)))
    return alt.concat(*panels, columns=2, spacing=20).resolve_scale(x="shared").properties(
        description="Pages of the ranking that would have to be read for each guarantee: median, mean, 95th percentile and most."
    )  # fmt: skip
