"""The report: run directories in, one HTML file out, its charts as images beside it when asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvsim.errors import WrongUse
from kvsim.metrics.live_study import Study, is_study, open_study
from kvsim.metrics.run import RunTables, open_run
from kvsim.report.contents import sections
from kvsim.report.export import write_png, write_svg
from kvsim.report.html import Figure, Section, render
from kvsim.report.sections import closed_loop
from kvsim.report.theme import Style
from kvsim.report.view import View


def report(
    run_dirs: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    png: str | Path | None = None,
    svg: str | Path | None = None,
) -> Path:
    """One self-contained page of one or several runs or studies of the closed loop -> its path. png, svg: folders for the charts as images.

    They are shown one after the other: their numbers never share an axis. Raises BadTrace for what is neither a finished run nor a study."""
    dirs = [run_dirs] if isinstance(run_dirs, (str, Path)) else list(run_dirs)
    if not dirs:
        raise WrongUse("report: no run; expected one or more run directories, as kvsim replay writes them")
    runs = [open_study(d) if is_study(d) else open_run(d) for d in dirs]
    parts = [s for i, run in enumerate(runs) for s in _named(run, i, len(runs))]
    out = Path(out)
    if out.is_dir():
        raise WrongUse(f"report: {out} is a folder; expected the name of a page, for example {out / 'report.html'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(out.name + ".partial")
    labels = list(dict.fromkeys(s.label for run in runs for s in _look(run)))
    try:
        aside.write_text(render(_title(runs), _lead(runs), parts, labels), encoding="utf-8")
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    figures = [b for s in parts for b in s.blocks if isinstance(b, Figure)]
    if png is not None:
        write_png(figures, Path(png))
    if svg is not None:
        write_svg(figures, Path(svg))
    return out


def _named(run: RunTables | Study, index: int, runs: int) -> list[Section]:
    of = closed_loop.sections if isinstance(run, Study) else sections
    if runs == 1:
        return of(run)  # type: ignore[arg-type]  # of its kind
    return [Section(f"{run.path.name}: {s.title}", s.text, s.facts, s.blocks) for s in of(run, f"run{index + 1}-")]  # type: ignore[arg-type]


def _look(run: RunTables | Study) -> list[Style]:
    return closed_loop.look_of(run) if isinstance(run, Study) else View.of(run).look


def _title(runs: Sequence[RunTables | Study]) -> str:
    inside = all(isinstance(r, Study) for r in runs)
    return f"KV-cache policies {'inside' if inside else 'on'} {', '.join(dict.fromkeys(_what(r) for r in runs))}"


def _what(run: RunTables | Study) -> str:
    if isinstance(run, Study):
        return str(run.about["source"].get("model") or run.path.name)
    trace = run.about.get("trace")
    return str((trace.get("id") if isinstance(trace, dict) else trace) or run.path.name)


def _lead(runs: Sequence[RunTables | Study]) -> list[str]:
    many = sum(len(r.policies) for r in runs if isinstance(r, RunTables))
    told = [
        f"kvsim replayed {many} KV-cache {'policies' if many > 1 else 'policy'} on attention captured from a model: a policy says what to keep, "
        "how to store it and what to read; one engine does it, measures what is lost against full attention, and counts every byte. "
        "No text was generated and no GPU was timed."
    ]
    inside = [
        "kvsim ran KV-cache policies inside a model, every one a row of the same decode beside full attention: what the model still answers, "
        "and whether a replay on full attention's queries had said so. No GPU was timed."
    ]
    return [*(told if many else []), *(inside if any(isinstance(r, Study) for r in runs) else [])]
