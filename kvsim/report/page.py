"""The report: run directories in, one HTML file out, its charts as images beside it when asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvsim.errors import WrongUse
from kvsim.metrics.live_study import Study, is_study, open_study
from kvsim.metrics.run import RunTables, open_run
from kvsim.report.contents import sections
from kvsim.report.export import write_png, write_svg
from kvsim.report.html import Figure, Section, write_page
from kvsim.report.sections import closed_loop
from kvsim.report.sections.cost import Costs
from kvsim.report.theme import Style
from kvsim.report.view import View


def report(
    runs: str | Path | RunTables | Sequence[str | Path | RunTables],
    out: str | Path = "report.html",
    png: str | Path | None = None,
    svg: str | Path | None = None,
    costs: Costs | None = None,
) -> Path:
    """One self-contained page of one or several runs, parts of them (metrics.run.part) or studies of the closed loop -> its path.
    png, svg: folders for the charts as images. costs: a bill, a cost model and samples, of one run.

    They are shown one after the other: their numbers never share an axis. Raises BadTrace for what is neither a finished run nor a study."""
    given = [runs] if isinstance(runs, (str, Path, RunTables)) else list(runs)
    if not given:
        raise WrongUse("report: no run; expected one or more run directories, as kvsim replay writes them")
    if costs is not None and len(given) > 1:
        raise WrongUse(f"--bill, --model and --samples go with one run, not with {len(given)}: a page for each")
    opened = [_opened(r) for r in given]
    if costs is not None and isinstance(opened[0], Study):
        raise WrongUse(
            f"{opened[0].path}: a study of the closed loop, and --bill, --model and --samples go with a replay; leave them out"
        )
    parts = [s for i, run in enumerate(opened) for s in _named(run, i, len(opened), costs)]
    labels = list(dict.fromkeys(s.label for run in opened for s in _look(run)))
    out = write_page(out, _title(opened), _lead(opened), parts, labels)
    figures = [b for s in parts for b in s.blocks if isinstance(b, Figure)]
    if png is not None:
        write_png(figures, Path(png))
    if svg is not None:
        write_svg(figures, Path(svg))
    return out


def _opened(run: str | Path | RunTables) -> RunTables | Study:
    if isinstance(run, RunTables):
        return run
    return open_study(run) if is_study(run) else open_run(run)


def _named(run: RunTables | Study, index: int, runs: int, costs: Costs | None) -> list[Section]:
    name = "" if runs == 1 else f"run{index + 1}-"
    found = closed_loop.sections(run, name) if isinstance(run, Study) else sections(run, name, costs)
    if runs == 1:
        return found
    return [Section(f"{run.path.name}: {s.title}", s.text, s.facts, s.blocks) for s in found]


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
