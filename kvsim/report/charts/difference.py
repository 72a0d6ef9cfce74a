"""What do two policies read alike, and what one alone? Tokens by layer."""

from __future__ import annotations

import altair as alt
import polars as pl

from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.theme import STEPS

KINDS = {"both": STEPS[0], "first alone": STEPS[2], "second alone": STEPS[1]}  # how a token is read
COLUMNS = {"both": "both", "only_first": "first alone", "only_second": "second alone"}
SHAPES = {"first": ("circle", STEPS[2]), "second": ("diamond", STEPS[1])}


def tokens_by_layer(pairs: pl.DataFrame, picked: bool = False) -> alt.HConcatChart:
    """pairs (layer, both, only_first, only_second, evidence_first, evidence_second; as metrics.difference.by_layer makes them) -> bars of the
    tokens that a head reads in a step, by layer, and marks of those of evidence. picked: only those of the policies `shown` and `other`."""
    base = alt.Chart(theme.prepare(pairs))
    if picked:
        base = base.transform_filter("datum.first === shown && datum.second === other")
    y = alt.Y("layer:O", title=None, axis=alt.Axis(labelExpr="'layer ' + datum.label", labelOverlap=True))
    height = max(60, min(18 * pairs["layer"].n_unique(), 360))
    names = "{" + ", ".join(f"{n}: '{said}'" for n, said in COLUMNS.items()) + "}"
    tall = base.transform_fold(list(COLUMNS), ["column", "tokens"]).transform_calculate(
        kind=f"{names}[datum.column]", order=f"indexof({list(COLUMNS)}, datum.column)"
    )
    bars = tall.mark_bar().encode(
        x=alt.X("tokens:Q", title="tokens a head reads in a step (mean)", axis=alt.Axis(format=",d", tickCount=5)),
        y=y,
        order="order:Q",
        color=alt.Color("kind:N", **theme.few(list(KINDS), [c for c, _ in KINDS.values()], symbolType="square")),
        tooltip=["layer:O", alt.Tooltip("kind:N", title=" "), alt.Tooltip("tokens:Q", format=",.1f")],
    )
    panels = [layered(bars, width=560, height=height)]
    if pairs.select(pl.max_horizontal("evidence_first", "evidence_second").max()).item():
        sides = base.transform_fold(["evidence_first", "evidence_second"], ["column", "tokens"])
        sides = sides.transform_calculate(side="slice(datum.column, 9)")
        dots = sides.mark_point(filled=True, size=70, opacity=1).encode(
            x=alt.X("tokens:Q", title="of those, evidence (tokens)", axis=alt.Axis(tickCount=4), scale=alt.Scale(zero=True)),
            y=y.axis(alt.Axis(labels=False, ticks=False, grid=True)),
            color=alt.Color("side:N", **theme.few(list(SHAPES), [c[0] for _, c in SHAPES.values()])),
            shape=alt.Shape("side:N", **theme.few(list(SHAPES), [s for s, _ in SHAPES.values()])),
            tooltip=["layer:O", alt.Tooltip("side:N", title=" "), alt.Tooltip("tokens:Q", format=",.1f")],
        )
        panels.append(layered(dots, width=360, height=height))
    return (
        alt.hconcat(*panels, spacing=40)
        .resolve_scale(color="independent", shape="independent")
        .properties(
            description="Tokens that two policies both read, or one alone, by layer, and how many tokens of evidence each read."
        )
    )
