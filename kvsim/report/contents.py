"""A run -> the sections of its page, one question a figure; what a run does not have is said, never left out in silence."""

from __future__ import annotations

from kvsim.metrics.run import RunTables
from kvsim.report.html import Section
from kvsim.report.sections import budget, explore, heads, index, keeping, loss, one_head, steps, traffic, trust
from kvsim.report.view import View

ORDER = (trust, explore, budget, loss, keeping, heads, steps, traffic, index, one_head)


def sections(run: RunTables, name: str = "") -> list[Section]:
    """The page of one run; `name` goes before the names of its figures."""
    view = View.of(run, name)
    return [module.section(view) for module in ORDER]
