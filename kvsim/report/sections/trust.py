"""What a reader must know to trust a number: the run, its policies, the spread of heads, roles and contexts, the noise floor."""

from __future__ import annotations

import polars as pl

from kvsim.metrics.interval import contexts
from kvsim.metrics.quality import quality
from kvsim.metrics.spread import by_statistic, spread
from kvsim.report import facts, theme
from kvsim.report.charts.roles import by_context, by_role
from kvsim.report.html import Figure, Section, Table
from kvsim.report.view import STATISTICS, View

MEASURES = ("rel_l2", "evidence_recall", "far_recall")


def section(view: View) -> Section:
    text = (facts.OPEN_LOOP, facts.RECALL, facts.rounding(view.floor), *view.shown)
    split = facts.role_table(view.run, view.look)
    tables: list[Table | Figure] = [
        facts.policy_table(view.run, view.look),
        facts.worst_table(spread(view.run.heads), view.look),
        *([split] if split else []),
    ]
    return Section("What to trust", text, facts.facts(view.run), [*tables, *_by_role(view), *_by_context(view)])


def _by_role(view: View) -> list[Figure]:
    found = view.labelled(by_statistic(spread(view.run.heads, "role"), MEASURES))
    roles = [facts.role(r) for r in found["role"].unique().sort()]
    if len(roles) < 2:
        return []
    data = found.with_columns(facts.role_words()).select("policy", "role", "statistic", *MEASURES)
    how = "One mark per policy and role of the query's token, means over heads. Left is better for the error, right for the recalls."
    chart = by_role(data, roles, view.look, view.floor)
    return [view.figure("roles", "Is the loss on the question or on the answer?", how, chart, data, [STATISTICS, facts.TELLING])]


def _by_context(view: View) -> list[Figure]:
    many = contexts(view.run.heads)
    each = view.labelled(quality(view.run.heads, "request")).select("policy", "request", *MEASURES)
    if many < 2 or each.height > theme.ROW_CAP:
        return []
    whole = view.labelled(quality(view.run.heads)).select("policy", *MEASURES)
    how = f"A tick per context ({many}), a dot over all of them. Where ticks lie wide apart, a mean says little about the next context."
    data = pl.concat([each, whole.with_columns(request=pl.lit(None, pl.Int32)).select(each.columns)])
    return [view.figure("contexts", "Does it hold in every context?", how, by_context(each, whole, view.look, view.floor), data)]
