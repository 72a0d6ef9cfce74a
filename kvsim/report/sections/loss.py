"""Why is attention lost, and how often?"""

from __future__ import annotations

import polars as pl

from kvsim.metrics.loss import blame, coding
from kvsim.metrics.precision import precision
from kvsim.metrics.quality import fate
from kvsim.metrics.spread import spread, spread_of
from kvsim.metrics.tails import tails
from kvsim.report import facts
from kvsim.report.charts.coding import bits_per_number, error_by_stage
from kvsim.report.charts.loss import mass_by_blame, mass_by_fate
from kvsim.report.charts.overlap import PIECES, pieces_read
from kvsim.report.charts.rows import ERRORS, READING, spread_rows
from kvsim.report.charts.tails import how_often
from kvsim.report.html import Figure, Section
from kvsim.report.view import LEGEND, View

FOUND = ("top1_recall", "top10_recall", "top64_recall", "page_recall", "page_recall10")


def section(view: View) -> Section:
    whole = view.labelled(spread(view.run.heads))
    return Section(
        "Why attention is lost",
        ("Gone for good, skipped at one step, or blurred: three different risks, and three different parts of a policy.",),
        blocks=[*_fate(view, whole), *_blame(view), *_often(view), *_found(view), *_pieces(view), *_coding(view), *_bits(view)],
    )


def _fate(view: View, whole: pl.DataFrame) -> list[Figure]:
    parts = view.labelled(fate(view.run.heads))
    how = (
        "Mean dense attention mass by what became of its tokens: evicted mass is gone for good, unread mass can be read at the next step, "
        f"coded mass is blurred. Beside it the output error, which also sees what coding costs. {ERRORS}"
    )
    chart = mass_by_fate(parts, whole, view.look, view.floor)
    return [view.figure("fate", "Where did the attention mass go?", how, chart, parts, [facts.FORETOLD, facts.FLOOR_OF_AXIS])]


def _blame(view: View) -> list[Figure]:
    parts = view.labelled(blame(view.diagnostics, view.answer))
    if parts.is_empty():
        return []
    how = (
        "At every step an oracle reads as many pages as the policy did: of all tokens, then of those still held. What the first misses the "
        "budget is to blame for, what the second misses more eviction, what the policy misses more its ranking."
    )
    chart = mass_by_blame(parts, view.labelled(spread(view.answers)), view.look, view.floor)
    notes = view.without(parts, "it reads no pages, so its loss is all eviction or coding (figure above)")
    return [
        view.figure("blame", "Is it the budget, the eviction or the index?", how, chart, parts, [ERRORS, *notes, *view.alone])
    ]


def _often(view: View) -> list[Figure]:
    found = view.labelled(tails(view.run.heads))
    errors = found.select("policy", "rel_l2", (1 - pl.col("part")).alias("share"))
    recalls = found.select("policy", "evidence_recall", pl.col("part").alias("share")).drop_nulls("evidence_recall")
    how = (
        "Left: the share of query heads and steps whose output error is above the value on the axis; a line that ends further right has the "
        "worse tail."
    )
    if recalls.height:
        how += (
            " Right: of those with at least 1 % of their dense mass on evidence, the share that read at most so much of it; a high start at "
            "0 % is evidence missed outright."
        )
    chart = how_often(errors, recalls, view.look, view.floor)
    return [view.figure("often", "How often is the output far off?", how, chart, found, [facts.FORETOLD, LEGEND], clickable=True)]


def _found(view: View) -> list[Figure]:
    there = view.run.heads.select(pl.col(n).is_not_null().any() for n in FOUND).collect().row(0)
    names = [n for n, told in zip(FOUND, there, strict=True) if told]
    data = view.labelled(spread_of(view.run.heads, [*names, "rel_l2"]))
    how = (
        f"The share of the tokens with the largest logits, and of the pages with most attention mass, that were read. {READING} The output "
        "error stands beside, because a token read in a coarse code counts as read."
    )
    chart = spread_rows(data, [*names, "rel_l2"], view.look, view.floor, width=130).properties(
        description="Share of the tokens with the largest logits and of the pages with most mass that each policy read, and its output error."
    )
    pages = data.filter(pl.col(names[-1]).is_not_null()) if len(names) > 3 else data
    notes = [facts.FORETOLD, *view.without(pages, "it reads no pages, where pages are asked for")]
    title = "Are the tokens and pages that matter most among those read?"
    return [view.figure("found", title, how, chart, data, [n.replace("Not drawn", "Only tokens are drawn") for n in notes])]


def _pieces(view: View) -> list[Figure]:
    found = view.metrics(*PIECES)
    if view.pieces < 2 or found.is_empty():
        return []
    data = view.labelled(found).with_columns(
        what=pl.col("metric").replace_strict({m: said for m, (said, _, _) in PIECES.items()}, return_dtype=pl.String)
    )
    data = data.select("policy", "what", pl.col("value").alias("share"))
    how = (
        f"A prompt of this run holds up to {view.pieces} pieces of evidence, and an answer may need them all. Marks far apart: a policy that "
        f"finds one piece and loses another. Beside it the output error. {ERRORS}"
    )
    chart = pieces_read(data, view.labelled(spread(view.answers)), view.look, view.floor)
    return [view.figure("pieces", "Is every piece of evidence read, or only some?", how, chart, data, view.alone)]


def _coding(view: View) -> list[Figure]:
    found = view.labelled(coding(view.run.heads))
    if found.is_empty():
        return []
    stages, few = view.few_layers(found)
    how = (
        "Output error on the same tokens three times: rows as they were captured, then keys as coded, then values too. Mark: the mean over "
        "steps and heads; bar: their p95. The step from one mark to the next is what that code costs."
    )
    chart = error_by_stage(stages, view.look, view.floor)
    notes = [*few, *view.without(stages, "it codes nothing")]
    return [view.figure("coding", "Does coding blur the keys or the values?", how, chart, stages, notes)]


def _bits(view: View) -> list[Figure]:
    found = view.labelled(precision(view.run.ledger))
    if found.is_empty():
        return []
    how = (
        "Bits of a key or value number that is held in codes: as the method is spoken of, and with every byte that stands beside the codes, so "
        "scales, zeros, outliers with their places, and padding. The second is what memory and reads pay for the errors above."
    )
    notes = view.without(found, "it codes nothing")
    return [view.figure("bits", "How many bits does a coded number take?", how, bits_per_number(found, view.look), found, notes)]
