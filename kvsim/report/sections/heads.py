"""Which layers, heads and parts of the context lose?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from kvsim.metrics.evidence import ANY, EVERY, hits
from kvsim.metrics.floor import floors
from kvsim.metrics.overlap import DISTANCES
from kvsim.metrics.profile import profile
from kvsim.metrics.quality import quality
from kvsim.metrics.reuse import WHOSE, reused
from kvsim.metrics.spread import SUFFIX, by_statistic, spread
from kvsim.report import facts, theme
from kvsim.report.charts.heads import evidence_heads, miss_against_error
from kvsim.report.charts.layers import MEASURES, by_layer
from kvsim.report.charts.overlap import pages_alike, pages_reused
from kvsim.report.charts.profile import read_by_position
from kvsim.report.html import Figure, Section, Table
from kvsim.report.view import LEGEND, STATISTICS, View

TOP = 12  # heads that look at the evidence
CELLS, PAGE = 160, 16  # the profile: most cells across, tokens that a cell is a multiple of


def section(view: View) -> Section:
    return Section(
        "Layers and heads",
        ("Attention is unequal: a few heads carry the retrieval, and a mean over heads hides what happens to them.",),
        blocks=[
            *_layers(view),
            *_evidence(view),
            *_through(view),
            *_miss(view),
            *_alike(view),
            *_reused(view),
            *_profile(view),
        ],
    )


def _layers(view: View) -> list[Figure]:
    found, few = view.few_layers(view.labelled(spread(view.run.heads, "layer")), theme.ROW_CAP // len(SUFFIX))
    data = by_statistic(found, ("rel_l2", "missed_mass", "evidence_recall")).select("policy", "layer", "statistic", *MEASURES)
    known = floors(view.run.about).group_by("layer", maintain_order=True).agg(pl.col("p95").mean()).sort("layer")
    how = "One line per policy, one point per layer: means over its heads and all decode steps. Layers that lie apart are joined all the same."
    notes = [*few, *(["Grey: the p95 of the model's own rounding in that layer."] if known.height else [])]
    chart = by_layer(data, known, view.look)
    return [view.figure("layers", "Which layers lose?", how, chart, data, [STATISTICS, *notes, LEGEND], clickable=True)]


def _evidence(view: View) -> list[Figure]:
    if not view.evidence:
        return []
    found = quality(view.run.heads, "layer", "q_head")
    best = (
        found.group_by("layer", "q_head")
        .agg(pl.col("evidence_dense").max())
        .sort(pl.col("evidence_dense").fill_null(0), "layer", "q_head", descending=[True, False, False])
        .head(min(TOP, theme.ROW_CAP // len(view.look)))
        .with_row_index("order")
    )
    read = view.run.heads.group_by("policy", "layer", "q_head").agg(pl.col("evidence_read").cast(pl.Float64).mean()).collect()
    data = found.join(best.drop("evidence_dense"), on=["layer", "q_head"]).join(read, on=["policy", "layer", "q_head"])
    data = data.sort("order", "policy").with_columns(head=pl.format("layer {}, head {}", "layer", "q_head"))
    data = view.labelled(data).select("policy", "head", "order", "evidence_dense", "evidence_read", "rel_l2")
    how = (
        f"The {best.height} query heads with most dense attention on the evidence, the most first. Grey bar: that mass, a mean over all decode "
        "steps. A mark at its end read all of it; at the left edge, none. Beside: the output error of the same heads."
    )
    chart = evidence_heads(data, view.look, view.floor)
    title = "Do the heads that look at the evidence get to read it?"
    return [view.figure("evidence", title, how, chart, data, [LEGEND], clickable=True)]


def _through(view: View) -> list[Table]:
    found = hits(view.run.tables["evidence"], view.run.heads).filter(pl.col("role") == view.answer)
    rows = {(r["policy"], r["scope"]): r for r in found.iter_rows(named=True)}
    if not rows:
        return []
    scopes = (ANY, EVERY) if view.pieces > 1 else (ANY,)
    shown = [(s, scope) for s in view.look for scope in scopes if (s.policy, scope) in rows]
    body = [[s.label, scope, *_passage(rows[s.policy, scope])] for s, scope in shown]
    columns = ("policy", "of the evidence", "first layer that reads some", "layers that do", "of", "steps without any")
    caption = "Through which layers is the evidence seen? Means over contexts and steps; a layer counts when any of its heads reads some."
    return [Table(caption, columns, body, notes=["Layers read whole by rule see everything and are left out.", *view.alone])]


def _passage(row: Mapping[str, Any]) -> list[str]:
    first = facts.NOTHING if row["first"] is None else f"{row['first']:.1f}"
    return [first, f"{row['count']:.1f}", f"{row['layers']:.0f}", facts.percent(row["never"])]


def _miss(view: View) -> list[Figure]:
    every = max(1, -(-view.run.heads.select(pl.struct("policy", "layer", "q_head").n_unique()).collect().item() // theme.ROW_CAP))
    found = quality(view.run.heads, "layer", "q_head")
    mine = found.filter((pl.col("q_head") + pl.col("layer")) % every == 0) if every > 1 else found
    data = view.labelled(mine).select("policy", "layer", "q_head", "missed_mass", "rel_l2")
    how = (
        "One point per query head and policy, means over steps. If missing more mass always meant a larger error, each policy's points would "
        "lie on one rising line; at the left edge stand heads that miss less than 0.01 %."
    )
    notes = [f"Every {every}th head."] if every > 1 else []
    chart = miss_against_error(data, view.look, view.floor)
    title = "Does missed mass tell how far the output is off?"
    return [view.figure("miss", title, how, chart, data, [*notes, LEGEND], clickable=True)]


def _alike(view: View) -> list[Figure]:
    found = view.metrics(*(f"jaccard_{n}" for n in DISTANCES), *(f"jaccard_chance_{n}" for n in DISTANCES))
    named = found.with_columns(
        distance=pl.col("metric").str.extract(r"(\d+)$").cast(pl.Int32),
        side=pl.when(pl.col("metric").str.contains("chance")).then(pl.lit("chance")).otherwise(pl.lit("jaccard")),
    )
    if named.is_empty():
        return []
    data = view.labelled(named.pivot("side", index=["policy", "distance"], values="value").sort("policy", "distance"))
    how = (
        "Of the pages that two layers chose at one step, those that both chose; pages read by rule, and layers read whole, are left out. Bar: "
        "what as many pages drawn at random would share. Far above it, one layer's choice could serve the next, or be fetched ahead for it."
    )
    notes = [*view.without(data, "it chooses no pages, or they are not recorded (replay with --plans)"), *view.alone, LEGEND]
    chart = pages_alike(data, view.of_label(data["policy"]))
    return [view.figure("alike", "Do neighbouring layers choose the same pages?", how, chart, data, notes, clickable=True)]


def _reused(view: View) -> list[Figure]:
    found = view.labelled(reused(view.run.tables["reuse"], view.run.heads))
    if found.is_empty():
        return []
    data = found.select("policy", "distance", "whose", "pages", "missed", "missed_own", "evidence_missed", "evidence_missed_own")
    how = (
        "Attention mass that a layer would miss with the pages that a layer below it chose at the same step; bar: with its own pages. "
        "Left: those of the query head of the same number, as many pages. Right: those of all query heads of the layer, many more."
    )
    notes = [*view.without(data, "it does not keep everything, or its pages are not recorded (replay with --plans)"), LEGEND]
    chart = pages_reused(data, list(WHOSE.values()), view.of_label(data["policy"]))
    return [
        view.figure(
            "reuse", "What would a layer miss with the pages of a layer below it?", how, chart, data, notes, clickable=True
        )
    ]


def _profile(view: View) -> list[Figure]:
    run, request = view.run, view.request
    planned = set(run.tables["plans"].filter(pl.col("request") == request).select(pl.col("policy").unique()).collect()["policy"])
    drawn = [s for s in view.look if s.policy in planned or not view.selective[s.policy]]
    total = int(run.ledger.filter(pl.col("request") == request).select(pl.col("pos").max()).collect().item()) + 1
    width = PAGE * -(-total // (PAGE * min(CELLS, theme.ROW_CAP // max(1, len(drawn)))))
    parts = [
        profile(run.tables, s.policy, request, width, view.selective[s.policy]).select(pl.lit(s.label).alias("policy"), pl.all())
        for s in drawn
    ]
    if not parts:
        return []
    cells, spans = pl.concat(parts), view.spans()
    how = (
        f"Context {request}, position across ({width} tokens a cell), one row per policy. Colour: of all query heads and decode steps that "
        "could see a token, the share that read it." + (" Framed: the evidence." if spans.height else "")
    )
    notes = view.without(cells, "the pages it read are not recorded (replay with --plans)")
    chart = read_by_position(cells, spans, drawn)
    return [view.figure("profile", "Which parts of the context are read?", how, chart, cells, notes)]
