"""When is attention lost? Measures along the decode steps, the roles of the tokens behind them."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import down, lines, step_axis
from kvsim.report.charts.measure import MEASURES, layered
from kvsim.report.theme import EVIDENCE, TICK, Style

TITLES = {"step": "decode step", "role": "query's token"}


def evidence_by_step(
    data: pl.DataFrame, mass: pl.DataFrame, bands: pl.DataFrame, look: Sequence[Style], floor: Floor | None
) -> alt.VConcatChart:
    """data (policy, role, step, statistic, evidence_recall, rel_l2), mass (step, evidence_dense), bands (role, first, last) -> evidence
    recall and output error over the steps; below them the dense mass on evidence, without which a miss matters little.

    bands name the role of the query's token; none when the roles of several contexts overlap."""
    panels = lines(
        data, [("evidence_recall", 220), ("rel_l2", 160)], look, step_axis(), floor=floor, also=role_bands(bands), **TITLES
    )
    y = alt.Y(
        "evidence_dense:Q", title="dense attention mass on evidence (mean of heads)", axis=alt.Axis(format="~%", tickCount=3)
    )
    area = alt.Chart(theme.prepare(mass)).mark_area(color=EVIDENCE[0], opacity=0.6, interpolate="step")
    said = [alt.Tooltip("step:Q", title="decode step"), alt.Tooltip("evidence_dense:Q", format=".2%")]
    below = layered(area.encode(x=step_axis("decode step"), y=y, tooltip=said), height=60)
    return down(
        [*role_names(bands), *panels, below],
        True,
        "Evidence recall and output error per decode step, one line per policy, over the dense mass there.",
    )


def measures_by_step(
    data: pl.DataFrame, measures: Sequence[str], bands: pl.DataFrame, look: Sequence[Style], floor: Floor | None = None
) -> alt.VConcatChart:
    """data (policy, role, step, the measures, perhaps statistic) -> one panel per measure over the steps."""
    axes = [step_axis("decode step" if i == len(measures) - 1 else None) for i in range(len(measures))]
    panels = lines(data, [(m, 180) for m in measures], look, axes, floor=floor, also=role_bands(bands), **TITLES)
    said = ", ".join(MEASURES[m].said for m in measures)
    return down([*role_names(bands), *panels], "statistic" in data.columns, f"One line per policy over the decode steps: {said}.")


def role_bands(bands: pl.DataFrame) -> list[alt.Chart]:
    """Alternating shades behind the steps of each role; none for a single role."""
    return [_shades(bands, alt.X("left:Q"))] if bands.height > 1 else []


def role_names(bands: pl.DataFrame) -> list[alt.LayerChart]:
    """A strip with the same shades and the names of the roles, every second one lower; none for a single role."""
    if bands.height < 2:
        return []
    x = alt.X("left:Q", title=None, axis=None, scale=alt.Scale(nice=False))
    shades = _shades(bands, x)
    lower = alt.expr("4 + 14 * (datum.n % 2)")
    name = alt.Chart(shades.data).mark_text(align="left", baseline="top", dx=4, dy=lower, fontStyle="italic", aria=False)
    return [layered(shades, name.encode(x=x, y=alt.value(0), text="role:N"), height=34)]


def _shades(bands: pl.DataFrame, x: alt.X) -> alt.Chart:
    left, right = (pl.col("first") - 0.5).alias("left"), (pl.col("last") + 0.5).alias("right")
    rows = theme.prepare(bands.with_row_index("n").select("n", "role", left, right))
    shade = alt.when("datum.n % 2 == 0").then(alt.value(0.08)).otherwise(alt.value(0.2))
    return alt.Chart(rows).mark_rect(aria=False, color=TICK[0]).encode(x=x, x2="right:Q", opacity=shade)
