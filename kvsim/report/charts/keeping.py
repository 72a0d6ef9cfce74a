"""What became of attention under a keep policy: by tier along the steps, by how long ago a token left, and when it returns."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy, step_axis
from kvsim.report.charts.measure import MEASURES, layered, noise, quantity
from kvsim.report.charts.rows import ROW, policy_axis
from kvsim.report.theme import KEPT, STEPS, TICK, Style

SHAPES = ("square", "circle", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left")
COLUMNS, WIDTH = 3, 290


def mass_by_tier(parts: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.ConcatChart:
    """parts (policy, step, part, order, mass, error) -> per policy areas of the dense attention mass, and the output error below."""
    there = set(parts.filter(pl.col("mass") > 0)["part"])
    domain = [p for p in KEPT if p in there]
    colour = alt.Color("part:N", **theme.few(domain, [KEPT[p][0] for p in domain], symbolType="square"))
    y = alt.Y("mass:Q", title="dense attention mass", stack="zero", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis())
    error = quantity(alt.Y, "rel_l2", parts["error"], field="error").title("output error")
    said = ["policy:N", alt.Tooltip("step:Q", title="decode step"), "part:N", alt.Tooltip("mass:Q", format=".2%")]
    charts = []
    for s in look:
        mine = parts.filter(pl.col("policy") == s.label)
        shown = alt.Chart(theme.prepare(mine.filter(pl.col("part").is_in(domain)).drop("error")))
        area = shown.mark_area(aria=False, interpolate="step-after", line=False, opacity=0.9).encode(
            x=step_axis(), y=y, order="order:Q", color=colour, tooltip=said
        )
        rows = theme.prepare(mine.select("policy", "step", "error").unique(maintain_order=True))
        line = alt.Chart(rows).mark_line(aria=False, strokeWidth=1.5, color=theme.INK[0])
        drawn = layered(*noise(floor, error), line.encode(x=step_axis("decode step"), y=error))
        title = alt.Title(s.label, fontSize=12, offset=6)
        charts.append(
            alt.vconcat(
                area.properties(width=WIDTH, height=120, title=title), drawn.properties(width=WIDTH, height=60), spacing=22
            ).resolve_scale(x="shared")
        )
    return alt.concat(*charts, columns=COLUMNS, spacing=26).properties(
        description="Dense attention mass over the decode steps by where its tokens are, per policy, with the output error below."
    )


def by_lag(lags: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """lags (policy, lag, missed, again) -> two panels over the steps since a token was evicted, a line per policy."""
    focus, opacity = focus_on_policy()
    ticks = theme.doublings(*theme.ends(lags["lag"], (1.0, 2.0)))
    x = alt.X(
        "lag:Q", title="steps since it was evicted (log scale)", scale=alt.Scale(type="log", base=2, nice=False),
        axis=alt.Axis(values=ticks, format="d"),
    )  # fmt: skip
    base = alt.Chart(theme.prepare(lags))
    panels = []
    for name in ("missed", "again"):
        said = ["policy:N", alt.Tooltip("lag:Q", format="d"), alt.Tooltip(f"{name}:Q", format=MEASURES[name].form)]
        line = base.mark_line(aria=False, point=True).encode(
            x=x, y=quantity(alt.Y, name, lags[name]), opacity=opacity, tooltip=said, **theme.policy_channels(look, "line")
        )
        panels.append(line.properties(width=430, height=260))
    return alt.hconcat(panels[0].add_params(focus), panels[1], spacing=50).properties(
        description="Dense attention mass on evicted tokens, and how many of the best tokens they are, by how long ago they were evicted."
    )


def how_many_return(returns: pl.DataFrame, look: Sequence[Style]) -> alt.HConcatChart:
    """returns (policy, part, order, dormancy, spells, share) -> a panel per dormancy: the share of spells that ended by a return."""
    look = [s for s in look if s.label in set(returns["policy"])]
    names = list(dict.fromkeys(returns.sort("order")["part"]))
    panels = []
    for i, dormancy in enumerate(returns["dormancy"].unique().sort().to_list()):
        mine = returns.filter(pl.col("dormancy") == dormancy)
        x = quantity(alt.X, "returned", mine["share"], field="share").title(f"returned after {dormancy} or more cuts")
        panels.append(_dots(mine, x, names, look, "share", ".1%", "spells", named=i == 0).properties(width=250))
    return alt.hconcat(*panels, spacing=26).properties(
        description="Share of the times that a token left the full tier which ended by its return, of the policy and of two oracles."
    )


def error_dots(data: pl.DataFrame, names: Sequence[str], look: Sequence[Style], floor: Floor | None, said: str) -> alt.LayerChart:
    """data (policy, part, order, error) -> per policy a mark for each part on an axis of output error."""
    look = [s for s in look if s.label in set(data["policy"])]
    x = quantity(alt.X, "rel_l2", data["error"], field="error")
    there = [n for n in names if n in set(data["part"])]
    chart = layered(*noise(floor, x), _dots(data, x, there, look, "error", ".3g"))
    return chart.properties(width=640, height=ROW * len(look), description=said)


def pages_by_way(data: pl.DataFrame, look: Sequence[Style]) -> alt.Chart:
    """data (policy, part, order, pages) -> per policy a mark for each way to hold pages."""
    look = [s for s in look if s.label in set(data["policy"])]
    names = list(dict.fromkeys(data.sort("order")["part"]))
    x = quantity(alt.X, "pages", data["pages"])
    return _dots(data, x, names, look, "pages", ",.1f").properties(
        width=640, description="Pages in memory per KV head, by who owns a page, with and without compaction."
    )


def _dots(
    data: pl.DataFrame,
    x: alt.X,
    names: Sequence[str],
    look: Sequence[Style],
    field: str,
    form: str,
    *more: str,
    named: bool = True,
) -> alt.Chart:
    """A row per policy, whether it has a mark or not, and a mark per part."""
    colours = [
        KEPT[n][0] if n in KEPT else (TICK[0] if n == "nothing left out" else STEPS[i % len(STEPS)][0])
        for i, n in enumerate(names)
    ]
    return (
        alt.Chart(theme.prepare(data))
        .mark_point(filled=True, size=80, opacity=1)
        .encode(
            x=x,
            y=policy_axis(look, named).scale(alt.Scale(domain=[s.label for s in look])),
            color=alt.Color("part:N", **theme.few(names, colours)),
            shape=alt.Shape("part:N", **theme.few(names, SHAPES[: len(names)])),
            tooltip=["policy:N", "part:N", alt.Tooltip(f"{field}:Q", format=form), *(f"{n}:Q" for n in more)],
        )
        .properties(height=ROW * len(look))
    )
