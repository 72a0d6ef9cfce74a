"""How each measure looks on an axis and in a tooltip, and the noise floor behind every axis of output error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.theme import NOISE


@dataclass(frozen=True)
class Measure:
    """kind: "error" and "bytes" (logarithmic), "share" (0 to 100 %) or "number" (from 0)."""

    title: str
    kind: str
    form: str
    short: str = ""  # in a tooltip

    @property
    def said(self) -> str:
        return self.short or self.title


MEASURES = {
    "rel_l2": Measure("output error (relative L2, log scale)", "error", ".3g", "output error"),
    "mass_recall": Measure("attention-mass recall", "share", ".1%", "mass recall"),
    "evidence_recall": Measure("evidence recall", "share", ".1%"),
    "far_recall": Measure("far recall (without the first 4 and the last 64 tokens)", "share", ".1%", "far recall"),
    "missed_mass": Measure("missed mass (evicted or not read)", "number", ".2%", "missed mass"),
    "mass_evicted": Measure("mass on evicted tokens", "number", ".2%"),
    "mass_unread": Measure("mass on held tokens not read", "number", ".2%"),
    "evidence_dense": Measure("dense attention mass on evidence", "share", ".2%", "dense mass on evidence"),
    "evidence_read": Measure("dense attention mass on evidence that was read", "share", ".2%", "evidence mass read"),
    "top1_recall": Measure("the top token", "share", ".1%"),
    "top10_recall": Measure("the top 10 tokens", "share", ".1%"),
    "top64_recall": Measure("the top 64 tokens", "share", ".1%"),
    "page_recall": Measure("the best pages", "share", ".1%"),
    "page_recall10": Measure("the 10 best pages", "share", ".1%"),
    "read_churn": Measure("tokens read that changed since the step before", "share", ".1%", "churn of what is read"),
    "resident_share": Measure("memory on the device (of full attention)", "number", ".1%", "memory"),
    "read_share": Measure("bytes read (of full attention)", "number", ".1%", "bytes read"),
    "share": Measure("bytes read and written (of full attention's reads)", "number", ".1%", "of full attention"),
    "bytes": Measure("read and written per KV head and step (bytes, log scale)", "bytes", ",.0f", "bytes"),
    "missed": Measure("dense attention mass on evicted tokens", "number", ".2%"),
    "again": Measure("of the 10 best tokens, those gone", "number", ".2f"),
    "returned": Measure("spells that ended by a return", "share", ".1%"),
    "pages": Measure("pages per KV head and step", "number", ".1f"),
    "run_pages": Measure("neighbouring pages in a run", "number", ".2f"),
    "whole_pages": Measure("bytes of whole pages over bytes of rows", "number", ".3f"),
}
Channel = TypeVar("Channel", alt.X, alt.Y)


def quantity(channel: type[Channel], measure: str, values: pl.Series, field: str = "", **more: Any) -> Channel:
    """The channel of a measure with its title, scale and axis; values: all that it will show. field: its column, if another."""
    m = MEASURES[measure]
    given: dict[str, Any] = {"title": m.title}
    if m.kind == "error":
        given |= {"scale": theme.error_scale(values), "axis": theme.error_axis(values)}
    elif m.kind == "share":
        given |= {"scale": alt.Scale(domain=[0, 1]), "axis": theme.percent_axis()}
    elif m.kind == "bytes":
        low, high = theme.ends(values, (1024.0, 2048.0))
        domain = [max(low / 1.3, 0.5), max(high * 1.3, 1.0)]
        given["scale"] = alt.Scale(type="log", base=2, nice=False, domain=domain)
        given["axis"] = alt.Axis(
            values=[x for x in theme.doublings(*domain) if domain[0] <= x <= domain[1]], labelExpr=theme.SIZES
        )
    elif m.form.endswith("%"):
        given |= {"scale": alt.Scale(zero=True), "axis": alt.Axis(format=".0%", tickCount=5)}
    else:
        given |= {"scale": alt.Scale(zero=True), "axis": alt.Axis(tickCount=5)}
    return channel(f"{field or measure}:Q", **(given | more))


def other(channel: Channel, column: str) -> Channel:
    """The same scale, axis and title for another column."""
    twin = channel.copy(deep=True)
    twin.shorthand = f"{column}:Q"
    return twin


def layered(*layers: alt.Chart | alt.LayerChart, **given: Any) -> alt.LayerChart:
    """Layers over one another, the last on top; given: properties of the whole."""
    return alt.LayerChart(layer=list(layers), **given)


def tooltip(columns: Iterable[str], **also: str) -> list[alt.Tooltip]:
    """The policy, other columns (name: title), then measures, each in its form."""
    named = [alt.Tooltip("policy:N"), *(alt.Tooltip(name, title=title) for name, title in also.items())]
    return named + [alt.Tooltip(f"{n}:Q", format=MEASURES[n].form, title=MEASURES[n].said) for n in columns]


def noise(floor: Floor | None, channel: Channel) -> list[alt.Chart]:
    """A grey band from the start of an axis of output error to the p95 of the noise floor, named; nothing when it would not be seen."""
    if floor is None or floor.p95 <= theme.LEAST_ERROR:
        return []
    base = alt.Chart(theme.prepare(pl.DataFrame({"low": [theme.LEAST_ERROR], "high": [floor.p95]})))
    band = base.mark_rect(aria=False, color=NOISE[0], opacity=0.35)
    flat, start = isinstance(channel, alt.X), other(channel, "low")
    band = band.encode(x=start, x2="high:Q") if flat else band.encode(y=start, y2="high:Q")
    name = base.mark_text(align="left", baseline="top" if flat else "bottom", dx=3, dy=3 if flat else -3, fontSize=10, aria=False)
    name = name.encode(x=start, y=alt.value(0)) if flat else name.encode(x=alt.value(0), y=start)
    return [band, name.encode(text=alt.value("rounding (p95)"))]
