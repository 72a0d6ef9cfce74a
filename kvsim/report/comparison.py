"""Two runs beside each other as one page: what `kvsim compare` prints, drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from kvsim.metrics.interval import FEWEST
from kvsim.metrics.run import RunTables
from kvsim.report import facts
from kvsim.report.charts.comparison import RATIOS, SHARES, paired_differences, verdict
from kvsim.report.html import Figure, Section, Table, write_page
from kvsim.report.names import labels

MOST = 60  # pairs of policies on the page


def comparison(before: RunTables, after: RunTables, found: pl.DataFrame, out: str | Path, tolerance: float = 1e-3) -> Path:
    """found (of metrics.compare.compare) -> the path of a self-contained page that shows it."""
    name = labels([p.id for run in (before, after) for p in run.policies])
    worded = found.with_columns(pair=_pair(name)).with_columns(verdict(tolerance))
    pairs = worded["pair"].unique(maintain_order=True).to_list()
    sections = [_what(before, after, worded), _how_much(worded, pairs, tolerance)]
    title = f"{before.path.name} against {after.path.name}: what changed"
    lead = [
        f"{len(pairs)} {'policies' if len(pairs) > 1 else 'policy'} in two replays of one trace, paired by context; "
        f"before: {before.path.name}, after: {after.path.name}."
    ]
    return write_page(out, title, lead, sections)


def _pair(name: Mapping[str, str]) -> pl.Expr:
    first, second = (pl.col(n).replace_strict(name, return_dtype=pl.String) for n in ("first", "second"))
    return pl.when(pl.col("first") == pl.col("second")).then(first).otherwise(pl.format("{} → {}", first, second))


def _what(before: RunTables, after: RunTables, found: pl.DataFrame) -> Section:
    worse = found.filter("worse")
    said = [f"{row['pair']}: {(SHARES | RATIOS)[row['measure']]}" for row in worse.iter_rows(named=True)]
    named = f"{'; '.join(said[:20])}{' …' if len(said) > 20 else ''}" or "none"
    gate = f"{worse.height} of {found.height} measures got worse: {named}. kvsim compare --gate exits with {int(bool(said))}."
    mine, yours = dict(facts.facts(before)), dict(facts.facts(after))
    same = [(k, v) for k, v in mine.items() if yours[k] == v]
    other = [(k, f"{v} → {yours[k]}") for k, v in mine.items() if yours[k] != v]
    return Section("What to trust", (gate, facts.OPEN_LOOP), [*other, *same])


def _how_much(found: pl.DataFrame, pairs: list[str], tolerance: float) -> Section:
    few = found["contexts"].max() < FEWEST  # type: ignore[operator]
    how = (
        "A row per policy. Left of the grey line a value fell, right of it rose; the mark says whether that is better or worse. "
        + ("" if few else "Line: the 95 % bootstrap interval over contexts, the same ones drawn for both sides.")
    ).strip()
    notes = [f"Counts: more than {tolerance:g} of the earlier value, and an interval, where there is one, that leaves zero out."]
    if few:
        notes.append(f"No interval: it takes at least {FEWEST} contexts.")
    if len(pairs) > MOST:
        notes.append(
            f"The first {MOST} of {len(pairs)} policies are drawn; the table and the CSV file have all. --policies picks one."
        )
    shown = found.filter(pl.col("pair").is_in(pairs[:MOST]))
    chart = paired_differences(shown, pairs[:MOST], tolerance)
    data = found.select("pair", "measure", "contexts", "before", "after", "difference", "low", "high", "verdict")
    figure = Figure("changes", "What changed, and is it sure?", how, chart, " ".join(notes), data)
    return Section("Differences", blocks=[figure, _table(found)])


def _table(found: pl.DataFrame) -> Table:
    rows = [
        (
            r["pair"], (SHARES | RATIOS)[r["measure"]], f"{r['before']:.5g}", f"{r['after']:.5g}", f"{r['difference']:+.4g}",
            facts.NOTHING if r["low"] is None else f"{r['low']:+.4g} to {r['high']:+.4g}", r["verdict"],
        )
        for r in found.iter_rows(named=True)
    ]  # fmt: skip
    columns = ("policy", "measure", "before", "after", "difference", "95 % interval", "verdict")
    return Table("All measures: ratios of sums over the rows of the contexts that both runs hold.", columns, rows)
