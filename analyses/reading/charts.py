"""The four frames as charts, in the report's looks: a column of panels per cell."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from analyses.panels import WIDE, error, grid, lines, look, share
from analyses.reading.measure import DEPTHS, MULTIBOX, ORACLE, PAGES, QUEST, RANDOM, REACHED, size
from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.theme import FAMILIES, SHAPES, STEPS

ALL = [1, 0]
BLUE, GREY, PALE = (FAMILIES[n][0] for n in ("quest", "oracle", "random_read"))
TEAL, ORANGE, _, RED = (light for light, _ in STEPS)


BOXES = look(
    {
        QUEST: (BLUE, ALL),
        **dict(zip(MULTIBOX, ((TEAL, ALL), (TEAL, [6, 3]), (ORANGE, ALL), (ORANGE, [6, 3])), strict=True)),
        size(8): (BLUE, [6, 3]),
        size(4): (BLUE, [2, 2]),
        ORACLE: (GREY, [9, 3, 2, 3]),
        RANDOM: (PALE, [1, 3]),
    }
)  # colour: boxes; dash: how a page is parted, or its size
AGES = look(
    {
        QUEST: (BLUE, ALL),
        "quest, every 16 steps": (TEAL, ALL),
        "quest, every 64 steps": (ORANGE, ALL),
        "quest, once": (RED, ALL),
        ORACLE: (BLUE, [6, 3]),
        "oracle, every 64 steps": (ORANGE, [6, 3]),
        "oracle, once": (RED, [6, 3]),
    }
)  # colour: how long a set is kept; dash and shape: who ranks
NOTHING = "hardly any attention on the evidence"
NAMES = list(dict.fromkeys(s.label for s in (*BOXES, *AGES)))


def slack(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    layers = data["layer"].unique().sort().to_list()
    named = data.with_columns(layer=pl.format("layer {}", "layer"))
    colour = alt.Color("layer:N", **theme.few([f"layer {x}" for x in layers], [c for c, _ in STEPS]))
    shape = alt.Shape("layer:N", **theme.few([f"layer {x}" for x in layers], SHAPES[: len(layers)]))
    titles = {"slack": "slack, mean of pages (scaled logits)", "loosest": "slack, loosest page (scaled logits)"}
    top = theme.ends(data["loosest"], (0.0, 1.0))[1] + 1

    def panel(cell: str, measure: str) -> alt.LayerChart:
        x = alt.X("page:O", title="page size (tokens)", sort=[str(n) for n in PAGES], axis=alt.Axis(labelAngle=0))
        y = alt.Y(f"{measure}:Q", title=titles[measure], scale=alt.Scale(domain=[0, top]))
        mine = named.filter(pl.col("cell") == cell).select("layer", "page", measure)
        said = [alt.Tooltip("layer:N"), alt.Tooltip("page:O"), alt.Tooltip(f"{measure}:Q", format=".2f")]
        base = alt.Chart(theme.prepare(mine)).encode(x=x, y=y, color=colour, tooltip=said)
        return layered(base.mark_line(aria=False), base.mark_point(filled=True, size=60, opacity=1).encode(shape=shape))

    return grid(panel, cells, list(titles), "Slack of the bound by page size: a line per layer, a column per cell.")


def depth(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    layers = data["layer"].unique().sort().to_list()
    named = data.with_columns(layer=pl.format("layer {}", "layer"))
    rows = [*DEPTHS.values(), *REACHED.values()]
    domain = [f"layer {x}" for x in layers]

    def panel(cell: str, measure: str) -> alt.Chart:
        axis = alt.Axis(grid=True, labelLimit=300) if cell == cells[0] else alt.Axis(grid=True, labels=False, ticks=False)
        x = alt.X("part:Q", title="share of all pages", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis())
        mine = named.filter(pl.col("cell") == cell).select("layer", "wanted", "part")
        base = alt.Chart(theme.prepare(mine)).mark_point(filled=True, size=80, opacity=1)
        return base.encode(
            x=x, y=alt.Y("wanted:N", sort=rows, title=None, axis=axis), yOffset=alt.YOffset("layer:N", sort=domain),
            color=alt.Color("layer:N", **theme.few(domain, [c for c, _ in STEPS])),
            shape=alt.Shape("layer:N", **theme.few(domain, SHAPES[: len(layers)])),
            tooltip=[alt.Tooltip("layer:N"), alt.Tooltip("wanted:N"), alt.Tooltip("part:Q", format=".1%")],
        )  # fmt: skip

    return grid(panel, cells, ["part"], "Share of all pages that a guarantee must read: a mark per layer, a column per cell.")


def by_bytes(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    ticks = alt.Axis(format=".0%", values=[0, 0.2, 0.4, 0.6])
    x = alt.X("share:Q", title="bytes, of full attention's", scale=alt.Scale(domain=[0, 0.7]), axis=ticks)
    y = {"mass_recall": share("mass_recall", 0), "rel_l2": error(data["rel_l2"])}
    return lines(data, cells, y, x, BOXES, "Mass recall and output error at equal bytes.")


def age(data: pl.DataFrame, cells: Sequence[str]) -> alt.VConcatChart:
    data = data.filter(pl.col("policy").is_in([s.policy for s in AGES]))
    ages = data.sort("age")["ages"].unique(maintain_order=True).to_list()
    x = alt.X(
        "ages:O", title="steps since the set was ranked", sort=ages, scale=alt.Scale(domain=ages), axis=alt.Axis(labelAngle=-45)
    )
    most = theme.ends(data["read_tokens"], (0.0, 1.0))[1]
    y = {
        "mass_recall": share("mass_recall", 0.6),
        "rel_l2": error(data["rel_l2"]),
        "evidence_recall": share("evidence_recall", 0),
        "read_tokens": alt.Y("read_tokens:Q", title="tokens read per query head", scale=alt.Scale(domain=[0, most]), axis=WIDE),
    }
    return lines(data, cells, y, x, AGES, "Recall, error, evidence and tokens read by the age of the set.", NOTHING)
