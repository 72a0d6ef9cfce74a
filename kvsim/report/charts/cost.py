"""What does a step take on a device that was measured, what is it made of, and how far can the model be trusted?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy, step_axis
from kvsim.report.charts.measure import layered, quantity
from kvsim.report.charts.rows import ROW, policy_axis, stacked
from kvsim.report.theme import INK, STEPS, TICK, TIMES, Style

GRADES = {"calibrated": STEPS[0], "extrapolated": STEPS[1], "transferred": STEPS[2], "spec": STEPS[3]}
SHAPES = ("circle", "triangle-up", "diamond", "square")


def time_by_part(parts: pl.DataFrame, totals: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """parts (policy, part: one of TIMES, order, ms), totals (policy, p50, p95, p99, said) -> bars of the mean time of a decode step by what it
    is spent on, `said` at their ends, a bar where the p99 is."""
    sums = parts.group_by("policy", maintain_order=True).agg(pl.col("ms").sum())
    top = 1.35 * max(theme.ends(sums["ms"], (0.0, 1.0))[1], theme.ends(totals["p99"], (0.0, 1.0))[1])
    x = alt.X(
        "ms:Q",
        title="time of a decode step (ms, mean over steps)",
        scale=alt.Scale(domain=[0, top], nice=False),
        stack="zero",
        axis=alt.Axis(tickCount=6),
    )
    ends = sums.join(totals, on="policy", how="left", maintain_order="left")
    base = alt.Chart(theme.prepare(ends)).encode(y=policy_axis(look))
    tips = ["policy:N", *(alt.Tooltip(f"{n}:Q", format=".3~g", title=f"{n} (ms)") for n in ("p50", "p95", "p99"))]
    p99 = base.mark_tick(thickness=2, size=14, color=INK[0], opacity=1).encode(x="p99:Q", tooltip=tips)
    last = base.transform_calculate(end="max(datum.ms, datum.p99)").mark_text(align="left", dx=6, aria=False)
    return layered(
        stacked(parts, x, TIMES, look),
        p99,
        last.encode(x="end:Q", text="said:N"),
        width=760,
        height=ROW * len(look),
        description="Predicted time of a decode step by what it is spent on, one bar per policy, with its p99.",
    )


def time_against_error(points: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """points (policy, p50, low, high: ms, grade, rel_l2) -> predicted time of a step with its interval across, output error up."""
    focus, opacity = focus_on_policy()
    x = alt.X("p50:Q", title="time of a decode step (ms, median)", scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=6))
    base = alt.Chart(theme.prepare(points)).encode(y=quantity(alt.Y, "rel_l2", points["rel_l2"]), opacity=opacity)
    channels = theme.policy_channels(look, "point")
    known = points["high"].is_not_null().any()
    span = [base.mark_rule(aria=False).encode(x=alt.X("low:Q"), x2="high:Q", color=channels["color"])] if known else []
    tips = ["policy:N", *(alt.Tooltip(f"{n}:Q", format=".3~g", title=f"{n} (ms)") for n in ("p50", "low", "high")), "grade:N"]
    dots = base.mark_point(filled=True, size=90).encode(
        x=x, tooltip=[*tips, alt.Tooltip("rel_l2:Q", format=".3g", title="output error")], **channels
    )
    return layered(
        *span,
        dots.add_params(focus),
        width=760,
        height=300,
        description="Predicted time of a decode step against output error, one point per policy.",
    )


def time_by_step(steps: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """steps (policy, step, ms) -> a line per policy over the decode steps."""
    focus, opacity = focus_on_policy()
    y = alt.Y("ms:Q", title="time of the step (ms)", scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5))
    line = alt.Chart(theme.prepare(steps)).mark_line(aria=False, strokeWidth=1.5)
    line = line.encode(
        x=step_axis("decode step"), y=y, opacity=opacity, tooltip=["policy:N", "step:Q", alt.Tooltip("ms:Q", format=".3~g")],
        **theme.policy_channels(look, "line"),
    )  # fmt: skip
    return layered(
        line.add_params(focus), width=1000, height=220, description="Predicted time of each decode step, one line per policy."
    )


def predicted_against_measured(told: pl.DataFrame) -> alt.HConcatChart:
    """told (kernel, t_us, predicted_us, grade, batch, context) -> predicted against measured time of each sample, and how far they are
    apart, for the kernel that a menu names."""
    kernels = told["kernel"].unique(maintain_order=True).to_list()
    shown = alt.param(
        "kernel",
        value=kernels[0],
        bind=alt.binding_select(options=kernels, name="kernel: ") if len(kernels) > 1 else alt.Undefined,
    )
    colours = theme.few(list(GRADES), [c for c, _ in GRADES.values()])
    data = told.with_columns(error=pl.col("predicted_us") / pl.col("t_us") - 1)
    base = alt.Chart(theme.prepare(data)).transform_filter("datum.kernel === kernel")
    axis = alt.Axis(format="~s", tickCount=5, grid=True)
    x = alt.X("t_us:Q", title="measured (µs, log scale)", scale=alt.Scale(type="log", nice=False, padding=12), axis=axis)
    tips = [
        "kernel:N", "batch:Q", "context:Q", alt.Tooltip("t_us:Q", format=",.4~g", title="measured (µs)"),
        alt.Tooltip("predicted_us:Q", format=",.4~g", title="predicted (µs)"), alt.Tooltip("error:Q", format="+.1%"), "grade:N",
    ]  # fmt: skip
    dots = base.mark_point(filled=True, size=45, opacity=0.7, aria=False).encode(
        x=x, color=alt.Color("grade:N", **colours), shape=alt.Shape("grade:N", **theme.few(list(GRADES), SHAPES)), tooltip=tips
    )
    same = base.mark_line(aria=False, color=TICK[0], strokeDash=[4, 3]).encode(x=x, y=alt.Y("t_us:Q"))
    y = alt.Y("predicted_us:Q", title="predicted (µs, log scale)", scale=alt.Scale(type="log", nice=False, padding=12), axis=axis)
    error = alt.Y("error:Q", title="predicted above measured", axis=alt.Axis(format="+.0%", tickCount=6))
    zero = alt.Chart(theme.prepare(pl.DataFrame({"zero": [0.0]}))).mark_rule(aria=False, color=TICK[0], strokeDash=[4, 3])
    panels = [layered(same, dots.encode(y=y)), layered(zero.encode(y="zero:Q"), dots.encode(y=error))]
    return (
        alt.hconcat(*(p.properties(width=430, height=320) for p in panels), spacing=50)
        .add_params(shown)
        .properties(
            description="Predicted against measured time of kernels that the model has not seen, and how far they are apart."
        )
    )


def error_of_fits(fits: pl.DataFrame) -> alt.LayerChart:
    """fits (kernel, mape, p90, shapes, gbps) -> per fit the mean error on shapes that were left out of it, and a bar at the 90th percentile."""
    order = fits["kernel"].unique(maintain_order=True).to_list()
    base = alt.Chart(theme.prepare(fits)).encode(
        y=alt.Y("kernel:N", sort=order, title=None, axis=alt.Axis(grid=True, labelLimit=420))
    )
    x = alt.X(
        "mape:Q",
        title="error on left-out shapes (mean; bar: 90th percentile)",
        scale=alt.Scale(zero=True),
        axis=alt.Axis(format=".0%", tickCount=6),
    )
    tips = [
        "kernel:N",
        *(alt.Tooltip(f"{n}:Q", format=".1%") for n in ("mape", "p90")),
        "shapes:Q",
        alt.Tooltip("gbps:Q", format=",.0f", title="GB/s"),
    ]
    dots = base.mark_point(filled=True, size=80, opacity=1, color=STEPS[0][0]).encode(x=x, tooltip=tips)
    bars = base.mark_tick(thickness=2, size=12, color=TICK[0], opacity=1, aria=False).encode(x="p90:Q")
    return layered(
        bars,
        dots,
        width=560,
        height=ROW * len(order),
        description="Error of each fit of the cost model on shapes that were left out of it.",
    )
