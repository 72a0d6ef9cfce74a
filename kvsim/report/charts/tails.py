"""How often is the output far off, and how often is evidence missed? Distributions over all steps and query heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy
from kvsim.report.charts.measure import layered, noise, quantity
from kvsim.report.theme import Style


def how_often(errors: pl.DataFrame, recalls: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """errors (policy, rel_l2, share above it), recalls (policy, evidence_recall, share at or below it) -> a line per policy."""
    focus, opacity = focus_on_policy()
    x = quantity(alt.X, "rel_l2", errors["rel_l2"])
    y = alt.Y("share:Q", title="share of heads and steps above", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis())
    panels = [layered(*noise(floor, x), _line(errors, x, y, opacity, look)).add_params(focus)]
    if recalls.height:
        x = quantity(alt.X, "evidence_recall", recalls["evidence_recall"])
        panels.append(layered(_line(recalls, x, y.title("share of heads and steps at or below"), opacity, look)))
    return alt.hconcat(
        *(p.properties(width=430, height=260) for p in panels),
        spacing=40,
        description="The share of query heads and steps whose output error is above, or whose evidence recall is below, each value.",
    )


def _line(data: pl.DataFrame, x: alt.X, y: alt.Y, opacity: Any, look: Sequence[Style]) -> alt.Chart:
    return alt.Chart(theme.prepare(data)).mark_line(aria=False, interpolate="linear").encode(
        x=x, y=y, order="share:Q", opacity=opacity, **theme.policy_channels(look, "line"),
        tooltip=["policy:N", alt.Tooltip(str(x.shorthand), format=".3g"), alt.Tooltip("share:Q", format=".1%")],
    )  # fmt: skip
