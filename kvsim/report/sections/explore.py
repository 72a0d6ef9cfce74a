"""One policy, one head, one step: pick them, and see what is lost, kept, read, and read otherwise by a second policy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from kvsim.metrics.grids import ALPHABET, PAIRS, Grid, grids
from kvsim.metrics.quality import FATES, fates, quality
from kvsim.metrics.raster import Place
from kvsim.report import theme
from kvsim.report.charts.explore import SERIES, Read, explorer
from kvsim.report.charts.waterfall import FALLS
from kvsim.report.html import Figure, Section
from kvsim.report.theme import Style
from kvsim.report.view import View

VALUES = 40_000  # of one measure over the steps, all heads together
LETTERS = 1_250_000  # of the cells of all heads
GRIDS = ((96, 48), (64, 32), (48, 24))  # most cells across, most steps down: the first of which all heads fit
POLICIES, PAGE = 10, 16  # policies whose cells are there; tokens that a cell is a multiple of
DIGITS = {"errors": 3, "recalls": 2, "misses": 2}


class Heads(NamedTuple):
    """A row a policy, layer and query head; `steps` of the columns of text; the largest error; how many steps a value stands for."""

    rows: pl.DataFrame
    steps: list[int]
    highest: float
    together: int


def section(view: View) -> Section:
    text = "Pick a policy, another to compare it with, a layer, a query head and a step; every panel follows."
    return Section("Explore", (text,), blocks=[_explorer(view)])


def _explorer(view: View) -> Figure:
    group, heads = 1, view.run.heads.select("layer", "q_head").unique().collect()
    while heads.select("layer", pl.col("q_head") // group).n_unique() > theme.ROW_CAP:
        group *= 2
    many = heads.select("layer", pl.col("q_head") // group).n_unique()
    fit = view.look[: theme.ROW_CAP // many]
    found = _heads(view, fit, (pl.col("q_head") // group * group).alias("q_head"), many)
    read, pairs, said = _read(view, fit, found.rows)
    how = (
        "Top: output error of each query head under one policy, and the framed head under every policy. Below: that head at every decode step; "
        "where its attention mass went; what it kept and read; and what a second policy reads otherwise."
    )
    notes = [
        "Menus choose; a click on the map picks a head, too. A step changes the maps and the waterfalls, and is marked below them.",
        "Missed mass: dense attention mass on tokens that were evicted or not read.",
        *said,
    ]
    if found.together > 1:
        notes.append(f"Each decode step here is {found.together} steps together.")
    if group > 1:
        notes.append(f"Query heads are taken {group} by {group}, named by the first.")
    if len(fit) < len(view.look):
        rest = ", ".join(s.label for s in view.look[len(fit) :])
        notes.append(f"To stay readable it has {len(fit)} of {len(view.look)} policies; without {rest}.")
    chart = explorer(found.rows, found.steps, found.highest, read, pairs, view.spans(), fit, view.floor)
    data = found.rows.drop(*SERIES.values(), *(f"{n}_text" for n in FALLS))
    return view.figure("explore", "Which heads lose, and what do they read?", how, chart, data, notes, clickable=True)


# ---------------------------------------------------------------------------------------------- what heads lost
def _heads(view: View, fit: list[Style], head: pl.Expr, many: int) -> Heads:
    heads = view.run.heads.filter(pl.col("policy").is_in([s.policy for s in fit]))
    there = heads.select(pl.col("step").unique().sort()).collect()["step"]
    together = max(1, -(-len(there) * many * len(fit) // VALUES))
    step = (pl.col("step") // together * together).alias("step")
    by = ["policy", "layer", "q_head"]
    at_steps = _lost(heads, head, step)
    steps = at_steps["step"].unique().sort().to_list()
    told = {column: pl.col(m).round_sig_figs(DIGITS[column]) for m, column in SERIES.items()}
    told |= {f"{n}_text": pl.col(n).round(3) for n in FALLS}
    text = [x.cast(pl.String).str.strip_suffix(".0").fill_null("").str.join(" ").alias(n) for n, x in told.items()]
    grid = pl.DataFrame({"step": steps}, schema={"step": at_steps.schema["step"]})
    full = at_steps.select(by).unique(maintain_order=True).join(grid, how="cross", maintain_order="left")
    full = full.join(at_steps, on=[*by, "step"], how="left", maintain_order="left")
    wide = _lost(heads, head).join(full.group_by(by).agg(text), on=by, how="left", maintain_order="left")
    return Heads(view.labelled(wide), steps, theme.ends(at_steps["rel_l2"], (1.0, 1.0))[1], together)


def _lost(heads: pl.LazyFrame, *by: pl.Expr) -> pl.DataFrame:
    """policy, layer, q_head and what else stands in `by`, the measures, and FALLS."""
    keys = ["policy", "layer", *(x.meta.output_name() for x in by)]
    parts = fates(heads, "layer", *by).rename(
        dict(zip(FATES, ("exact", "coded", "host", "unread", "evicted", "sink"), strict=True))
    )
    found = quality(heads, "layer", *by).select(*keys, *SERIES)
    return found.join(parts, on=keys, how="left", maintain_order="left")


# ---------------------------------------------------------------------------------------------- what heads read
def _read(view: View, fit: list[Style], heads: pl.DataFrame) -> tuple[Read | None, pl.DataFrame, list[str]]:
    """What the heads of one context read, as many as fit; and sentences that say what is not there."""
    request = view.request
    planned = set(
        view.run.tables["plans"].filter(pl.col("request") == request).select(pl.col("policy").unique()).collect()["policy"]
    )
    known = [s for s in fit if s.policy in planned or not view.selective[s.policy]][:POLICIES]
    if not known:
        return None, pl.DataFrame(schema=PAIRS), ["Which pages were read was not recorded; kvsim replay --plans does."]
    ledger = view.run.ledger.filter(pl.col("request") == request)
    steps = ledger.select(pl.col("step").unique().sort()).collect()["step"].to_list()
    total = int(ledger.select(pl.col("pos").max()).collect().item()) + 1
    places = _places(view, request)
    for most, down in GRIDS:
        width = PAGE * -(-total // (PAGE * most))
        grid = Grid(steps[:: -(-len(steps) // down)], width, -(-total // width))
        fits = min(LETTERS // (len(known) * -(-len(grid.steps) * grid.across // 2)), theme.ROW_CAP // len(known))
        if fits >= len(places):
            break
    taken = sorted(_best_first(places, heads)[:fits])
    evidence = np.zeros(total, bool)
    for start, stop, _ in view.spans().iter_rows():
        evidence[start:stop] = True
    cells, pairs = grids(view.run.tables, {s.policy: view.selective[s.policy] for s in known}, taken, grid, evidence)
    pairs = _labelled_pairs(view, pairs)
    missing = _missing(fit, known, places, taken)
    read = Read(view.labelled(cells), grid.steps, width, grid.across, ALPHABET, missing)
    notes = [
        f"Positions: context {request}, {len(grid.steps)} of {len(steps)} decode steps, {width} tokens a cell; a stronger colour is a larger "
        "share."
    ]
    if len(taken) < len(places):
        notes.append(
            f"Positions are here for {len(taken)} of {len(places)} heads, those with the largest error; --layers shows others."
        )
    return read, pairs, notes


def _places(view: View, request: int) -> list[Place]:
    heads = view.run.heads.filter(pl.col("request") == request)
    kv = dict(view.run.ledger.group_by("layer").agg(pl.col("kv_head").n_unique()).collect().rows())
    found = heads.group_by("layer").agg(pl.col("q_head").unique().sort()).sort("layer").collect()
    return [Place(request, layer, i * kv[layer] // len(q), head) for layer, q in found.iter_rows() for i, head in enumerate(q)]


def _best_first(places: list[Place], heads: pl.DataFrame) -> list[Place]:
    """Those with the largest error under any policy first."""
    worst = {(a, b): x or 0.0 for a, b, x in heads.group_by("layer", "q_head").agg(pl.col("rel_l2").max()).iter_rows()}
    return sorted(places, key=lambda p: (-worst.get((p.layer, p.q_head), 0.0), p))


def _labelled_pairs(view: View, pairs: pl.DataFrame) -> pl.DataFrame:
    label = {s.policy: s.label for s in view.look}
    most = theme.ROW_CAP // max(1, pairs.select("first", "second").n_unique())
    layers = pairs["layer"].unique().sort().to_list()
    some = layers[:: -(-len(layers) // most)]
    return pairs.filter(pl.col("layer").is_in(some)).with_columns(
        pl.col("first", "second").replace_strict(label, return_dtype=pl.String)
    )


def _missing(fit: list[Style], known: list[Style], places: list[Place], taken: list[Place]) -> pl.DataFrame:
    unknown = [(s.label, -1, -1, "its pages are not recorded here; kvsim replay --plans does") for s in fit if s not in known]
    apart = [
        ("", p.layer, p.q_head, "this head is not on the page; kvsim report --layers shows its layer")
        for p in places
        if p not in taken
    ]
    schema = {"policy": pl.String, "layer": pl.Int64, "q_head": pl.Int64, "said": pl.String}
    return pl.DataFrame(unknown + apart, schema, orient="row")
