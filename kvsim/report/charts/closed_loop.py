"""What a model still answers under a policy, and whether the open loop had said so."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.closed_loop import BETTER, PREDICTORS
from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.theme import Style

LEAST = 1e-5  # nats: where a logarithmic axis of KL begins; identical rows have 0


def answered(scores: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """scores (of metrics.closed_loop, one task and mode, policy label) -> the share of contexts solved with its Wilson interval, and the KL from
    full attention, one row a policy."""
    frame = scores.with_columns(kl=pl.col("kl").clip(LEAST, None))
    y = alt.Y("policy:N", title=None, sort=[s.label for s in look], axis=alt.Axis(labelLimit=320))
    channels = theme.policy_channels(look, "point")
    channels = {name: channel.legend(None) for name, channel in channels.items()}
    base = alt.Chart(theme.prepare(frame.select("policy", "score", "low", "high", "kl", "contexts")))
    title, axis = "contexts solved, of those full attention solves", theme.percent_axis()
    low, share = (alt.X(f"{n}:Q", title=title, scale=alt.Scale(domain=[0, 1]), axis=axis) for n in ("low", "score"))
    said = ["policy:N", alt.Tooltip("score:Q", format=".0%"), alt.Tooltip("contexts:Q"), alt.Tooltip("kl:Q", format=".3g")]
    line = base.mark_rule(aria=False, strokeWidth=2).encode(x=low, x2="high:Q", y=y, color=channels["color"])
    dots = base.mark_point(filled=True, size=80).encode(x=share, y=y, tooltip=said, **channels)
    nats = alt.X(
        "kl:Q",
        title="KL from full attention at the answer (nats a token, log scale)",
        scale=alt.Scale(type="log", nice=False, padding=12),
    )
    apart = base.mark_point(filled=True, size=80).encode(x=nats, y=y.axis(None), tooltip=said, **channels)
    height = 18 * max(4, frame.height)
    panels = [layered(line, dots, width=360, height=height), layered(apart, width=300, height=height)]
    return alt.hconcat(
        *panels,
        spacing=24,
        description="For every policy the share of contexts it solves with a 95 % interval, and its KL from full attention.",
    )


def predicted_against_measured(foretold: pl.DataFrame, look: Sequence[Style], outcome: str = "kl") -> alt.ConcatChart:
    """foretold (of metrics.closed_loop, one task, policy label) -> one panel for each predictor that has data: what it says of a policy across,
    what the model did up; a good predictor lets the points fall or rise along one line."""
    up = {
        "kl": alt.Y(
            "kl:Q", title="KL from full attention (nats a token, log scale)", scale=alt.Scale(type="log", nice=False, padding=12)
        ),
        "score": alt.Y("score:Q", title="contexts solved", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis()),
    }[outcome]
    frame = foretold.with_columns(kl=pl.col("kl").clip(LEAST, None))
    panels = []
    for name, title in PREDICTORS.items():
        told = frame.select("policy", name, outcome).drop_nulls()
        if told.height:
            turned = " (less is better)" if BETTER[name] < 0 else ""
            scale = alt.Scale(zero=False, padding=12) if turned else alt.Scale(domain=[0, 1])
            x = alt.X(f"{name}:Q", title=title + turned, scale=scale)
            marks = alt.Chart(theme.prepare(told)).mark_point(filled=True, size=80).encode(
                x=x, y=up, tooltip=["policy:N", alt.Tooltip(f"{name}:Q", format=".3f"), alt.Tooltip(f"{outcome}:Q", format=".3g")],
                **theme.policy_channels(look, "point"),
            )  # fmt: skip
            panels.append(layered(marks, width=330, height=240))
    return alt.concat(
        *panels,
        columns=2,
        spacing=34,
        description="Each policy's open-loop numbers across against what it does to the model's answers up.",
    )


def borne_by_layer(sensitivity: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """sensitivity (of metrics.sensitivity, policy label) -> the likelihood lost when one group of layers is sparse, with its interval."""
    order = sensitivity.sort("first_layer")["layers"].unique(maintain_order=True).to_list()
    base = alt.Chart(theme.prepare(sensitivity.select("policy", "layers", "d_nll", "low", "high", "reduction")))
    x = alt.X("layers:N", title="layers that are sparse, full attention in all others", sort=order)
    y = alt.Y("d_nll:Q", title="NLL added (nats a token)")
    channels = theme.policy_channels(look, "point")
    said = ["policy:N", "layers:N", alt.Tooltip("d_nll:Q", format="+.4f"), alt.Tooltip("reduction:Q", format=".1f")]
    dots = base.mark_point(filled=True, size=70).encode(x=x, y=y, tooltip=said, **channels)
    ends = (
        base.transform_filter("isValid(datum.low)")
        .mark_rule(aria=False)
        .encode(x=x, y="low:Q", y2="high:Q", color=channels["color"])
    )
    return layered(
        ends,
        dots,
        width=620,
        height=260,
        description="What each group of layers costs in likelihood when a policy acts there alone.",
    )
