"""When is attention lost, and what changes from step to step?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import polars as pl

from kvsim.metrics.age import by_age
from kvsim.metrics.quality import quality
from kvsim.metrics.spread import SUFFIX, by_statistic, spread, spread_of
from kvsim.metrics.tokens import changes_by_step, held_by_step
from kvsim.report import facts, theme
from kvsim.report.charts.age import loss_by_age
from kvsim.report.charts.steps import evidence_by_step, measures_by_step
from kvsim.report.charts.tiers import changes_over_time, held_over_time
from kvsim.report.html import Figure, Section
from kvsim.report.view import LEGEND, STATISTICS, View

ALL = "all layers"
DRIFT = ("rel_l2", "mass_evicted", "mass_unread", "far_recall")


def section(view: View) -> Section:
    text = ["Steps of one context are not independent: read these as one story, not as samples."]
    if view.bands.is_empty():
        text.append("The roles of tokens overlap along the steps of different contexts; each role has its own line.")
    if not view.evidence:
        text.append("No prompt of this run marks evidence, so evidence is not followed here.")
    return Section(
        "Step by step", text, blocks=[*_evidence(view), *_drift(view), *_churn(view), *_age(view), *_held(view), *_changes(view)]
    )


def _evidence(view: View) -> list[Figure]:
    if not view.evidence:
        return []
    together = view.together(len(SUFFIX))
    step = (pl.col("step") // together * together).alias("step")
    found = by_statistic(spread(view.run.heads, "role", step), ("evidence_recall", "rel_l2"))
    data = view.labelled(found).select("policy", "role", "step", "statistic", "evidence_recall", "rel_l2", "evidence_dense")
    data = data.with_columns(facts.role_words())
    mass = quality(view.run.heads, step).group_by("step").agg(pl.col("evidence_dense").mean()).sort("step")
    how = (
        "Ratios of sums over layers and heads at each step; a gap where less than 0.001 of dense mass lies on evidence. Where full attention "
        "itself hardly looks at the evidence (lowest panel), a miss matters little."
    )
    chart = evidence_by_step(data.drop("evidence_dense"), mass, view.bands, view.look, view.floor)
    notes = [STATISTICS, facts.TELLING, *_taken(together), LEGEND]
    return [view.figure("steps", "Is the evidence there when the answer needs it?", how, chart, data, notes, clickable=True)]


def _drift(view: View) -> list[Figure]:
    together = view.together(len(SUFFIX))
    step = (pl.col("step") // together * together).alias("step")
    found = view.labelled(by_statistic(spread(view.run.heads, "role", step), DRIFT))
    data = found.with_columns(facts.role_words()).select("policy", "role", "step", "statistic", *DRIFT)
    shown = [m for m in DRIFT if data[m].is_not_null().any() and (m == "rel_l2" or data[m].max() != 0)]
    how = (
        "Means over layers and heads at each step. Mass on evicted tokens that rises means the model looks back at what is gone; mass on unread "
        "tokens means that the pages chosen fit the query less and less."
    )
    chart = measures_by_step(data, shown, view.bands, view.look, view.floor)
    notes = [STATISTICS, facts.TELLING, *_taken(together), LEGEND]
    return [view.figure("drift", "Does the loss grow along the answer?", how, chart, data, notes, clickable=True)]


def _churn(view: View) -> list[Figure]:
    together = view.together(len(SUFFIX))
    heads = view.run.heads.with_columns(step=pl.col("step") // together * together).filter(pl.col("read_churn").is_not_null())
    found = by_statistic(spread_of(heads, ["read_churn"], "step"), ["read_churn"])
    data = view.labelled(found).select("policy", "step", "statistic", "read_churn")
    if data.is_empty():
        return []
    how = (
        "1 − the tokens read at this step and the one before, over those read at either. 0 %: the same tokens again, which a cache or a "
        "prefetch could serve; 100 %: all new."
    )
    chart = measures_by_step(data, ["read_churn"], view.bands, view.look)
    notes = [STATISTICS, *view.without(data, "no two neighbouring steps of it were written"), *_taken(together), LEGEND]
    return [view.figure("churn", "How much of what is read changes from step to step?", how, chart, data, notes, clickable=True)]


def _age(view: View) -> list[Figure]:
    together = view.together(1)
    found = view.labelled(by_age(view.run.heads, together)).drop("rows")
    if found.is_empty():
        return []
    data = found.with_columns(facts.role_words())
    how = (
        "Means over layers, heads and steps, by how many steps ago the pages were ranked; pages that began since are read, too. A line that "
        "is flat could be ranked less often; ages meet different steps, so compare lines, not their ends."
    )
    chart = loss_by_age(data, view.of_label(data["policy"]), view.floor)
    notes = [*view.without(data, "it ranks at every step, or never"), *_taken(together), LEGEND]
    return [view.figure("age", "What is an old choice of pages worth?", how, chart, data, notes, clickable=True)]


def _held(view: View) -> list[Figure]:
    together = _apart(view, 2)
    held = _by_layers(view, partial(held_by_step, view.run.ledger, together))
    moved = set(held.filter(pl.col("order") > 0, pl.col("tokens") > 0)["policy"])
    if not moved:
        return []
    data = held.filter(pl.col("policy").is_in(list(moved)))
    data = data.filter(pl.col("tokens").max().over("policy", "part") > 0)
    how = (
        "Tokens per KV head after each step, by what holds them; the parts add up to what dense attention sees. What is gone for good cannot "
        "be read at any later step, whatever the query."
    )
    notes = [*view.without(data, "it holds everything in full precision at every step"), *_taken(together)]
    chart = held_over_time(data, view.of_label(moved))
    return [view.figure("held", "What is held at each step, and at what precision?", how, chart, data, notes)]


def _changes(view: View) -> list[Figure]:
    together = _apart(view, 2)
    data = _by_layers(view, partial(changes_by_step, view.run.tables["events"], together))
    later = data.filter(pl.col("step") >= 0)
    if later.is_empty():
        return []
    how = (
        "Tokens per KV head that each step evicted, coded or promoted, after its attention. Regular bars are a policy that works in batches; "
        "each chart has its own scale."
    )
    first = data.filter(pl.col("step") < 0, pl.col("layers") == ALL).select("policy", "change", "tokens")
    cut = [f"{policy}: {tokens:,.0f} {change}" for policy, change, tokens in reversed(first.rows())]
    notes = [f"Not drawn, because it would hide the rest: the cut after the prompt ({'; '.join(cut)})."] if cut else []
    chart = changes_over_time(later, view.of_label(later["policy"]))
    notes += view.without(later, "nothing that it holds changes after the prompt")
    title = "When are tokens evicted, coded or promoted?"
    return [view.figure("changes", title, how, chart, data, [*notes, *_taken(together)])]


def _by_layers(view: View, found: Callable[..., pl.DataFrame]) -> pl.DataFrame:
    """What a function of metrics.tokens finds in all layers together, and in each where there are several, as column `layers`."""
    whole = found().with_columns(layers=pl.lit(ALL))
    each = found("layer").with_columns(layers=pl.format("layer {}", "layer"))
    several = each["layer"].n_unique() > 1
    return view.labelled(pl.concat([whole, each.select(whole.columns)]) if several else whole)


def _apart(view: View, parts: int) -> int:
    """How many steps one point stands for, so that layers × steps × `parts` of one policy fit into a chart."""
    heads = view.run.heads.select(pl.col("step").n_unique(), pl.col("layer").n_unique()).collect()
    steps, layers = heads.row(0)
    return int(max(1, -(-steps * (layers + 1) * parts // theme.ROW_CAP)))


def _taken(together: int) -> list[str]:
    return [f"Each point is {together} steps together."] if together > 1 else []
