"""What does a budget buy?"""

from __future__ import annotations

import polars as pl

from kvsim.metrics.budget import by_budget
from kvsim.metrics.quality import MEASURES, quality
from kvsim.metrics.roles import ALL_STEPS
from kvsim.metrics.spread import MEAN, SUFFIX, by_statistic, spread
from kvsim.metrics.tokens import asked_and_got
from kvsim.metrics.traffic import traffic
from kvsim.report import facts, theme
from kvsim.report.charts.asked import asked_against_used
from kvsim.report.charts.budget import below_the_mean, memory_saved, pages_shared, quality_against
from kvsim.report.charts.pareto import SAID, held_against_read
from kvsim.report.html import Figure, Section
from kvsim.report.view import LEGEND, STATISTICS, View


def section(view: View) -> Section:
    curves = _curves(view)
    return Section(
        "What a budget buys",
        ("Recall never stands alone here: output error and evidence recall stand beside it.",),
        blocks=[
            *_quality(view, curves),
            *_below(view, curves),
            *_memory(view),
            *_pareto(view),
            *_asked(view),
            *_shared(view, curves),
        ],
    )


def _quality(view: View, curves: pl.DataFrame) -> list[Figure]:
    lines, dots = view.labelled(_worded(curves)), view.labelled(_points(view))
    lines = lines.filter(pl.col("statistic").is_in(list(SUFFIX))).with_columns(tokens="read_tokens").select(dots.columns)
    both = pl.concat([lines, dots])
    beside = [*facts.absent(view.run), *facts.other_forced(view.run, view.look)]
    if lines.is_empty():
        beside.append(
            "This run has no curves: only a policy that ranks pages over everything, such as full() >> quest(...), has them."
        )
    how = (
        "Lines: a read policy at every budget that every step has, from one ranking per step. Points: each policy at the budget it ran with. "
        "Means over heads; higher recall and lower error at the left are better."
    )
    rows = (
        "Bytes: K and V rows of a KV head, those of all its query heads together, plus index, scales and scores as at the budget the policy "
        "ran with: policies whose heads pick together or for themselves compare fairly only here. Lines and points as above, means over heads."
    )
    told = {
        "tokens": (
            "What does reading more tokens buy?",
            how,
            [facts.FORETOLD, facts.FLOOR_OF_AXIS, *beside, STATISTICS, facts.TELLING, LEGEND],
        ),
        "bytes": ("Who loses least for the same bytes?", rows, [facts.FORETOLD, *beside, STATISTICS, facts.TELLING, LEGEND]),
    }
    return [
        view.figure(
            f"quality-{x}", title, said, quality_against(x, lines, dots, view.look, view.floor), both, notes, clickable=True
        )
        for x, (title, said, notes) in told.items()
    ]


def _below(view: View, curves: pl.DataFrame) -> list[Figure]:
    mine = view.labelled(curves.filter(pl.col("role") == ALL_STEPS)).select("policy", "statistic", "tokens", *MEASURES)
    if mine.is_empty():
        return []
    how = (
        "One read policy over all decode steps. Solid: the mean of heads; the shade reaches from it to the 5th "
        "percentile of heads. A wide shade or a low dotted line is a head that a mean hides."
    )
    chart = below_the_mean(mine, view.look, view.floor)
    return [
        view.figure(
            "below",
            "How far below the mean are the worst heads?",
            how,
            chart,
            mine,
            ["The menu chooses the policy.", facts.TELLING],
        )
    ]


def _memory(view: View) -> list[Figure]:
    moved = traffic(view.run.ledger, view.run.layers)
    if moved["resident_share"].is_null().any():
        return []
    found = by_statistic(spread(view.run.heads), ("rel_l2", "evidence_recall", "far_recall"))
    found = found.join(moved.select("policy", "resident_share"), on="policy", how="left", maintain_order="left")
    data = view.labelled(found).select("policy", "statistic", "resident_share", "rel_l2", "evidence_recall", "far_recall")
    how = (
        "Memory on the device after a step, rows, index and scales together, against full attention. Down and to the left is better for the "
        "error, up and to the left for recalls. A policy that only reads less saves none. Means over heads."
    )
    chart = memory_saved(data, view.look, view.floor)
    return [
        view.figure(
            "memory",
            "What does the memory saved cost?",
            how,
            chart,
            data,
            [facts.FORETOLD, STATISTICS, facts.TELLING, LEGEND],
            clickable=True,
        )
    ]


