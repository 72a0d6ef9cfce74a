"""What can an index promise?"""

from __future__ import annotations

import polars as pl

from kvsim.metrics.loss import RANKINGS, bounds, depths, rankings
from kvsim.metrics.quality import quality
from kvsim.metrics.slack import slack_by
from kvsim.report import facts
from kvsim.report.charts.age import slack_by_key_age
from kvsim.report.charts.depth import pages_to_a_guarantee
from kvsim.report.charts.layers import promised_and_missed, slack_by_layer
from kvsim.report.html import Figure, Section, Table
from kvsim.report.view import LEGEND, View

NOT_A_BOUND = "it has no index, or one whose score is no upper bound"
PANELS = 4  # policies whose depths are drawn


def section(view: View) -> Section:
    found = view.labelled(bounds(view.run.heads).filter(pl.col("role") == view.answer).drop("role"))
    text = [
        "An index that is an upper bound can prove what was not missed. What it can prove is not what was lost: that is the missed mass."
    ]
    if found.is_empty():
        text.append("No policy of this run has such an index.")
    blocks: list[Figure | Table] = [
        *_slack(view, found),
        *_by_key_age(view),
        *_promised(view, found),
        *_depth(view),
        *_ranking(view),
    ]
    return Section("What the index can promise", text, blocks=blocks)


def _slack(view: View, found: pl.DataFrame) -> list[Figure]:
    if found.is_empty():
        return []
    how = (
        "The bound of a page minus its best true logit, over all pages there are: points are means over steps and heads, bars their p95. "
        ""
        "A slack of 3 lets a page seem e³ = 20 times as heavy as its best token."
    )
    chart = slack_by_layer(found, view.of_label(found["policy"]))
    notes = [*view.without(found, NOT_A_BOUND), *view.alone, LEGEND]
    data = found.select("policy", "layer", "slack_mean", "slack_mean_p95", "slack_max", "slack_max_p95")
    return [view.figure("slack", "How loose is the index's bound, layer by layer?", how, chart, data, notes, clickable=True)]


def _by_key_age(view: View) -> list[Figure]:
    found = slack_by([view.run.tables["slack"]], "policy", "role", "key_age").filter(pl.col("role") == view.answer)
    data = view.labelled(found.drop("role")).drop_nulls("slack_mean")
    if data.is_empty():
        return []
    how = (
        "The same by how long ago the page was written, in doublings. Pages being written hold few keys, so their bounds are tight; a line "
        "that rises with age means that an index overrates the distant past."
    )
    chart = slack_by_key_age(data, view.of_label(data["policy"]))
    notes = [*view.without(data, "no slack of it was recorded, or others stand for it"), *view.alone, LEGEND]
    return [view.figure("slack-age", "Are old keys harder to bound?", how, chart, data, notes, clickable=True)]


def _promised(view: View, found: pl.DataFrame) -> list[Figure]:
    if found.is_empty():
        return []
    data, notes = view.few_layers(found.select("policy", "layer", "promised", "missed", "missed_p95"))
    how = (
        "Of the attention mass on held tokens: what was not read, and what the bound cannot rule out to lie on unread pages. The distance is "
        "what a stopping rule would read for nothing."
    )
    chart = promised_and_missed(data, view.of_label(data["policy"]))
    title = "How much of what the index cannot rule out was really missed?"
    return [view.figure("promised", title, how, chart, data, [*notes, *view.alone])]


def _depth(view: View) -> list[Figure]:
    found = depths(view.run.tables["explain"], view.run.heads)
    data = view.labelled(found.filter(pl.col("role") == view.answer).drop("role"))
    if data.is_empty():
        return []
    read = view.labelled(
        quality(view.answers.filter(pl.col("read_pages").is_not_null()).with_columns(read_tokens="read_pages"))
    ).select("policy", pages="read_tokens")
    drawn = view.of_label(data["policy"])[:PANELS]
    how = (
        "Pages of the policy's own ranking, forced pages first, until each guarantee holds. Bar: half of all steps and heads need less; dot: "
        "the mean; orange bar: p95; the line ends at the most. A guarantee right of the pages read would cost that much more."
    )
    chart = pages_to_a_guarantee(data, read, drawn)
    notes = view.without([s.label for s in drawn], "no depths of it were recorded, or others stand for it")
    return [view.figure("depth", "How deep must the ranking be read for a guarantee?", how, chart, data, [*notes, *view.alone])]


def _ranking(view: View) -> list[Table]:
    every = rankings(view.run.tables["explain"], view.run.heads)
    found = view.labelled(every.filter(pl.col("role") == view.answer, pl.col("below_share").is_not_null()))
    if found.is_empty():
        return []
    columns = [
        "policy",
        "scores below the truth",
        "furthest below (scaled logits)",
        "sets that float16 changes",
        *RANKINGS.values(),
    ]
    rows = [
        [
            s.label,
            facts.percent(r["below_share"]),
            facts.logits(r["below_max"]),
            facts.percent(r["fp16_changed"]),
            *(facts.logits(r[n]) if n == "regret" else facts.percent(r[n]) for n in RANKINGS),
        ]
        for s in view.of_label(found["policy"])
        for r in found.filter(pl.col("policy") == s.label).iter_rows(named=True)
    ]
    notes = [
        "Logits given away: the best logits of as many pages by their true best logit, minus those of the pages read. Missed pages are those of "
        "most mass. A bound on the keys that are read leaves no score below the truth.",
        *view.alone,
    ]
    return [Table("Do scores hold, and what does ranking by them cost? Means over steps and heads.", columns, rows, notes=notes)]
