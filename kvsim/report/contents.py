"""A run -> the sections of its page, one question a figure; what a run does not have is said, never left out in silence."""

from __future__ import annotations

from kvsim.metrics.run import RunTables
from kvsim.report.html import Section
from kvsim.report.sections import budget, cost, explore, heads, index, keeping, loss, one_head, steps, traffic, trust
from kvsim.report.sections.cost import Costs
from kvsim.report.view import View

ORDER = (trust, explore, budget, loss, keeping, heads, steps, traffic, index, one_head)


def sections(run: RunTables, name: str = "", costs: Costs | None = None) -> list[Section]:
    """The page of one run; `name` goes before the names of its figures. costs: what is known of time, drawn last."""
    view = View.of(run, name)
    found = [module.section(view) for module in ORDER]
    return found if costs is None else [*found, cost.section(view, costs)]
