"""One policy, one head, one step: which heads lose, what the one that is picked reads, and what a second policy reads otherwise.

Menus and clicks are parameters of one specification, so every panel follows them. What there is of every head stands in a row of
text, which becomes rows only where it is picked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import step_axis
from kvsim.report.charts.difference import KINDS, tokens_by_layer
from kvsim.report.charts.measure import layered, noise, quantity, tooltip
from kvsim.report.charts.profile import evidence_frames
from kvsim.report.charts.rows import ROW, policy_axis
from kvsim.report.charts.waterfall import FALLS, falling
from kvsim.report.theme import PICKED, STATES, TICK, Style

NONE = -1  # at_step: all decode steps together
SAID = ("rel_l2", "missed_mass", "evidence_recall")
RECALL = "its evidence recall (a gap: hardly any of its dense mass lies there)"
SERIES = {"rel_l2": "errors", "evidence_recall": "recalls", "missed_mass": "misses"}  # measure: its values at each step, as text
HEAD = "isDefined(pick.layer) ? 'layer ' + pick.layer + ', query head ' + pick.q_head : 'all heads'"
WHEN = "at_step < 0 ? 'all decode steps' : 'decode step ' + at_step"
WIDTH, FIRST_ROW, RASTER = 1000, 400, 170


class Read(NamedTuple):
    """What heads read (CELLS of metrics.grids) on a grid of `across` cells of `width` positions; alphabet: its letters; missing: policies
    and heads without, as `said`."""

    cells: pl.DataFrame
    steps: Sequence[int]
    width: int
    across: int
    alphabet: str
    missing: pl.DataFrame


def explorer(
    heads: pl.DataFrame,
    steps: Sequence[int],
    highest: float,
    read: Read | None,
    pairs: pl.DataFrame,
    evidence: pl.DataFrame,
    look: Sequence[Style],
    floor: Floor | None,
) -> alt.VConcatChart:
    """heads (policy, layer, q_head, SAID, FALLS, and as text at each of `steps`: SERIES, FALLS_text), highest: error of any head at any
    step; pairs (of metrics.grids), evidence (start, stop, label) -> a map of output error by layer and query head for one policy, and what
    the picked head loses, keeps and reads, beside a second policy. Without `read`, the panels of positions are left out."""
    labels = [s.label for s in look]
    data = theme.prepare(heads)
    pick = _pick(data, labels[0])
    policies = [
        alt.param("shown", value=labels[0], bind=alt.binding_select(options=labels, name="policy: ")),
        alt.param(
            "other", value=labels[min(1, len(labels) - 1)], bind=alt.binding_select(options=labels, name="compared with: ")
        ),
    ]
    options, said = [NONE, *steps], ["all together", *map(str, steps)]
    step = alt.param("at_step", value=NONE, bind=alt.binding_select(options=options, labels=said, name="decode step: "))
    over = alt.vconcat(*_series(data, steps, highest, pick, look, floor), spacing=36)
    rows: list[Any] = [_heads(data, steps, pick, look, floor), over, _falls(data, steps, pick)]
    if read is not None:
        first, last = read.steps[0], read.steps[-1]
        rows += [_kept(read, pick, evidence, (first, last)), _apart(read, pick, evidence, (first, last)), _by_layer(pairs)]
    return (
        alt.vconcat(*rows, spacing=44)
        .add_params(*policies, step)
        .resolve_scale(color="independent", strokeDash="independent", opacity="independent")
        .properties(
            description="Map of output error by layer and query head for one policy; the picked head under every policy, over the steps "
            "and positions, and beside a second policy."
        )
    )


def _pick(data: pl.DataFrame, first: str) -> alt.Parameter:
    """A layer and a query head, by a click or from menus; at first the worst head of the first policy."""
    worst = data.filter(pl.col("policy") == first).sort("rel_l2", descending=True, nulls_last=True).row(0, named=True)
    names = {"q_head": "query head: ", "layer": "layer: "}  # the menus stand the other way round
    menus = {n: alt.binding_select(options=sorted(data[n].unique().to_list()), name=said) for n, said in names.items()}
    at_first = [{n: worst[n] for n in names}]
    return alt.selection_point(
        "pick", fields=list(names), on="click", toggle=False, clear="dblclick", value=at_first, bind=menus,  # type: ignore[arg-type]  # a menu per field
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- heads
def _heads(
    data: pl.DataFrame, steps: Sequence[int], pick: alt.Parameter, look: Sequence[Style], floor: Floor | None
) -> alt.HConcatChart:
    base = alt.Chart(data)
    for measure, column in SERIES.items():
        base = base.transform_calculate(**{measure: at_step(steps, column, measure)})
    grid = _grid(base, data, pick).properties(
        width=_span(data["q_head"].n_unique(), FIRST_ROW), height=max(_span(data["layer"].n_unique(), FIRST_ROW), ROW * len(look))
    )
    error = quantity(alt.X, "rel_l2", data["rel_l2"], title="output error (log scale)")
    missed = quantity(alt.X, "missed_mass", data["missed_mass"], title="missed mass", axis=alt.Axis(format=".0%", tickCount=3))
    details = [
        _detail(base, pick, error, policy_axis(look), noise(floor, error)),
        _detail(base, pick, missed, policy_axis(look, named=False), []),
    ]
    beside = alt.hconcat(*(d.properties(width=230, height=ROW * len(look)) for d in details), spacing=18)
    return alt.hconcat(
        alt.hconcat(
            grid, title=_title(f"'Output error of ' + shown + ', ' + ({WHEN})", "click a cell; a double click shows all heads")
        ),
        beside.properties(title=_title(f"'Every policy: ' + ({HEAD})", "dot: the head that is picked; ticks: the others")),
        spacing=40,
    )


def at_step(steps: Sequence[int], column: str, otherwise: str) -> str:
    """An expression: the value of a column of text at the step that is picked; of all steps, `otherwise`."""
    at = f"split(datum.{column}, ' ')[indexof([{','.join(map(str, steps))}], at_step)]"
    return f"at_step < 0 ? datum.{otherwise} : ({at} === '' ? null : toNumber({at}))"


def _grid(base: alt.Chart, data: pl.DataFrame, pick: alt.Parameter) -> alt.Chart:
    domain, decades = _colours(data["rel_l2"])
    picked = alt.when(pick, empty=False)
    return (
        base.transform_filter("datum.policy === shown")
        .mark_rect(cursor="pointer")
        .encode(
            x=alt.X("q_head:O", title="query head", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("layer:O", title=None, axis=alt.Axis(labelExpr="'layer ' + datum.label", labelOverlap=True)),
            color=alt.Color(
                "rel_l2:Q",
                title="output error",
                scale=alt.Scale(type="log", domain=domain, clamp=True, scheme="viridis"),
                legend=alt.Legend(format="~g", values=decades, orient="bottom", offset=8),
            ),
            stroke=picked.then(alt.value(PICKED[0])).otherwise(alt.value(None)),
            strokeWidth=picked.then(alt.value(3)).otherwise(alt.value(0)),
            tooltip=_tooltip(),
        )
        .add_params(pick)
    )


def _detail(base: alt.Chart, pick: alt.Parameter, x: alt.X, y: alt.Y, behind: list[alt.Chart]) -> alt.LayerChart:
    base = base.encode(x=x, y=y)
    ticks = base.mark_tick(opacity=0.4, thickness=1, color=TICK[0], aria=False)
    dots = base.mark_point(filled=True, size=80, opacity=1, color=PICKED[0]).encode(tooltip=_tooltip()).transform_filter(pick)
    return layered(*behind, ticks, dots)


# ---------------------------------------------------------------------------------------------- steps
def _series(
    data: pl.DataFrame, steps: Sequence[int], highest: float, pick: alt.Parameter, look: Sequence[Style], floor: Floor | None
) -> list[alt.LayerChart]:
    """The picked head over the steps."""
    panels = []
    for measure, title in (("rel_l2", "its output error (relative L2, log scale)"), ("evidence_recall", RECALL)):
        column = SERIES[measure]
        if not data[column].str.contains(r"\d").any():
            continue
        y = quantity(alt.Y, measure, pl.Series([highest]), field="value", title=title)
        base = (
            alt.Chart(data)
            .transform_filter(pick)
            .transform_filter("isDefined(pick.layer)")
            .transform_calculate(text=f"split(datum.{column}, ' ')", at="split('" + " ".join(map(str, steps)) + "', ' ')")
            .transform_flatten(["text", "at"])
            .transform_calculate(value="datum.text === '' ? null : toNumber(datum.text)", step="toNumber(datum.at)")
        )
        x = step_axis("decode step").scale(alt.Scale(domain=[steps[0], max(steps[-1], steps[0] + 1)], nice=False))
        line = base.mark_line(aria=False, strokeWidth=1.5).encode(
            x=x,
            y=y,
            tooltip=[*tooltip((), layer="layer", q_head="query head"), "step:Q", alt.Tooltip("value:Q", format=".3g")],
            **theme.policy_channels(look, "line"),
        )
        behind = noise(floor, y) if measure == "rel_l2" else []
        panels.append(layered(*behind, line, _here().encode(x=x), width=WIDTH, height=160))
    return panels


def _here() -> alt.Chart:
    """A rule at the step that is picked; none where all are taken together."""
    one = (
        alt.Chart(theme.prepare(pl.DataFrame({"one": [0]}))).transform_filter("at_step >= 0").transform_calculate(step="at_step")
    )
    return one.mark_rule(aria=False, color=PICKED[0], strokeWidth=1.5)


def _falls(data: pl.DataFrame, steps: Sequence[int], pick: alt.Parameter) -> alt.HConcatChart:
    """Where the dense attention mass of the picked head went, under both policies."""
    there = [n for n in FALLS if data[n].max()]
    values = [f"({at_step(steps, f'{n}_text', n)})" for n in there]
    sides = []
    for policy in ("shown", "other"):
        mine = alt.Chart(data).transform_filter(pick).transform_filter(f"datum.policy === {policy}")
        chart = falling(mine, there, values).properties(width=430, height=190)
        sides.append(
            chart.properties(title=_title(f"'Attention mass under ' + {policy}", "dense attention first, then what became of it"))
        )
    return alt.hconcat(*sides, spacing=60)


# ---------------------------------------------------------------------------------------------- positions
def _kept(read: Read, pick: alt.Parameter, evidence: pl.DataFrame, ends: tuple[int, int]) -> alt.LayerChart:
    """What the picked head kept and read under the policy that is shown."""
    states = list(STATES)
    kind = f"datum.code === 1 ? '{states[2]}' : datum.code < 5 ? '{states[0]}' : '{states[1]}'"
    cells = _unfolded(read, pick).transform_filter("datum.policy === shown && datum.code > 0")
    cells = cells.transform_calculate(kind=kind, share="datum.code === 1 ? 1 : ((datum.code - 2) % 3 + 1) / 3")
    marks = _cells(cells, read, ends, states, [STATES[s][0] for s in states])
    title = _title(
        f"'Kept and read by ' + shown + ': ' + ({HEAD})", "position across, decode steps down; blank is evicted or not yet there"
    )
    return layered(marks, *_over(read, evidence, ends), width=_wide(read), height=_high(read), title=title)


def _apart(read: Read, pick: alt.Parameter, evidence: pl.DataFrame, ends: tuple[int, int]) -> alt.LayerChart:
    """What the two policies read: both, or one alone."""
    level = "datum.code < 2 ? 0 : ((datum.code - 2) % 3 + 1) / 3"
    both, first, second = KINDS
    cells = (
        _unfolded(read, pick)
        .transform_filter("(datum.policy === shown || datum.policy === other) && datum.code > 1")
        .transform_calculate(a=f"datum.policy === shown ? {level} : 0", b=f"datum.policy === other ? {level} : 0")
        .transform_aggregate(a="max(a)", b="max(b)", groupby=["start", "stop", "first", "last"])
        .transform_calculate(
            kind=f"datum.a > 0 && datum.b > 0 ? '{both}' : datum.a > 0 ? '{first}' : '{second}'", share="max(datum.a, datum.b)"
        )
    )
    marks = _cells(cells, read, ends, list(KINDS), [c for c, _ in KINDS.values()])
    title = _title(
        f"'First: ' + shown + '; second: ' + other + '; ' + ({HEAD})", "a cell is read by both when both read some of it"
    )
    return layered(marks, *_over(read, evidence, ends), width=_wide(read), height=_high(read), title=title)


def _by_layer(pairs: pl.DataFrame) -> alt.HConcatChart:
    title = _title("'By layer: first ' + shown + '; second ' + other", "means over query heads and decode steps")
    return tokens_by_layer(pairs, picked=True).properties(title=title)


def _unfolded(read: Read, pick: alt.Parameter) -> alt.Chart:
    """The cells of the picked head: policy, code, start, stop, first, last."""
    downs, nexts = ([*read.steps], [*read.steps[1:], read.steps[-1] + 1])
    return (
        alt.Chart(theme.prepare(read.cells))
        .transform_filter(pick)
        .transform_filter("isDefined(pick.layer) && (datum.policy === shown || datum.policy === other)")
        .transform_calculate(letter="split(datum.cells, '')", at="sequence(length(datum.cells))")
        .transform_flatten(["letter", "at"])
        .transform_calculate(pair=f"indexof('{read.alphabet}', datum.letter)", half="[0, 1]")
        .transform_flatten(["half"])
        .transform_calculate(code="datum.half === 0 ? datum.pair % 8 : floor(datum.pair / 8)", cell="2 * datum.at + datum.half")
        .transform_calculate(down=f"floor(datum.cell / {read.across})", start=f"datum.cell % {read.across} * {read.width}")
        .transform_calculate(stop=f"datum.start + {read.width}", first=f"{downs}[datum.down]", last=f"{nexts}[datum.down]")
    )


def _cells(base: alt.Chart, read: Read, ends: tuple[int, int], kinds: list[str], colours: list[str]) -> alt.Chart:
    across = alt.Axis(format=",d", tickCount=10, title="position in the context (tokens)")
    down = alt.Axis(values=list(dict.fromkeys(ends)), grid=False, title=None, labelExpr="'step ' + datum.label")
    return base.mark_rect(aria=False).encode(
        x=alt.X("start:Q", scale=alt.Scale(domain=[0, read.across * read.width], nice=False), axis=across),
        x2="stop:Q",
        y=alt.Y("first:Q", scale=alt.Scale(domain=[ends[1] + 1, ends[0]], nice=False), axis=down),
        y2="last:Q",
        color=alt.Color("kind:N", **theme.few(kinds, colours, symbolType="square")),
        opacity=alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0.15, 1]), legend=None),
        tooltip=[
            alt.Tooltip("start:Q", title="from position"),
            alt.Tooltip("stop:Q", title="to position"),
            alt.Tooltip("first:Q", title="from step"),
            alt.Tooltip("kind:N", title=" "),
            alt.Tooltip("share:Q", format=".0%", title="share of its tokens, about"),
        ],
    )  # fmt: skip


def _over(read: Read, evidence: pl.DataFrame, ends: tuple[int, int]) -> list[Any]:
    """Over a raster: frames around the evidence, the step that is picked, and why there is nothing."""
    rule = _here().encode(y="step:Q")
    whose = "(datum.policy === '' || datum.policy === shown)"
    head = "(datum.layer < 0 || (isDefined(pick.layer) && datum.layer === pick.layer[0] && datum.q_head === pick.q_head[0]))"
    if read.missing.is_empty():
        return [*evidence_frames(evidence), rule]
    text = alt.Chart(theme.prepare(read.missing)).transform_filter(f"{whose} && {head}")
    words = text.mark_text(align="left", baseline="middle", fontStyle="italic", aria=False)
    return [*evidence_frames(evidence), rule, words.encode(x=alt.value(12), y=alt.value(85), text="said:N")]


def _wide(read: Read) -> int:
    """Whole pixels a cell, or its edges show as hairlines."""
    return read.across * max(1, WIDTH // read.across)


def _high(read: Read) -> int:
    return len(read.steps) * max(1, round(RASTER / len(read.steps)))


# ---------------------------------------------------------------------------------------------- the little that all need
def _tooltip() -> list[alt.Tooltip]:
    return tooltip(SAID, layer="layer", q_head="query head")


def _title(text: str, subtitle: str) -> alt.Title:
    return alt.Title(alt.expr(text), subtitle=subtitle, fontSize=13)


def _colours(errors: pl.Series) -> tuple[list[float], list[float]]:
    """-> the domain, around the errors but the smallest, at least a decade wide; the decades inside it."""
    told = errors.filter(errors > theme.LEAST_ERROR)
    low, high = told.quantile(0.05) or theme.LEAST_ERROR, theme.ends(told, (1.0, 1.0))[1]
    first = math.floor(math.log10(low) + 1e-9)
    domain = [float(f"1e{first}"), max(high, float(f"1e{first + 1}"))]
    return domain, [float(f"1e{n}") for n in range(first, math.floor(math.log10(domain[1]) + 1e-9) + 1)]


def _span(cells: int, most: int) -> int:
    """Pixels along one side of the map."""
    return max(160, min(cells * 24, most), cells * 9)
