"""The report: run directories in, one HTML file out, its charts as images beside it when asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvsim.errors import WrongUse
from kvsim.metrics.run import RunTables, open_run
from kvsim.report.contents import sections
from kvsim.report.export import write_png, write_svg
from kvsim.report.html import Figure, Section, write_page
from kvsim.report.sections.cost import Costs
from kvsim.report.view import View


def report(
    runs: str | Path | RunTables | Sequence[str | Path | RunTables],
    out: str | Path = "report.html",
    png: str | Path | None = None,
    svg: str | Path | None = None,
    costs: Costs | None = None,
) -> Path:
    """One self-contained page of one or several runs, or of parts of them (metrics.run.part) -> its path. png, svg: folders for the
    charts as images. costs: a bill, a cost model and samples, of one run.

    Runs are shown one after the other: their numbers never share an axis. Raises BadTrace for what is not a finished run."""
    given = [runs] if isinstance(runs, (str, Path, RunTables)) else list(runs)
    if not given:
        raise WrongUse("report: no run; expected one or more run directories, as kvsim replay writes them")
    if costs is not None and len(given) > 1:
        raise WrongUse(f"--bill, --model and --samples go with one run, not with {len(given)}: a page for each")
    opened = [r if isinstance(r, RunTables) else open_run(r) for r in given]
    parts = [s for i, run in enumerate(opened) for s in _named(run, i, len(opened), costs)]
    labels = list(dict.fromkeys(s.label for run in opened for s in View.of(run).look))
    out = write_page(out, _title(opened), _lead(opened), parts, labels)
    figures = [b for s in parts for b in s.blocks if isinstance(b, Figure)]
    if png is not None:
        write_png(figures, Path(png))
    if svg is not None:
        write_svg(figures, Path(svg))
    return out


def _named(run: RunTables, index: int, runs: int, costs: Costs | None) -> list[Section]:
    if runs == 1:
        return sections(run, costs=costs)
    return [Section(f"{run.path.name}: {s.title}", s.text, s.facts, s.blocks) for s in sections(run, f"run{index + 1}-")]


def _title(runs: Sequence[RunTables]) -> str:
    return f"KV-cache policies on {', '.join(dict.fromkeys(_trace(r) for r in runs))}"


def _trace(run: RunTables) -> str:
    trace = run.about.get("trace")
    return str((trace.get("id") if isinstance(trace, dict) else trace) or run.path.name)


def _lead(runs: Sequence[RunTables]) -> list[str]:
    many = sum(len(r.policies) for r in runs)
    return [
        f"kvsim replayed {many} KV-cache {'policies' if many > 1 else 'policy'} on attention captured from a model: a policy says what to keep, "
        "how to store it and what to read; one engine does it, measures what is lost against full attention, and counts every byte. "
        "No text was generated and no GPU was timed."
    ]
