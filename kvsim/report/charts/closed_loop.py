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
    """scores (of metrics.closed_loop, one task and mode) -> the share of contexts solved with its Wilson interval, and the KL from
    full attention, one row a policy."""
    frame = theme.named(scores, look).with_columns(kl=pl.col("kl").clip(LEAST, None))
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
        axis=alt.Axis(tickCount=5, format="~g"),
    )
    apart = base.mark_point(filled=True, size=80).encode(x=nats, y=y.axis(None), tooltip=said, **channels)
    height = 18 * max(4, frame.height)
    scored = [layered(line, dots, width=360, height=height)] if frame["score"].count() else []
    panels = [*scored, layered(apart.encode(y=y) if not scored else apart, width=300, height=height)]
    return alt.hconcat(
        *panels,
        spacing=24,
        description="For every policy the share of contexts it solves with a 95 % interval, and its KL from full attention.",
    )


def against_budget(foretold: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """foretold (of metrics.closed_loop, one task) -> over the tokens read, the share of contexts solved with its interval, and the KL from
    full attention; a line joins the budgets of one family."""
    colour = {s.label: s.colour for s in look}
    frame = theme.named(foretold, look).with_columns(kl=pl.col("kl").clip(LEAST, None))
    frame = frame.with_columns(kin=pl.col("policy").replace_strict(colour, return_dtype=pl.String)).sort("family", "read")
    base = alt.Chart(theme.prepare(frame.select("policy", "family", "kin", "read", "score", "low", "high", "kl")))
    least = theme.ends(frame["read"], (1.0, 1.0))[0]
    ticks = [x for x in (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1) if x >= least / 1.5]
    x = alt.X(
        "read:Q", title="tokens read (of full attention's, log scale)", scale=alt.Scale(type="log", base=2, domain=[ticks[0] / 1.1, 1.05]),
        axis=alt.Axis(values=ticks, format="~%"),
    )  # fmt: skip
    said = ["policy:N", *(alt.Tooltip(f"{n}:Q", format=form) for n, form in (("read", ".1%"), ("score", ".0%"), ("kl", ".3g")))]
    channels = theme.policy_channels(look, "point")

    def panel(y: alt.Y, *marks: alt.Chart) -> alt.LayerChart:
        lines = base.mark_line(aria=False, strokeWidth=1.5).encode(
            x=x, y=y, detail="family:N", stroke=alt.Stroke("kin:N", scale=None)
        )
        dots = base.mark_point(filled=True, size=70).encode(x=x, y=y, tooltip=said, **channels)
        return layered(lines, *marks, dots, width=330, height=260)

    title, whole = "contexts solved, of those full attention solves", alt.Scale(domain=[0, 1])
    share, low = (alt.Y(f"{n}:Q", title=title, scale=whole, axis=theme.percent_axis()) for n in ("score", "low"))
    nats = alt.Y(
        "kl:Q", title="KL from full attention (nats a token, log scale)", scale=alt.Scale(type="log", nice=False, padding=12)
    )
    ends = base.mark_rule(aria=False).encode(x=x, y=low, y2="high:Q", color=channels["color"])
    scored = [panel(share, ends)] if frame["score"].count() else []
    return alt.hconcat(
        *scored,
        panel(nats),
        spacing=34,
        description="What every policy still solves, and its KL from full attention, over the tokens it read.",
    )


def growth_over_steps(growth: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """growth (of a study, one task) -> output error over the steps, on the left of a layer alone, on the right with all that was lost before."""
    frame = theme.named(growth, look)
    panels = []
    for name, title in (
        ("open", "output error, open loop: this layer and step alone"),
        ("closed", "output error, closed loop: with all before"),
    ):
        told = frame.select("policy", "step", pl.col(name).clip(theme.LEAST_ERROR, None)).drop_nulls()
        if told.height:
            y = alt.Y(f"{name}:Q", title=f"{title} (log scale)", scale=alt.Scale(type="log"), axis=alt.Axis(tickCount=4))
            x = alt.X("step:Q", title="decode step", axis=alt.Axis(format="d", tickMinStep=1))
            said = ["policy:N", alt.Tooltip("step:Q"), alt.Tooltip(f"{name}:Q", format=".3g")]
            lines = (
                alt.Chart(theme.prepare(told)).mark_line().encode(x=x, y=y, tooltip=said, **theme.policy_channels(look, "line"))
            )
            panels.append(layered(lines, width=330, height=260))
    return alt.hconcat(
        *panels, spacing=34, description="Each policy's output error over the decode steps, open loop and closed loop."
    )


def by_group(by_layers: pl.DataFrame) -> alt.LayerChart:
    """by_layers (of metrics.closed_loop, one task) -> how well one group of layers' open-loop numbers order the policies, with intervals."""
    names = {name: PREDICTORS[name] for name in by_layers["predictor"].unique(maintain_order=True)}
    frame = by_layers.with_columns(number=pl.col("predictor").replace_strict(names, return_dtype=pl.String)).drop_nulls("rho")
    order = by_layers.sort("first_layer")["layers"].unique(maintain_order=True).to_list()
    base = alt.Chart(theme.prepare(frame.select("number", "layers", "rho", "low", "high")))
    x = alt.X("layers:N", title="layers, from the first to the last", sort=order, axis=alt.Axis(labelAngle=0))
    low, rho = (
        alt.Y(f"{n}:Q", title="rank correlation with the outcome", scale=alt.Scale(domain=[-1, 1])) for n in ("low", "rho")
    )
    aside = alt.XOffset("number:N", sort=list(names.values()))
    colour = alt.Color("number:N", **theme.few(list(names.values()), [light for light, _ in theme.STEPS]))
    said = ["layers:N", "number:N", *(alt.Tooltip(f"{n}:Q", format=".2f") for n in ("rho", "low", "high"))]
    ends = (
        base.transform_filter("isValid(datum.low)")
        .mark_rule(aria=False, strokeWidth=2)
        .encode(x=x, y=low, y2="high:Q", xOffset=aside, color=colour)
    )
    dots = base.mark_point(filled=True, size=70).encode(x=x, y=rho, xOffset=aside, color=colour, tooltip=said)
    return layered(
        ends, dots, width=620, height=260, description="How well the numbers of each group of layers order the policies."
    )


def predicted_against_measured(foretold: pl.DataFrame, look: Sequence[Style], outcome: str = "kl") -> alt.ConcatChart:
    """foretold (of metrics.closed_loop, one task) -> one panel for each predictor that has data: what it says of a policy across,
    what the model did up; a good predictor lets the points fall or rise along one line."""
    up = {
        "kl": alt.Y(
            "kl:Q", title="KL from full attention (nats a token, log scale)", scale=alt.Scale(type="log", nice=False, padding=12)
        ),
        "score": alt.Y("score:Q", title="contexts solved", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis()),
    }[outcome]
    frame = theme.named(foretold, look).with_columns(kl=pl.col("kl").clip(LEAST, None))
    panels = []
    for name, title in PREDICTORS.items():
        least = theme.LEAST_ERROR if BETTER[name] < 0 else 0
        told = frame.select("policy", pl.col(name).clip(least, None), outcome).drop_nulls()
        if told.height:
            turned = " (less is better, log scale)" if BETTER[name] < 0 else ""
            scale = alt.Scale(type="log", nice=False, padding=12) if turned else alt.Scale(domain=[0, 1])
            x = alt.X(f"{name}:Q", title=title + turned, scale=scale, axis=alt.Axis(tickCount=5))
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
    """sensitivity (of metrics.sensitivity) -> the likelihood lost when one group of layers is sparse, with its interval."""
    order = sensitivity.sort("first_layer")["layers"].unique(maintain_order=True).to_list()
    base = alt.Chart(
        theme.prepare(theme.named(sensitivity, look).select("policy", "layers", "d_nll", "low", "high", "reduction"))
    )
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
