"""What changed between two runs: paired differences with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.compare import MEASURES as SIDES
from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.charts.rows import ROW
from kvsim.report.theme import STEPS, TICK

SHARES = {"evidence_recall": "evidence recall", "far_recall": "far recall", "mass_recall": "mass recall"}  # differences in points
RATIOS = {"rel_l2": "output error", "read_bytes": "bytes read", "resident_bytes": "bytes resident"}  # differences in % of before
VERDICTS = {"worse": STEPS[3], "better": STEPS[0], "no change that counts": TICK}
SHAPES = ("triangle-down", "triangle-up", "circle")
COLUMNS, WIDTH = 3, 270


def verdict(tolerance: float) -> pl.Expr:
    """Of rows of metrics.compare, one of VERDICTS: beyond the tolerance, and an interval, where there is one, leaves zero out."""
    side = pl.col("measure").replace_strict(SIDES, return_dtype=pl.Int64)
    sure = pl.col("low").is_null() | (pl.col("low") * pl.col("high") > 0)
    better = sure & (-pl.col("difference") * side > tolerance * pl.col("before").abs())
    worse, good, same = VERDICTS
    return pl.when("worse").then(pl.lit(worse)).when(better).then(pl.lit(good)).otherwise(pl.lit(same)).alias("verdict")


def paired_differences(found: pl.DataFrame, pairs: Sequence[str], tolerance: float) -> alt.ConcatChart:
    """found (of metrics.compare, and `pair` in words) -> a panel per measure, a row per pair: the difference and its interval; recalls in
    points, output error and bytes in percent of the earlier value."""
    y = alt.Y("pair:N", sort=list(pairs), title=None, scale=alt.Scale(domain=list(pairs)))
    zero = alt.Chart(theme.prepare(pl.DataFrame({"zero": [0.0]}))).mark_rule(aria=False, color=TICK[0]).encode(x="zero:Q")
    colours = theme.few(list(VERDICTS), [c for c, _ in VERDICTS.values()])
    shapes = theme.few(list(VERDICTS), SHAPES)
    told = found.with_columns(verdict(tolerance))
    panels: list[alt.LayerChart] = []
    for measure, said in (SHARES | RATIOS).items():
        mine = told.filter(pl.col("measure") == measure)
        if mine.is_empty():
            continue
        unit = 1.0 if measure in SHARES else pl.col("before").abs()
        rows = mine.select(
            "pair",
            "contexts",
            "before",
            "after",
            "verdict",
            *((pl.col(n) / unit).alias(n) for n in ("difference", "low", "high")),
        )
        where = f"{said} (change, points)" if measure in SHARES else f"{said} (change, % of before)"
        first = len(panels) % COLUMNS == 0
        axis = alt.Axis(grid=True) if first else alt.Axis(labels=False, ticks=False, grid=True)
        base = alt.Chart(theme.prepare(rows)).encode(y=y.axis(axis), color=alt.Color("verdict:N", **colours))
        x = alt.X("difference:Q", title=where, scale=alt.Scale(zero=True, padding=8), axis=alt.Axis(format="+.3~%", tickCount=4))
        form = ".2%" if measure in SHARES else ".5~g"
        tips = [
            alt.Tooltip("pair:N", title="policy"), alt.Tooltip("before:Q", format=form), alt.Tooltip("after:Q", format=form),
            alt.Tooltip("difference:Q", format="+.3%"), alt.Tooltip("low:Q", format="+.3%"), alt.Tooltip("high:Q", format="+.3%"), "contexts:Q",
        ]  # fmt: skip
        bar = (
            base.transform_filter("isValid(datum.low)").mark_rule(aria=False, strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q")
        )
        dot = base.mark_point(filled=True, size=80, opacity=1).encode(x=x, shape=alt.Shape("verdict:N", **shapes), tooltip=tips)
        panels.append(layered(zero, bar, dot, width=WIDTH, height=ROW * len(pairs)))
    return alt.concat(
        *panels,
        columns=COLUMNS,
        spacing=26,
        description="The change of each measure between two runs, a row per policy, with its 95 % interval over contexts.",
    )
