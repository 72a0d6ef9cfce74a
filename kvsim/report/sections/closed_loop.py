"""A study of the closed loop: what the model still answers, and whether the open loop had said so. One section a task."""

from __future__ import annotations

from typing import Any

import polars as pl

from kvsim.metrics import closed_loop
from kvsim.metrics.closed_loop import FULL, PREDICTORS, Study
from kvsim.report import theme
from kvsim.report.charts.closed_loop import against_budget, answered, by_group, growth_over_steps, predicted_against_measured
from kvsim.report.html import Figure, Section, Table
from kvsim.report.theme import Style

MOST = 12  # pairs that mislead, of each open-loop number
OUTCOMES = {"kl": "Did the open loop foretell the KL?", "score": "Did the open loop foretell what is solved?"}
BUDGET = "Tokens read at the steps that say the answer, means over layers and heads; what is coded counts as read. A line joins one family."
POINTS = (
    "One point a policy; points along one line are well foretold. The open loop replays the policies on what full attention saw."
)
LAYERS = "The rank correlation with KL when an open-loop number of these layers alone orders the policies; 1: in order. Lines: 95 % bootstrap."
GROWTH = "Of the same layers and steps. Lines that rise on the right and not on the left: what is lost is carried on and adds up."
KL = "KL: of full attention's next token from the policy's, at the steps that say the answer (of plain text: at all)."


def look_of(study: Study) -> list[Style]:
    """Full attention first, then the policies as they were asked for."""
    return theme.styles([FULL, *(p["id"] for p in study.about["policies"])])


def sections(study: Study, name: str = "") -> list[Section]:
    """name: goes before the names of the figures."""
    look, scores = look_of(study), closed_loop.scores(study)
    return [
        _about(study, scores),
        *(_task(study, scores, look, str(task), name) for task in scores["task"].unique(maintain_order=True)),
    ]


def _about(study: Study, scores: pl.DataFrame) -> Section:
    source, full = study.about["source"], scores.filter(pl.col("policy") == FULL)
    tokens = [p["tokens"] for p in study.about["prompts"]]
    facts = [
        ("model", str(source.get("model"))),
        ("weights", str(source.get("weight_format") or source.get("dtype") or "as stored")),
        ("policies", str(len(study.about["policies"]) - 1)),
        ("prompt", f"{min(tokens)} to {max(tokens)} tokens"),
        *((row["task"], _solved(row)) for row in full.filter(pl.col("mode") == "forced").iter_rows(named=True)),
    ]
    text = (
        "Here the policies ran inside the model: what they lose in one layer and step changes what the next one is asked. Answers count only "
        "where full attention gives them; several prompts of one context are one case.",
    )
    return Section("The closed loop", text, facts)


def _solved(row: dict[str, Any]) -> str:
    answers = f"{row['samples']} prompts in {row['contexts']} contexts"
    return answers if row["score"] is None else f"{answers}, of which full attention solves {row['samples'] - row['full_fails']}"


def _task(study: Study, scores: pl.DataFrame, look: list[Style], task: str, name: str) -> Section:
    mine = scores.filter(pl.col("task") == task, pl.col("mode") == "forced")
    foretold = closed_loop.foretold(study).filter(pl.col("task") == task)
    told = closed_loop.correlations(study).filter(pl.col("task") == task)
    scored = mine["score"].count() > 0

    def figure(kind: str, title: str, how: str, chart: Any, data: pl.DataFrame, notes: str = "") -> Figure:
        return Figure(
            f"{name}{task}-{kind}", title, how, chart, notes, theme.named(data, look) if "policy" in data.columns else data
        )

    notes = {o: " ".join(_correlation(r) for r in told.iter_rows(named=True) if r["outcome"] == o) for o in OUTCOMES}
    intervals = "Bars: 95 % Wilson intervals, contexts as the cases. " if scored else ""
    title = "What does the model still answer?" if scored else "How far does it drift?"
    blocks: list[Figure | Table] = [
        figure("answered", title, f"{intervals}{KL}", answered(mine, look), mine),
        figure("budget", "What does a budget buy?", f"{BUDGET} {intervals}", against_budget(foretold, look[1:]), foretold),
        *(
            figure(f"foretold-{o}", OUTCOMES[o], POINTS, predicted_against_measured(foretold, look[1:], o), foretold, notes[o])
            for o in (OUTCOMES if scored else ("kl",))
        ),
    ]
    groups = closed_loop.by_layers(study).filter(pl.col("task") == task, pl.col("rho").is_not_null())
    if groups.height:
        blocks.append(figure("layers", "Which layers foretell it?", LAYERS, by_group(groups), groups))
    growth = study.growth.filter(pl.col("task") == task)
    blocks.append(figure("growth", "Does the error grow with the steps?", GROWTH, growth_over_steps(growth, look[1:]), growth))
    misleading = closed_loop.misleading(study).filter(pl.col("task") == task)
    return Section(task, (), (), [*blocks, *([_misleading(misleading, look)] if misleading.height else [])])


def _correlation(row: dict[str, Any]) -> str:
    between = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
    least = "" if row["least"] is None else f", {row['least']:.2f} without {row['without']}"
    return f"{PREDICTORS[row['predictor']].capitalize()}: rank correlation {row['rho']:.2f}{between}{least}."


def _misleading(frame: pl.DataFrame, look: list[Style]) -> Table:
    """The pairs that the running model contradicts most."""
    label = {s.policy: s.label for s in look}
    frame = frame.with_columns(gap=pl.col("closed_second") - pl.col("closed_first")).sort(
        "gap", descending=True, maintain_order=True
    )
    rows = [
        (
            PREDICTORS[r["predictor"]],
            *(x for of in ("first", "second") for x in (label[r[of]], f"{r[f'open_{of}']:.3f}", f"{r[f'closed_{of}']:.0%}")),
        )
        for _, mine in frame.group_by("predictor", maintain_order=True)
        for r in mine.head(MOST).iter_rows(named=True)
    ]
    columns = ("open-loop number", "it prefers", "its value", "solved", "over", "its value", "solved")
    many = f"{frame.height} pairs in which the policy that it clearly prefers solves a quarter of the contexts fewer"
    notes = [f"Of {many}, the {MOST} of each number furthest apart."]
    return Table("Where the open loop misleads", columns, rows, notes=notes)