def _pareto(view: View) -> list[Figure]:
    moved = traffic(view.run.ledger, view.run.layers)
    if moved["resident_share"].is_null().any():
        return []
    moved = moved.select("policy", "resident_share", "read_share")
    data = view.labelled(quality(view.run.heads).join(moved, on="policy", how="left", maintain_order="left")).select(
        "policy", *SAID
    )
    how = (
        "Bytes that stay on the device across, bytes read up, both against full attention, logarithmic. Large: what loses little enough by the "
        "menus. The line joins those of which no other holds and reads less. Hollow: around a mark that would hide it."
    )
    notes = ["Bytes read: K and V rows, index, scales and scores, all decode steps.", LEGEND]
    title = "Which policies hold and read least, and lose little enough?"
    return [view.figure("pareto", title, how, held_against_read(data, view.look), data, notes, clickable=True)]


def _asked(view: View) -> list[Figure]:
    found = view.labelled(asked_and_got(view.run.ledger, view.run.heads, view.run.tables["events"]))
    if found.is_empty():
        return []
    how = (
        "Upright bar: the budget as asked, in tokens, mean over steps. A read is rounded down to whole pages; a group whose query heads choose "
        "for themselves reads more per KV head than each head asked for."
    )
    chart = asked_against_used(found, view.look)
    notes = view.without(found, "no budget in tokens, pages or a share was asked")
    return [view.figure("asked", "Does each policy use the tokens it was asked to use?", how, chart, found, notes)]


def _shared(view: View, curves: pl.DataFrame) -> list[Figure]:
    group = _group(view)
    mine = curves.filter(pl.col("role") == ALL_STEPS, pl.col("statistic") == MEAN)
    if mine.is_empty() or group < 2:
        return []
    data = view.labelled(mine.select("policy", "pages", "union_pages", (pl.col("union_pages") / pl.col("pages")).alias("ratio")))
    how = (
        f"{group} query heads share one KV head and its memory. 1: all want the same pages, so a group costs what one head costs; {group}: no "
        "page is wanted twice. At 1 lie the policies whose group picks one set."
    )
    chart = pages_shared(data, group, view.of_label(data["policy"]))
    notes = [*view.without(data, "it reads no pages, or not over everything, or not from one ranking"), LEGEND]
    return [view.figure("shared", "How many pages do the heads of a group share?", how, chart, data, notes, clickable=True)]


def _group(view: View) -> int:
    """The most query heads on a KV head."""
    q = view.run.heads.group_by("layer").agg(pl.col("q_head").n_unique().alias("q"))
    kv = view.run.ledger.group_by("layer").agg(pl.col("kv_head").n_unique().alias("kv"))
    return int(q.join(kv, on="layer").select((pl.col("q") // pl.col("kv")).max()).collect().item())


def _curves(view: View) -> pl.DataFrame:
    """by_budget, thinned to stay under the cap; with a single role, only the rows of all steps."""
    run = view.run
    many = run.tables["curves"].select(pl.struct("policy", "role").n_unique()).collect().item() or 1
    most = max(3, min(40, theme.ROW_CAP // 6 // many))
    frame = by_budget(run.tables["curves"], run.heads, run.ledger, most=most)
    split = frame.filter(pl.col("role") != ALL_STEPS)["role"].n_unique() > 1
    return (frame if split else frame.filter(pl.col("role") == ALL_STEPS)).cast({"tokens": pl.Float64})


def _points(view: View) -> pl.DataFrame:
    """Each policy at its own budget, over all decode steps and, with several roles, over the steps of each; by statistic."""
    heads = view.run.heads
    frame, split = spread(heads).with_columns(role=pl.lit(ALL_STEPS, pl.Int8)), spread(heads, "role")
    if split["role"].n_unique() > 1:
        frame = pl.concat([frame, split.select(frame.columns)])
    moved = traffic(view.run.ledger, view.run.layers).select("policy", bytes="touched_bytes")
    columns = ("policy", "steps", "statistic", pl.col("read_tokens").alias("tokens"), "bytes", *MEASURES)
    return _worded(by_statistic(frame, MEASURES)).join(moved, on="policy", how="left", maintain_order="left").select(columns)


def _worded(frame: pl.DataFrame) -> pl.DataFrame:
    """With `steps`, the role in words; all decode steps first."""
    return frame.sort(pl.col("role") != ALL_STEPS, "role", maintain_order=True).with_columns(facts.role_words().alias("steps"))
