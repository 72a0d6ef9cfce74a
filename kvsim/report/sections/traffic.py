"""What does a step move, and what stays in memory?"""

from __future__ import annotations

from kvsim.metrics import traffic as metrics
from kvsim.metrics.depth import read_depth
from kvsim.report import facts
from kvsim.report.charts.rows import spread_rows
from kvsim.report.charts.steps import measures_by_step
from kvsim.report.charts.traffic import bytes_by_class
from kvsim.report.html import Figure, Section, Table
from kvsim.report.view import LEGEND, View

SHARES = ("certified", "full_reads")


def section(view: View) -> Section:
    dtype = view.run.about.get("kv_dtype") or "the KV dtype"
    return Section(
        "Bytes and memory",
        (f"Per KV head, in {dtype}, as the engine counted them; every byte is in exactly one class. No GPU was timed.",),
        blocks=[*_moved(view), *_over_time(view), *_kept(view), *_scattered(view), *_depth(view)],
    )


def _moved(view: View) -> list[Figure]:
    parts = view.labelled(metrics.by_class(view.run.ledger, metrics.STEP_CLASSES))
    how = (
        "Mean bytes per KV head and decode step, by what they are. Dashed: the K and V rows that full attention reads. The number is the sum, "
        "against that. Index, scales and scores are what a policy pays to read less."
    )
    chart = bytes_by_class(parts, "bytes read and written per KV head and step", _whole(view), view.look)
    return [view.figure("bytes", "What does one step move, class by class?", how, chart, parts, _unknown(view))]


def _over_time(view: View) -> list[Figure]:
    together = view.together(1)
    data = view.labelled(metrics.by_step(view.run.ledger, view.run.layers, together))
    shown = ["bytes", *(["share"] if data["share"].is_not_null().any() else [])]
    how = (
        "All bytes that a step reads and writes, mean over layers and KV heads. A budget in tokens stays flat while full attention grows; a "
        "share grows with it; an index is scanned whole at every step."
    )
    chart = measures_by_step(data, shown, view.bands, view.look)
    notes = [f"Each point is {together} steps together."] if together > 1 else []
    return [
        view.figure("dearer", "Does a step get dearer as the context grows?", how, chart, data, [*notes, LEGEND], clickable=True)
    ]


def _kept(view: View) -> list[Figure]:
    parts = view.labelled(metrics.by_class(view.run.ledger, metrics.KEPT_CLASSES))
    how = (
        "Mean bytes per KV head after a step, by what they are. Dashed: the K and V rows that full attention holds. Above 100 %: a policy that "
        "keeps everything and an index on top saves reads, not memory."
    )
    chart = bytes_by_class(parts, "bytes resident per KV head", _whole(view), view.look)
    return [view.figure("resident", "What stays in memory?", how, chart, parts, _unknown(view))]


def _scattered(view: View) -> list[Figure]:
    data = view.labelled(metrics.scattered(view.run.ledger))
    if data.is_empty():
        return []
    how = (
        "Pages that a KV head's query heads read together, how many of them are neighbours in one run, and what billing whole pages adds to "
        "the rows that were wanted. Long runs are cheap to fetch; 1.0 in the last panel wastes nothing."
    )
    chart = spread_rows(data, ["pages", "run_pages", "whole_pages"], view.look, None, width=260).properties(
        description="Pages read per KV head and step, neighbouring pages in a run, and bytes of whole pages over bytes of rows."
    )
    notes = view.without(data, "it reads no pages")
    return [view.figure("scattered", "How scattered are the pages that are read?", how, chart, data, notes)]


def _depth(view: View) -> list[Table]:
    found = {r["policy"]: r for r in read_depth(view.answers).collect().iter_rows(named=True)}
    look = [s for s in view.look if s.policy in found]
    if not look:
        return []
    ends = {"pages": "read_pages", "rounds": "rounds"}
    columns = ["policy", *(f"{said}, {end}" for said in ends for end in ("mean", "p95", "most")), "proved", "read all pages"]
    numbers = [f"{name}_{end}" for name in ends.values() for end in ("mean", "p95", "max")]
    rows = [
        [s.label, *(f"{found[s.policy][n]:,.1f}" for n in numbers), *(facts.percent(found[s.policy][n]) for n in SHARES)]
        for s in look
    ]
    caption = "How deep does one query head read? Over steps, layers and heads; layers read whole by rule are left out."
    notes = [
        f"Proved: the stopping rule reached its certificate before its cap; {facts.NOTHING} without a rule that proves.",
        *view.alone,
    ]
    return [Table(caption, columns, rows, notes=notes)]


def _whole(view: View) -> float | None:
    return metrics.whole(view.run.ledger, view.run.layers)


def _unknown(view: View) -> list[str]:
    return [] if _whole(view) else ["Full attention's bytes are not drawn: run.json does not say how many bytes a row has."]
