"""How kvsim charts look: one light and one dark configuration, one fixed style per policy family, token axes, the frame check.

Colours were searched for the largest least distance over normal, deutan, protan and tritan vision (Machado 2009; least CIE76
distance 25 in light, 22 in dark); dash and shape repeat what colour says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from kvsim.errors import WrongUse
from kvsim.report.names import family, labels

ROW_CAP = 5_000  # rows of one dataset of one chart
LEAST_ERROR = 1e-4  # where a logarithmic axis of output error begins: rounding to 16 bits leaves about 3e-4

CROSSED = "M-0.6,-1L0,-0.4L0.6,-1L1,-0.6L0.4,0L1,0.6L0.6,1L0,0.4L-0.6,1L-1,0.6L-0.4,0L-1,-0.6Z"
BAR = "M-1,-0.4H1V0.4H-1Z"
HEXAGON = "M0,-1L0.87,-0.5V0.5L0,1L-0.87,0.5V-0.5Z"

# family: light, dark, dash, shape
FAMILIES: dict[str, tuple[str, str, list[int], str]] = {
    "full": ("#1B1F25", "#E6E8EA", [1, 0], "cross"),
    "oracle": ("#4D4D4D", "#D0D0D0", [6, 4], "diamond"),
    "random_read": ("#8C8C8C", "#9A9A9A", [1, 3], "triangle-down"),
    "recency": ("#8C8C8C", "#9A9A9A", [7, 3, 1, 3], BAR),
    "quest": ("#0072B2", "#2F7FD0", [1, 0], "circle"),
    "h2o": ("#CC3311", "#E8452C", [4, 2], "square"),
    "tova": ("#8800EE", "#9933FF", [9, 2], "triangle-up"),
    "streaming_llm": ("#661100", "#CC6677", [2, 2], "triangle-right"),
    "snapkv": ("#33BBEE", "#34BBEE", [8, 2], "triangle-left"),
    "kivi": ("#99BB66", "#AAEEAA", [5, 2, 1, 2], CROSSED),
    "qevict": ("#E69F00", "#F0C33C", [10, 3, 2, 3], HEXAGON),
}
SPARE = (("#AA6688", "#CC88AA"), ("#660066", "#AA66CC"), ("#7766CC", "#8888EE"), ("#886600", "#BB9944"))
DASHES = ([2, 2], [9, 3], [5, 2, 1, 2], [3, 5], [12, 4, 3, 4], [6, 3], [1, 0])
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left", "triangle-right")

READ, CODED, UNREAD = ("#1B7F79", "#3FB5AC"), ("#E6A02E", "#EFC050"), ("#B4BBC3", "#5F6873")
STATES = {"read, full precision": READ, "read, coded": CODED, "kept, not read": UNREAD}  # of metrics.raster
FATES = {  # of metrics.quality
    "read, full precision": READ,
    "read, coded": CODED,
    "read from the host": ("#8822CD", "#B98CFE"),
    "kept, not read": UNREAD,
    "gone for good": ("#33383E", "#F4F6F8"),
    "learned sink": ("#E3E6EB", "#2A313A"),
}
TIERS = {  # of metrics.tokens
    "held, full precision": READ,
    "held, coded": CODED,
    "only on the host": FATES["read from the host"],
    "gone for good": FATES["gone for good"],
}
KEPT = {  # of metrics.keeping
    "sinks": ("#7A0B01", "#C0502F"),
    "recent window": ("#33BBEC", "#2F5FE1"),
    "history, full precision": READ,
    "coded": CODED,
    "on the host": FATES["read from the host"],
    "gone for good": FATES["gone for good"],
}
LOST = {  # of metrics.loss
    "read": READ,
    "lost: the index chose other pages": ("#E69F01", "#F0C33D"),
    "lost: evicted before": FATES["gone for good"],
    "lost: the budget is too small": ("#B4BBC4", "#5F6874"),
}
BYTES = {  # of metrics.traffic
    "K and V rows read": READ,
    "K and V rows": READ,
    "index scanned": ("#33BBED", "#2F5FE0"),
    "index": ("#33BBED", "#2F5FE0"),
    "scales and zeros read": CODED,
    "scales and zeros": CODED,
    "attention scores written and read": ("#8822CC", "#B98CFF"),
    "rows and index written or rebuilt": ("#7A0B00", "#C0502E"),
    "moved between tiers": FATES["gone for good"],
    "copies on host or disk": FATES["gone for good"],
}
INK = ("#1B1F24", "#E6E8EB")  # marks that are not one policy's
TIMES = {  # of sections.cost
    "whole step, as measured": INK,
    "all that is not the cache": UNREAD,
    "attention": READ,
    "index: scan and top-k": BYTES["index"],
    "codes decoded": CODED,
    "scores looked at": BYTES["attention scores written and read"],
    "summaries and codes written": BYTES["rows and index written or rebuilt"],
    "rows moved or fetched": FATES["gone for good"],
}
STEPS = (("#1B7F7A", "#3FB5AD"), ("#E69F02", "#F0C33E"), ("#0A3A8E", "#3A6AE8"), ("#CC3312", "#F05A3C"))  # an ordered few
EVIDENCE = ("#C24F00", "#FF8A3D")
PICKED = ("#C24F01", "#FF8A3E")
TICK = ("#8A929B", "#8A929B")  # what stands behind a mark
NOISE = ("#A9B1BA", "#59636E")  # the noise floor
# light -> dark: the page rewrites the colours of a specification with it
SWAP = dict(
    [
        *((light, dark) for light, dark, _, _ in FAMILIES.values()),
        *SPARE,
        *(pair for named in (FATES, TIERS, KEPT, LOST, BYTES) for pair in named.values()),
        *STEPS,
        EVIDENCE,
        PICKED,
        TICK,
        NOISE,
        INK,
    ]
)

FONT = "Inter, 'Segoe UI', 'Liberation Sans', 'DejaVu Sans', Arial, sans-serif"
TOKENS = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~g') + 'M' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '~g') + 'K' : format(datum.value, 'd')"
)  # powers of two, which the SI prefixes of d3 are not
SIZES = (
    "datum.value >= 1073741824 ? format(datum.value / 1073741824, '~g') + ' GiB' : "
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~g') + ' MiB' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '~g') + ' KiB' : format(datum.value, 'd') + ' B'"
)


@dataclass(frozen=True)
class Style:
    """How one policy is drawn everywhere in a report."""

    policy: str
    label: str
    colour: str
    dash: list[int]
    shape: str


def styles(policies: Iterable[str]) -> list[Style]:
    """One style per policy, in the order given: colour by family, fixed for known ones; dash and shape tell apart what shares a colour."""
    spare: dict[str, int] = {}
    dashes: dict[str, list[list[int]]] = {}
    shapes: dict[str, list[str]] = {}
    out = []
    for policy, label in labels(policies).items():
        kin = family(policy)
        if kin in FAMILIES:
            colour, _, dash, shape = FAMILIES[kin]
        else:
            i = spare.setdefault(kin, len(spare))
            colour, dash, shape = SPARE[i % len(SPARE)][0], DASHES[i % len(DASHES) - 1], SHAPES[i % len(SHAPES)]
        worn, cut = shapes.setdefault(colour, []), dashes.setdefault(colour, [])
        cut.append(min((dash, *DASHES), key=cut.count))  # its own, else the first that is worn least
        worn.append(min((shape, *SHAPES), key=worn.count))
        out.append(Style(policy, label, colour, cut[-1], worn[-1]))
    return out


def labelled(frame: pl.DataFrame, look: Sequence[Style]) -> pl.DataFrame:
    """The frame with policy ids replaced by labels, the last policy of `look` first: marks of the first are drawn on top.

    Rows of policies without a style are left out."""
    rank = {s.policy: i for i, s in enumerate(reversed(look))}
    return (
        frame.filter(pl.col("policy").is_in(list(rank)))
        .sort(pl.col("policy").replace_strict(rank, return_dtype=pl.Int32), maintain_order=True)
        .with_columns(pl.col("policy").replace_strict({s.policy: s.label for s in look}, return_dtype=pl.String))
    )


def named(frame: pl.DataFrame, look: Sequence[Style]) -> pl.DataFrame:
    """The frame with labels where policies stand by their ids, all rows, in their order."""
    return frame.with_columns(pl.col("policy").replace({s.policy: s.label for s in look}))


def prepare(frame: pl.DataFrame) -> pl.DataFrame:
    """A frame fit to embed: finite floats of five digits, plain types, plain column names, at most ROW_CAP rows.

    Raises WrongUse for anything else: a chart is drawn from a small frame, so aggregate first."""
    if frame.height > ROW_CAP:
        raise WrongUse(
            f"a chart of {frame.height:,} rows: expected at most {ROW_CAP:,}; aggregate first, as kvsim.metrics.quality does, "
            "or take a part of the run: metrics.run.part(run, layers=[…]), kvsim report --layers"
        )
    for name, dtype in frame.schema.items():
        if not name.isidentifier():
            raise WrongUse(f"column {name!r}: expected letters, digits and _, because Vega reads dots and brackets as paths")
        if not (dtype.is_numeric() or dtype in (pl.String, pl.Boolean)) or dtype.is_decimal():
            raise WrongUse(f"column {name!r} of {dtype}: expected numbers, text or booleans")
    floats = [pl.col(n).cast(pl.Float64) for n, t in frame.schema.items() if t.is_float()]
    return frame.with_columns(pl.when(x.is_finite()).then(x.round_sig_figs(5)) for x in floats)


def doublings(low: float, high: float) -> list[float]:
    """Powers of two around [low, high]: ticks of an axis of tokens or bytes, at most nine."""
    first, last = math.floor(math.log2(max(low, 1))), math.ceil(math.log2(max(high, 2)))
    return [float(2**i) for i in range(first, last + 1, 1 + (last - first) // 9)]


def evenly(high: float) -> list[float]:
    """0 and a few round sizes up to `high`: ticks of a linear axis of bytes."""
    step = 2.0 ** math.floor(math.log2(max(high, 4) / 4))
    return [step * i for i in range(math.floor(high / step) + 1)]


def ends(values: pl.Series, otherwise: tuple[float, float]) -> tuple[float, float]:
    """The least and the largest value, or `otherwise` when there is none."""
    told = values.drop_nulls().cast(pl.Float64).to_list()
    return (min(told), max(told)) if told else otherwise


def error_axis(errors: pl.Series) -> alt.Axis:
    """Decades of a logarithmic axis of output error."""
    high = error_scale(errors).domain[1]
    return alt.Axis(format="~g", values=[x for x in (0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000) if x <= high], grid=True)


def error_scale(errors: pl.Series) -> alt.Scale:
    """Logarithmic, from LEAST_ERROR, where whatever is smaller stands, to above the largest error."""
    top = max(1.2 * ends(errors, (1.0, 1.0))[1], 0.1)
    decade = 10.0 ** math.ceil(math.log10(top))
    return alt.Scale(type="log", nice=False, clamp=True, domain=[LEAST_ERROR, decade if decade < 3 * top else top])


def percent_axis() -> alt.Axis:
    return alt.Axis(format=".0%", tickCount=5)


def few(labels: Sequence[str], colours: Sequence[str], title: str | None = None, **legend: Any) -> dict[str, Any]:
    """Scale, order and legend of a channel that tells a few named things apart."""
    return {
        "title": title,
        "sort": list(labels),
        "scale": alt.Scale(domain=list(labels), range=list(colours)),
        "legend": alt.Legend(labelLimit=320, symbolOpacity=1, **legend),
    }


def policy_channels(look: Sequence[Style], mark: str) -> dict[str, Any]:
    """Colour with dash (mark "line") or with shape ("point") by policy label, in one legend."""
    domain = [s.label for s in look]
    symbol: dict[str, Any] = {"symbolType": "stroke", "symbolSize": 400, "symbolStrokeWidth": 2} if mark == "line" else {}
    columns = 4 if max(map(len, domain), default=0) < 28 else 3
    legend = alt.Legend(title=None, columns=columns, labelLimit=300, symbolLimit=0, symbolOpacity=1, **symbol)
    both: dict[str, Any] = {"title": None, "sort": domain, "legend": legend}
    channels: dict[str, Any] = {
        "color": alt.Color("policy:N", scale=alt.Scale(domain=domain, range=[s.colour for s in look]), **both)
    }
    if mark == "line":
        channels["strokeDash"] = alt.StrokeDash("policy:N", scale=alt.Scale(domain=domain, range=[s.dash for s in look]), **both)
    else:
        channels["shape"] = alt.Shape("policy:N", scale=alt.Scale(domain=domain, range=[s.shape for s in look]), **both)
    return channels


def dash_by_rank(look: Sequence[Style]) -> alt.StrokeDashValue:
    """The dash of the policy whose place in `look` stands in column `rank`: dashed lines under a legend of shapes."""
    return alt.StrokeDashValue([1, 0], condition=[{"test": f"datum.rank === {i}", "value": s.dash} for i, s in enumerate(look)])


def config(dark: bool = False) -> dict[str, Any]:
    """The Vega-Lite configuration of every chart; a chart that configures itself would override it and break the dark page."""
    strong, soft, grid, ground = (
        ("#E6E8EB", "#A7AFB8", "#30363D", "#12161B") if dark else ("#1B1F24", "#57606A", "#E4E7EB", "#FFFFFF")
    )
    return {
        "background": ground,
        "font": FONT,
        "padding": 6,
        "view": {"stroke": None},
        "title": {
            "anchor": "start", "frame": "group", "fontSize": 14, "fontWeight": 600, "color": strong, "offset": 24,
            "subtitleFontSize": 12, "subtitleColor": soft, "subtitlePadding": 4,
        },
        "axis": {
            "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": 500, "labelColor": soft, "titleColor": strong, "gridColor": grid,
            "domainColor": soft, "tickColor": soft, "domain": False, "tickSize": 4, "labelPadding": 4, "titlePadding": 8, "labelLimit": 260,
        },
        "axisX": {"grid": False, "domain": True},
        "axisY": {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleX": 0, "titleY": -8, "titleBaseline": "bottom"},
        "legend": {
            "orient": "top", "direction": "horizontal", "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500, "labelColor": strong,
            "titleColor": strong, "symbolSize": 80, "offset": 28, "titleLimit": 400, "columnPadding": 18, "gradientLength": 220,
        },
        "header": {"labelColor": strong, "titleColor": strong, "labelFontSize": 12},
        "range": {"heatmap": {"scheme": "viridis"}, "ramp": {"scheme": "viridis"}},
        "line": {"strokeWidth": 2},
        "rule": {"color": soft},
        "text": {"color": strong, "fontSize": 11},
    }  # fmt: skip
