"""Heads as points: missed mass against output error, and the heads that look at the evidence."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy
from kvsim.report.charts.measure import layered, noise, other, quantity, tooltip
from kvsim.report.charts.rows import ROW
from kvsim.report.theme import TICK, Style

LEAST_MISS = 1e-4  # where a head that misses less stands on a logarithmic axis


def miss_against_error(cells: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.LayerChart:
    """cells (policy, layer, q_head, missed_mass, rel_l2) -> one point per policy and head."""
    focus, opacity = focus_on_policy()
    x = alt.X(
        "missed_mass:Q", title="missed mass (evicted or not read, log scale)",
        scale=alt.Scale(type="log", clamp=True, nice=False, domain=[LEAST_MISS, 1]),
        axis=alt.Axis(format="~%", values=[1e-4, 1e-3, 1e-2, 0.1, 1]),
    )  # fmt: skip
    y = quantity(alt.Y, "rel_l2", cells["rel_l2"])
    channels = theme.policy_channels(look, "point") | {"opacity": opacity}
    said = tooltip(["missed_mass", "rel_l2"], layer="layer", q_head="query head")
    dots = alt.Chart(theme.prepare(cells)).mark_point(filled=True, size=30, aria=False).encode(x=x, y=y, tooltip=said, **channels)
    return layered(
        *noise(floor, y),
        dots.add_params(focus),
        width=760,
        height=340,
        description="One point per query head and policy: attention mass missed against output error.",
    )


def evidence_heads(cells: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """cells (policy, head, order, evidence_dense, evidence_read, rel_l2) -> per head a bar of its dense mass on evidence with marks of
    what each policy read of it, output error beside."""
    focus, opacity = focus_on_policy()
    order = cells.sort("order")["head"].unique(maintain_order=True).to_list()
    y = alt.Y("head:N", sort=order, title=None, axis=alt.Axis(grid=True))
    most = theme.ends(cells["evidence_dense"], (0.0, 1.0))[1]
    x = quantity(alt.X, "evidence_read", cells["evidence_read"], scale=alt.Scale(domain=[0, max(most, 1e-3)], nice=True))
    bars = alt.Chart(theme.prepare(cells.unique("head", keep="first", maintain_order=True).select("head", "evidence_dense")))
    bars = bars.mark_bar(color=TICK[0], opacity=0.35, height={"band": 0.8}).encode(
        x=other(x, "evidence_dense"), y=y, tooltip=["head:N", *tooltip(["evidence_dense"])[1:]]
    )
    channels = theme.policy_channels(look, "point") | {"opacity": opacity}
    base = alt.Chart(theme.prepare(cells)).mark_point(filled=True, size=60, aria=False)
    said = tooltip(["evidence_dense", "evidence_read", "rel_l2"], head="head")
    read = base.encode(x=x, y=y, tooltip=said, **channels)
    error = quantity(alt.X, "rel_l2", cells["rel_l2"])
    lost = base.encode(x=error, y=y.axis(alt.Axis(labels=False, ticks=False, grid=True)), tooltip=said, **channels)
    size = {"height": ROW * len(order)}
    return alt.hconcat(
        layered(bars, read.add_params(focus), width=480, **size),
        layered(*noise(floor, error), lost, width=300, **size),
        spacing=28,
        description="The query heads that look at the evidence most: their dense mass there, and what each policy read of it.",
    )
