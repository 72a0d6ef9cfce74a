"""What is held at each step and how, and when does it change? One small chart per policy that does not hold everything whole."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.tokens import CHANGES
from kvsim.report import theme
from kvsim.report.charts.along import step_axis
from kvsim.report.theme import STEPS, TIERS, Style

COLUMNS, WIDTH, HEIGHT = 3, 290, 120
SHOWN = "datum.layers === layers"


def held_over_time(held: pl.DataFrame, look: Sequence[Style]) -> alt.ConcatChart:
    """held (policy, layers, step, part, order, tokens) -> areas that add up to the tokens dense attention sees, of the `layers` that a menu
    names."""
    most = held.group_by("policy", "layers", "step").agg(pl.col("tokens").sum())["tokens"]
    y = alt.Y(
        "tokens:Q", title="tokens per KV head", stack="zero", scale=alt.Scale(domain=[0, theme.ends(most, (0.0, 1.0))[1]], nice=True),
        axis=alt.Axis(format=",d", tickCount=4),
    )  # fmt: skip
    there = set(held.filter(pl.col("tokens") > 0)["part"])
    domain = [p for p in TIERS if p in there]
    colour = alt.Color("part:N", **theme.few(domain, [TIERS[p][0] for p in domain], symbolType="square"))
    said = ["policy:N", alt.Tooltip("step:Q", title="decode step"), "part:N", alt.Tooltip("tokens:Q", format=",.1f")]
    charts = []
    for s in look:
        mine = held.filter(pl.col("policy") == s.label, pl.col("part").is_in(domain))
        area = (
            alt.Chart(theme.prepare(mine))
            .transform_filter(SHOWN)
            .mark_area(aria=False, interpolate="step-after", line=False, opacity=0.9)
        )
        charts.append(
            area.encode(x=step_axis("decode step"), y=y, order="order:Q", color=colour, tooltip=said).properties(
                **_small(s.label)
            )
        )
    return _grid(charts, held).properties(
        description="Tokens per KV head over the decode steps, by what holds them: full precision, coded, on the host, gone for good."
    )


def changes_over_time(changes: pl.DataFrame, look: Sequence[Style]) -> alt.ConcatChart:
    """changes (policy, layers, step, change, tokens) at decode steps -> a bar for each kind of change, per policy, of the `layers` that a
    menu names."""
    there = set(changes["change"])
    domain = [c for c in CHANGES.values() if c in there]
    colour = alt.Color("change:N", **theme.few(domain, [STEPS[list(CHANGES.values()).index(c)][0] for c in domain]))
    said = ["policy:N", alt.Tooltip("step:Q", title="decode step"), "change:N", alt.Tooltip("tokens:Q", format=",.2f")]
    first, last = theme.ends(changes["step"], (0.0, 1.0))
    charts = []
    for s in look:
        mine = changes.filter(pl.col("policy") == s.label)
        x = step_axis("decode step").scale(alt.Scale(domain=[first - 0.5, last + 0.5], nice=False))
        y = alt.Y("tokens:Q", title="tokens per KV head", axis=alt.Axis(format=",.2~f", tickCount=4))
        bars = (
            alt.Chart(theme.prepare(mine))
            .transform_filter(SHOWN)
            .mark_bar(aria=False, width=max(1, min(5, round(WIDTH / (last - first + 1)) - 1)))
        )
        charts.append(bars.encode(x=x, y=y, color=colour, tooltip=said).properties(**_small(s.label)))
    return _grid(charts, changes).properties(
        description="Tokens per KV head that were evicted, coded or promoted at each decode step, one small chart per policy."
    )


def _small(label: str) -> dict[str, object]:
    return {"width": WIDTH, "height": HEIGHT, "title": alt.Title(label, fontSize=12, offset=6)}


def _grid(charts: Sequence[alt.Chart], data: pl.DataFrame) -> alt.ConcatChart:
    options = data["layers"].unique(maintain_order=True).to_list()
    bind = alt.binding_select(options=options, name="layers: ") if len(options) > 1 else alt.Undefined
    shown = alt.param("layers", value=options[0], bind=bind)
    return alt.concat(*charts, columns=COLUMNS, spacing=22).resolve_scale(color="shared").add_params(shown)
