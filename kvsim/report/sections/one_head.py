"""What did one head keep and read? A few telling heads, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from kvsim.metrics.quality import quality
from kvsim.metrics.raster import Place, at, pages_recorded, raster
from kvsim.report import facts, theme
from kvsim.report.charts.raster import Extent, Strip, kept_and_read
from kvsim.report.html import Section
from kvsim.report.names import family
from kvsim.report.theme import Style
from kvsim.report.view import View

STRIPS = 10  # policies on the raster
CELLS, SAMPLED, PAGE = 160, 64, 16  # most cells across, most steps down, tokens a cell where no pages were read


def section(view: View) -> Section:
    run, first = view.run, next(iter(view.places.values()))
    drawn = [s for s in view.look if family(s.policy) != "full"][:STRIPS] or list(view.look[:1])
    ledger = run.ledger.filter(pl.col("request") == first.request, pl.col("layer") == first.layer)
    steps = ledger.select(pl.col("step").unique().sort()).collect()["step"].to_list()
    total = int(ledger.select(pl.col("pos").max()).collect().item()) + 1
    sampled = steps[:: -(-len(steps) // SAMPLED)]
    strips, width = _strips(view, drawn, sampled, total)
    spans = view.spans()
    how = (
        f"One strip a policy: decode steps down ({len(sampled)} of {len(steps)}), position across ({width} tokens a cell). A stronger colour "
        "is a larger share of a cell's tokens; blank is evicted or not yet there."
        + (" Framed: the evidence." if spans.height else "")
    )
    notes = [f"Context {first.request}." + (" The menu has the heads that tell most." if len(view.places) > 1 else "")]
    if len(drawn) < len(view.look):
        notes.append(f"Not drawn: {', '.join(s.label for s in view.look if s not in drawn)}.")
    extent = Extent(-(-total // width), width, steps[0], steps[-1])
    table = pl.concat([s.rows.select(pl.lit(s.head).alias("head"), pl.lit(s.policy).alias("policy"), pl.all()) for s in strips])
    title = "Is the evidence still there, and is it read?" if spans.height else "What is still there, and is it read?"
    figure = view.figure("raster", title, how, kept_and_read(strips, spans, extent), table, notes)
    return Section(
        "What one head kept and read", ("Every decision of a policy, token by token, where it matters most.",), blocks=[figure]
    )


def _strips(view: View, drawn: Sequence[Style], steps: list[int], total: int) -> tuple[list[Strip], int]:
    """The raster of each policy at each telling head, in cells of one width, widened until a head's are few enough to draw; -> strips,
    tokens a cell."""
    heads = {place: _lost(view, place) for place in view.places.values()}
    page = max((size for _, paged in heads.values() for size in paged.values()), default=PAGE)
    width = page * -(-total // (page * CELLS))
    while True:
        found = [
            Strip(f"layer {place.layer}, query head {place.q_head}: {why}", s.label, _said(lost[s.policy], s.policy in paged),
                  raster(view.run.tables, s.policy, place, steps, width, bool(lost[s.policy]["mass_unread"])))
            for why, place in view.places.items() for lost, paged in [heads[place]] for s in drawn if s.policy in lost
        ]  # fmt: skip
        rows: dict[str, int] = {}
        for strip in found:
            rows[strip.head] = rows.get(strip.head, 0) + strip.rows.height
        if max(rows.values()) <= theme.ROW_CAP // 2 or width >= total:
            return found, width
        width *= 2


def _lost(view: View, place: Place) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """What each policy lost at a head, and the page sizes of those whose pages are recorded there."""
    lost = quality(view.run.heads.filter(at(place)))
    return {r["policy"]: r for r in lost.iter_rows(named=True)}, pages_recorded(view.run.tables["plans"], place)


def _said(lost: Mapping[str, Any], paged: bool) -> str:
    recall = [] if lost["evidence_recall"] is None else [f"evidence recall {lost['evidence_recall']:.0%}"]
    unknown = ["pages read not recorded (replay with --plans)"] if lost["mass_unread"] and not paged else []
    return " · ".join([*recall, f"output error {facts.error(lost['rel_l2'])}", *unknown])
