"""Does coding blur the keys or the values, and how many bits does it take?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.metrics.loss import STAGES
from kvsim.metrics.precision import KINDS
from kvsim.report import theme
from kvsim.report.charts.measure import layered, noise, other, quantity
from kvsim.report.charts.rows import ROW, policy_axis
from kvsim.report.theme import STEPS, TICK, Style

SHAPES = ("square", "circle", "diamond")


def error_by_stage(stages: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.LayerChart:
    """stages (policy, layer, stage, error, p95) -> per policy and layer, the output error as coding adds to it."""
    rows = stages.with_columns(row=pl.format("{}, layer {}", "policy", "layer"))
    order = list(dict.fromkeys(r for s in look for r in rows.filter(pl.col("policy") == s.label)["row"]))
    x = quantity(alt.X, "rel_l2", rows["p95"], field="error")
    y = alt.Y("row:N", sort=order, title=None, axis=alt.Axis(grid=True, labelLimit=320))
    names = list(STAGES.values())
    base = alt.Chart(theme.prepare(rows)).encode(y=y)
    said = ["policy:N", "layer:O", "stage:N", alt.Tooltip("error:Q", format=".3g"), alt.Tooltip("p95:Q", format=".3g")]
    colour = theme.few(names, [c[0] for c in STEPS])
    dots = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, color=alt.Color("stage:N", **colour), shape=alt.Shape("stage:N", **theme.few(names, SHAPES)), tooltip=said
    )
    ticks = base.mark_tick(aria=False, thickness=2, size=12).encode(x=other(x, "p95"), color=alt.Color("stage:N", **colour))
    rule = base.mark_rule(aria=False, color=TICK[0], opacity=0.5).encode(x=x, x2="p95:Q")
    return layered(
        *noise(floor, x),
        rule,
        ticks,
        dots,
        width=620,
        height=26 * len(order),
        description="Output error of exact rows, of coded keys, and of coded keys and values, per layer.",
    )


def bits_per_number(found: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """found (policy, nominal, real) -> per policy, the bits of a coded number as it is spoken of and as it is stored."""
    rows = found.unpivot(["nominal", "real"], index="policy", variable_name="kind", value_name="bits").with_columns(
        kind=pl.col("kind").replace_strict(KINDS, return_dtype=pl.String)
    )
    there = set(found["policy"])
    y = policy_axis([s for s in look if s.label in there])
    last = theme.ends(rows["bits"], (0.0, 1.0))[1]
    x = alt.X("bits:Q", title="bits per coded number", scale=alt.Scale(domain=[0, last], nice=True), axis=alt.Axis(tickCount=5))
    names = list(KINDS.values())
    look_of = alt.Color("kind:N", **theme.few(names, [c[0] for c in STEPS]))
    said = ["policy:N", "kind:N", alt.Tooltip("bits:Q", format=".3f")]
    dots = alt.Chart(theme.prepare(rows)).mark_point(filled=True, size=80, opacity=1)
    rule = alt.Chart(theme.prepare(found)).mark_rule(aria=False, color=TICK[0], opacity=0.5)
    return layered(
        rule.encode(y=y, x=alt.X("nominal:Q"), x2="real:Q"),
        dots.encode(x=x, y=y, color=look_of, shape=alt.Shape("kind:N", **theme.few(names, SHAPES)), tooltip=said),
        width=620,
        height=ROW * len(there),
        description="Bits of a number held in codes, as the method is spoken of and with all that is stored beside the codes.",
    )
