"""The six frames as charts, in the report's looks: a column of panels per cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import altair as alt
import polars as pl

from analyses.keeping.measure import BITS, CODES, EVICT, H2O, ORACLE, QEVICT, RANDOM, THREE, TWO, VARIED
from analyses.panels import error, grid, lines, look, share
from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.theme import FAMILIES, SHAPES, SPARE, STEPS, Style

ALL = [1, 0]
TEAL, AMBER, NAVY, RED = (light for light, _ in STEPS)
LOST, CUMULATIVE, INTERVAL = (
    f"{THREE}, were codes lost too",
    "oracle of all attention so far",
    "oracle of attention since the last cut",
)


def family(name: str) -> tuple[str, list[int]]:
    return FAMILIES[name][0], FAMILIES[name][2]


BUDGETS = look(
    {
        QEVICT: (family("qevict")[0], ALL),
        EVICT: (SPARE[2][0], [6, 3]),
        H2O: family("h2o"),
        CODES: family("kivi"),
        ORACLE: family("oracle"),
        RANDOM: family("random_read"),
    }
)
TIERED = look({TWO: (RED, [6, 3]), THREE: (TEAL, ALL)})
CROSSED = [
    *TIERED,
    *look({LOST: (TEAL, [2, 2]), CUMULATIVE: (FAMILIES["oracle"][0], [6, 4]), INTERVAL: (FAMILIES["oracle"][0], [1, 3])}),
]
WIDTHS = look(dict(zip((f"{n} bits" for n in BITS), ((TEAL, ALL), (AMBER, [6, 3]), (NAVY, [2, 2])), strict=True)))
ALONE = look({QEVICT: (family("qevict")[0], ALL)})
_COLOURS = (TEAL, AMBER, NAVY, RED, SPARE[0][0], SPARE[2][0])
SPREAD = [
    replace(s, shape=x)
    for s, x in zip(look({n: (c, ALL) for n, c in zip(VARIED.values(), _COLOURS, strict=True)}), SHAPES, strict=False)
]
NAMES = list(dict.fromkeys(s.label for s in (*BUDGETS, *CROSSED, *WIDTHS, *SPREAD)))


def by_bytes(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    ticks = alt.Axis(format=".0%", values=[0, 0.2, 0.4, 0.6])
    x = alt.X("bytes:Q", title="bytes on the device, of the full cache's", scale=alt.Scale(domain=[0, 0.6]), axis=ticks)
    y = {"fmm": missed(1.0), "evidence_recall": share("evidence_recall"), "rel_l2": error(data["rel_l2"])}
    said = "Mass on evicted tokens, evidence recall and output error by resident bytes."
    return lines(data, cells, y, x, BUDGETS, said, "hardly any attention on the evidence")


def cross(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    tiered = data.filter(pl.col("policy") == THREE)
    beside = [
        tiered.select("cell", "at", pl.lit(name).alias("policy"), pl.col(column).alias(measure))
        for name, column, measure in ((LOST, "disabled", "fmm"), (CUMULATIVE, "oracle", "lir"), (INTERVAL, "interval", "lir"))
    ]
    return swept(pl.concat([data, *beside], how="diagonal"), cells, "window (tokens)", CROSSED, "By window and number of tiers.")


def bits(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    return swept(data, cells, "quant_share: part of the budget for codes", WIDTHS, "By quant_share and bits.")


def start(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    return dots(
        data, cells, "init: scores of the prompt's windows", TIERED, "By the scores that windows of the prompt start with."
    )


def promotion(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    return dots(data, cells, "promotion", ALONE, "By what a promoted window is made of.")


def ledger(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    """A point per policy; what it varies is its colour and shape."""
    channels, scale = theme.policy_channels(SPREAD, "point"), alt.Scale(domain=[0, top(data["churn"])])
    x = alt.X("churn:Q", title="churn of the full tier between cuts", scale=scale, axis=alt.Axis(format=".0%", tickCount=5))
    y = share("ledger", 0, top(data["ledger"]), "codes kept beside, of the full cache's bytes")

    def panel(cell: str, measure: str) -> alt.LayerChart:
        mine = theme.labelled(data.filter(pl.col("cell") == cell), SPREAD).select("policy", "at", "churn", measure)
        tip = [
            alt.Tooltip("policy:N"),
            alt.Tooltip("at:N"),
            alt.Tooltip("churn:Q", format=".3f"),
            alt.Tooltip("ledger:Q", format=".2%"),
        ]
        return layered(
            alt.Chart(theme.prepare(mine)).mark_point(filled=True, size=80, opacity=0.8).encode(x=x, y=y, tooltip=tip, **channels)
        )

    return grid(panel, cells, ["ledger"], "Bytes of kept codes by churn: a point per policy.")


def swept(data: pl.DataFrame, cells: Sequence[str], title: str, styles: Sequence[Style], said: str) -> alt.VConcatChart:
    return lines(data, cells, measures(data), across(data, title), styles, said, "nothing was dormant")


def dots(data: pl.DataFrame, cells: Sequence[str], title: str, styles: Sequence[Style], said: str) -> alt.VConcatChart:
    """Places along x have no order: marks without a line."""
    channels = theme.policy_channels([replace(s, shape=x) for s, x in zip(styles, SHAPES, strict=False)], "point")
    x, y = across(data, title), measures(data)

    def panel(cell: str, measure: str) -> alt.LayerChart:
        mine = theme.labelled(data.filter(pl.col("cell") == cell), styles).select("policy", "at", measure).drop_nulls(measure)
        tip = [alt.Tooltip("policy:N"), alt.Tooltip("at:N"), alt.Tooltip(f"{measure}:Q", format=".3f")]
        return layered(
            alt.Chart(theme.prepare(mine))
            .mark_point(filled=True, size=90, opacity=1)
            .encode(x=x, y=y[measure], tooltip=tip, **channels)
        )

    return grid(panel, cells, list(y), said)


def across(data: pl.DataFrame, title: str) -> alt.X:
    places = data["at"].unique(maintain_order=True).to_list()
    return alt.X("at:O", title=title, sort=places, scale=alt.Scale(domain=places), axis=alt.Axis(labelAngle=0))


def measures(data: pl.DataFrame) -> dict[str, alt.Y]:
    churn = share("churn", 0, top(data["churn"]), "churn of the full tier between cuts")
    lir = share("lir", title="recurrence: spells that ended full again")
    return {"fmm": missed(top(data["fmm"])), "rel_l2": error(data["rel_l2"]), "lir": lir, "churn": churn}


def missed(high: float) -> alt.Y:
    return share("fmm", 0, high, "dense mass on evicted tokens (FMM)")


def top(*values: pl.Series) -> float:
    return max(theme.ends(x, (0.0, 1.0))[1] for x in values) * 1.05 or 1.0
