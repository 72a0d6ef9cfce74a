"""Where does the loss come from? The attention mass by its fate, and by what is to blame."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.rows import ROW, spread_panel, stacked
from kvsim.report.theme import FATES, LOST, Style


def mass_by_fate(parts: pl.DataFrame, spread: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """parts (policy, part, order, mass), spread (policy, rel_l2 with tail and worst) -> bars of the dense attention mass by fate, output
    error beside."""
    return _bars_and_error(parts, spread, FATES, look, floor).properties(
        description="Bars of the dense attention mass by what became of it, one per policy, with the policy's output error beside."
    )


def mass_by_blame(parts: pl.DataFrame, spread: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """parts (policy, part, order, mass) of policies that read pages -> bars of what was read and of what is to blame for the rest."""
    return _bars_and_error(parts, spread, LOST, look, floor).properties(
        description="Bars of the dense attention mass read, and lost to the index, to eviction and to the budget; output error beside."
    )


def _bars_and_error(
    parts: pl.DataFrame, spread: pl.DataFrame, colours: dict[str, tuple[str, str]], look: Sequence[Style], floor: Floor | None
) -> alt.HConcatChart:
    look = [s for s in look if s.label in set(parts["policy"])]
    x = alt.X("mass:Q", title="dense attention mass", scale=alt.Scale(domain=[0, 1]), axis=theme.percent_axis())
    bars = stacked(parts, x, colours, look).properties(width=560, height=ROW * len(look))
    spread = spread.filter(pl.col("policy").is_in([s.label for s in look]))
    error = spread_panel(spread, "rel_l2", look, floor, named=False).properties(width=300, height=ROW * len(look))
    return alt.hconcat(bars, error, spacing=28).resolve_scale(color="independent")
