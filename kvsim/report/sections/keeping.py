"""Was it right to let go? Attention by tier, what was evicted and needed again, what returns, what each tier is worth."""

from __future__ import annotations

from functools import partial

from kvsim.metrics import keeping
from kvsim.metrics.compaction import PAGE, pages_held
from kvsim.report.charts.keeping import by_lag, error_dots, how_many_return, mass_by_tier, pages_by_way
from kvsim.report.html import Figure, Section
from kvsim.report.view import LEGEND, View

KEEPS = "it evicts and codes nothing"


def section(view: View) -> Section:
    blocks = [*_tiers(view), *_lags(view), *_returns(view), *_without(view), *_levels(view), *_pages(view)]
    text = [
        "What a policy evicts is gone for every later step, what it codes is blurred: here is what became of attention to both."
    ]
    if _empty(view, "lags"):
        text.append(
            "The run was written without --explain, which adds attention by tier, what is needed again, and oracles of its cuts."
        )
    return Section("What keeping and storing costs", text, blocks=blocks)


def _empty(view: View, table: str) -> bool:
    return view.run.tables[table].head(1).collect().is_empty()


def _tiers(view: View) -> list[Figure]:
    if _empty(view, "by_tier"):
        return []
    together = view.together(len(keeping.PARTS))
    parts = view.labelled(keeping.tiers_over_steps(view.run.tables["by_tier"], view.run.heads, together))
    how = (
        "Dense attention mass at each step by where its token is, read or not; below it the output error. Coded tokens count as "
        "coded wherever they stand; of the rest the first are sinks, the newest recent."
    )
    ends = view.run.tables["by_tier"].select("policy", "sinks", "recent").unique().collect()
    told = "; ".join(f"{p}: {s} sinks, {r} recent" for p, s, r in view.labelled(ends)[::-1].rows())
    notes = [f"Tokens: {told}.", *view.without(parts, KEEPS)]
    chart = mass_by_tier(parts, view.of_label(parts["policy"]), view.floor)
    return [view.figure("tier-mass", "On which tier does attention fall, step by step?", how, chart, parts, notes)]


def _lags(view: View) -> list[Figure]:
    if _empty(view, "lags"):
        return []
    data = view.labelled(keeping.lag_histogram(view.run.tables["lags"])).rename({"mass": "missed"})
    how = (
        "Left: dense attention mass per step on tokens evicted so many steps ago (from the value on the axis to below the next); "
        "right: how many of the 10 tokens of highest logit those are. Much at the left end: the policy drops what it still needs; "
        "at the right end: importance returns late."
    )
    chart = by_lag(data, view.of_label(data["policy"]))
    cut = "Tokens cut after the prompt left one step before step 0; the last mark is cut short by the end of the trace."
    notes = [cut, *view.without(data, KEEPS), LEGEND]
    return [view.figure("lags", "How soon is what was evicted needed again?", how, chart, data, notes, clickable=True)]


def _returns(view: View) -> list[Figure]:
    data = view.labelled(keeping.returns(view.run.tables["recurrence"]))
    if data.is_empty():
        return []
    how = (
        "Of all times that a token (or window) lost its place in the full tier for so many cuts, the share that ended by its "
        "return. A policy far left of the oracles cannot bring back what becomes important late; one that evicts stands at 0 %."
    )
    chart = how_many_return(data, view.look)
    notes = [
        "The oracles take as many tokens at the same cuts, by dense attention.",
        *view.without(data, "no spell of it lasted so long"),
    ]
    return [view.figure("returns", "Does importance come back, and can the policy follow?", how, chart, data, notes)]


def _without(view: View) -> list[Figure]:
    if _empty(view, "by_tier"):
        return []
    data = view.labelled(keeping.without_tier(view.run.tables["by_tier"], view.run.heads))
    how = (
        "Output error when one class of tokens is left out of what was read: its softmax over the others alone. A mark far right "
        "of the policy's own is a class that carries the output; one at it costs memory for nothing."
    )
    names = ["nothing left out", *keeping.PARTS.values()]
    said = "Output error of each policy when sinks, recent, full or coded tokens are left out of what it reads."
    chart = error_dots(data, names, view.look, view.floor, said)
    return [view.figure("without", "What is each tier worth to the output?", how, chart, data, view.without(data, KEEPS))]


def _levels(view: View) -> list[Figure]:
    data = view.labelled(keeping.error_levels(view.run.heads))
    if data.is_empty():
        return []
    how = (
        "Output error at each level of loss: an oracle that reads as much of all tokens, of those held, of these as they are "
        "stored, and the policy. From mark to mark: what the budget, the eviction, the code and the ranking add. Unlike mass, an "
        "error can also fall."
    )
    said = "Output error of oracles over all and over held tokens beside each policy's own."
    chart = error_dots(data, list(keeping.LEVELS.values()), view.look, view.floor, said)
    return [view.figure("levels", "Which decision adds the output error?", how, chart, data)]


def _pages(view: View) -> list[Figure]:
    pages = partial(pages_held, view.run.ledger, view.run.tables["tiers"])
    if _empty(view, "tiers") or (data := view.labelled(pages())).is_empty():
        return []
    how = (
        f"Pages of {PAGE} tokens in memory, mean over steps. Holes stay in memory until every row of a page is gone, and where KV "
        "heads share a page until every head let it go; compaction moves rows together at the price of copying them."
    )
    chart = pages_by_way(data, view.look)
    return [view.figure("compaction", "How much memory do holes keep?", how, chart, data, view.without(data, KEEPS))]
