"""One self-contained HTML file: charts, tables and text in, nothing fetched, nothing from a trace ever run as code."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import altair as alt
import jinja2
import polars as pl

from kvsim.errors import WrongUse
from kvsim.report import theme

MOST_ROWS = 400  # rows of a data table that the page shows; its download has all


@dataclass(frozen=True)
class Figure:
    """A chart with the question it answers, how to read it, what qualifies it, and its numbers.

    clickable: marks stay visible to screen readers one by one."""

    kind: ClassVar[str] = "figure"
    name: str
    title: str
    how: str
    chart: alt.TopLevelMixin
    caption: str
    data: pl.DataFrame
    clickable: bool = False

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The chart as Vega-Lite without configuration: the page and the exports bring their own, light or dark."""
        found: dict[str, Any] = self.chart.to_dict()
        return {name: value for name, value in found.items() if name not in ("config", "usermeta")}


@dataclass(frozen=True)
class Table:
    """Rows of text; codes: one longer line under each row, in fixed width; words: columns of sentences, which wrap and stand left."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    codes: Sequence[str] = ()
    notes: Sequence[str] = ()
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, facts (term, value), then tables and figures."""

    title: str
    text: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    blocks: Sequence[Figure | Table] = field(default=())


def render(title: str, lead: Sequence[str], sections: Sequence[Section], policies: Sequence[str] = ()) -> str:
    """-> the page. Every figure needs a name of its own. policies: the labels among which one may be kept in every chart."""
    specs: dict[str, Any] = {}
    data: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for figure in (b for s in sections for b in s.blocks if isinstance(b, Figure)):
        datasets = figure.spec.get("datasets", {})
        for name, rows in datasets.items():  # named by their content: equal frames are kept once
            data[name] = data.get(name) or packed(pl.DataFrame(rows, infer_schema_length=None))
        spec = {name: value for name, value in figure.spec.items() if name != "datasets"}
        specs[figure.name] = {"spec": spec, "data": sorted(datasets), "clickable": figure.clickable, "height": _height(spec) + 60}
        tables[figure.name] = packed(figure.data)
    bundle, boot = _bundle(), _text("boot.js")
    return _environment().from_string(_text("page.html.j2")).render(
        title=title,
        lead=lead,
        sections=sections,
        policies=policies,
        css=_text("page.css"),
        scripts=" ".join(_hash(x) for x in (bundle, boot)),
        bundle=bundle,
        boot=boot,
        heights={name: spec["height"] for name, spec in specs.items()},
        json={"data": _json(data), "specs": _json(specs), "tables": _json(tables), "look": _json(_look())},
    )  # fmt: skip


def write_page(
    out: str | Path, title: str, lead: Sequence[str], sections: Sequence[Section], policies: Sequence[str] = ()
) -> Path:
    """The page as a file, there when complete -> its path. Raises WrongUse for a folder."""
    out = Path(out)
    if out.is_dir():
        raise WrongUse(f"{out} is a folder; expected the name of a page, for example {out / 'report.html'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(out.name + ".partial")
    try:
        aside.write_text(render(title, lead, sections, policies), encoding="utf-8")
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return out


def packed(frame: pl.DataFrame) -> dict[str, Any]:
    """A frame column by column, floats with six digits; a column of text as its words and, per row, the number of its word."""
    floats = [pl.col(n).cast(pl.Float64) for n, t in frame.schema.items() if t.is_float()]
    fit = frame.with_columns(pl.when(x.is_finite()).then(x.round_sig_figs(6)) for x in floats)
    return {"rows": fit.height, "columns": {column.name: _packed(column) for column in fit}}


def _packed(column: pl.Series) -> Any:
    if column.dtype != pl.String:
        return column.to_list()
    words = {word: i for i, word in enumerate(column.unique(maintain_order=True).to_list())}
    return {"words": list(words), "at": [words[word] for word in column]}


def _height(spec: Mapping[str, Any]) -> int:
    """About how many pixels a chart is high: what the page keeps free until it is drawn."""
    for key in ("vconcat", "hconcat", "concat"):
        if key in spec:
            each = [_height(child) for child in spec[key]]
            columns = {"vconcat": 1, "hconcat": len(each)}.get(key, spec.get("columns", len(each)))
            return sum(max(each[i : i + columns]) for i in range(0, len(each), columns))
    return int(spec.get("height", 200)) + 70


def _look() -> dict[str, Any]:
    return {"light": theme.config(), "dark": theme.config(dark=True), "swap": theme.SWAP, "most": MOST_ROWS}


def _json(value: Any) -> str:
    """JSON that may stand inside <script>: no <, > or & survive, and NaN is an error."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def _text(name: str) -> str:
    return (files("kvsim.report") / name).read_text(encoding="utf-8")


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed in one script, safe to stand inside <script>."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(None, vega_lite())  # type: ignore[arg-type]  # its stub lacks the default
    if any(mark in bundle.lower() for mark in ("</script", "<script", "<!--")):
        raise RuntimeError(
            "the Vega bundle of vl-convert-python cannot be put into a page; use a tested version (constraints.txt)"
        )
    return bundle


def vega_lite() -> str:
    """The Vega-Lite version that Altair writes, as vl-convert names it."""
    return alt.SCHEMA_VERSION.rpartition(".")[0]


def _environment() -> jinja2.Environment:
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
