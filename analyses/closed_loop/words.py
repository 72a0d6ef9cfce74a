"""What the tables say, as the lines of the README."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from analyses.figures import Verdict, at_least, worded
from analyses.words import verdict
from kvsim.metrics import closed_loop
from kvsim.metrics.closed_loop import FULL, PREDICTORS, Study
from kvsim.metrics.sensitivity import LIMIT, borne
from kvsim.report.names import labels

PAGES = 33  # of 16 tokens, that 512 and half of 24 steps fill
ORDERED = 0.8  # a rank correlation with KL from which on a number is said to order policies as the running model does
SHOWN = 3  # pairs that mislead, of each open-loop number and task
NUMBERS = {
    "first_hit": "an earlier first layer that finds it",
    "hits": "more layers that find it",
    "all_read": "more layers that read all of it",
}


def lines(studies: Mapping[str, Study]) -> Iterator[str]:
    yield from _scores(studies)
    yield from _judged([x for x in studies.values() if x.about["options"]["open_loop"]])
    for name, study in studies.items():
        if study.about["options"]["open_loop"]:
            yield from ("", f"**Did the open loop foretell it? {title(name, study)}**", "")
            yield from _correlations(study)
            yield from _groups(study)
            yield from _growth(study)
            yield from _finding(study)
            yield from _misleading(study)


def title(name: str, study: Study) -> str:
    return f"{model(study)}, {name if name.isdigit() else 512} tokens"


def model(study: Study) -> str:
    return str(study.about["source"]["model"].split(" ")[0])


def _scores(studies: Mapping[str, Study]) -> Iterator[str]:
    """One row a policy, one column a study and task: solved with its interval, and KL."""
    told = {(n, task): mine for n, x in studies.items() for (task,), mine in _forced(x).group_by("task", maintain_order=True)}
    policies = list(dict.fromkeys([FULL, *(p["id"] for x in studies.values() for p in x.about["policies"])]))
    name = labels(policies)
    yield "**What does the model still answer?** Contexts solved, of those that full attention solves, with the 95 % interval; KL at the answer."
    yield ""
    yield "| policy | " + " | ".join(f"{title(n, studies[n])}: {task}" for n, task in told) + " |"
    yield "|---|" + "---|" * len(told)
    yield "| contexts; full attention solves | " + " | ".join(_cases(x) for x in told.values()) + " |"
    for policy in policies[1:]:
        rows = [x.filter(pl.col("policy") == policy).to_dicts() for x in told.values()]
        yield f"| {name[policy]} | " + " | ".join(_cell(x[0]) if x else "" for x in rows) + " |"


def _forced(study: Study) -> pl.DataFrame:
    return closed_loop.scores(study).filter(pl.col("mode") == "forced")


def _cases(mine: pl.DataFrame) -> str:
    full = mine.filter(pl.col("policy") == FULL).row(0, named=True)
    return f"{full['contexts']}" + ("" if full["score"] is None else f"; {full['samples'] - full['full_fails']}")


def _cell(row: Mapping[str, Any]) -> str:
    share = "" if row["score"] is None else f"{row['score']:.0%} ({row['low']:.0%} to {row['high']:.0%}), "
    return f"{share}{row['kl']:.3f}"


def between(row: Mapping[str, Any]) -> str:
    return f"{row['rho']:.2f}" + ("" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})")


def _correlations(study: Study) -> Iterator[str]:
    yield "| rank correlation over policies, 95 % interval over contexts | with KL | least, without | with what is solved | least, without |"
    yield "|---|---|---|---|---|"
    frame = closed_loop.correlations(study)
    for (task, predictor), mine in frame.group_by("task", "predictor", maintain_order=True):
        found = {r["outcome"]: r for r in mine.iter_rows(named=True)}
        told = [x for o in ("kl", "score") for x in _pair(found.get(o))]
        yield f"| {task}: {PREDICTORS[str(predictor)]} | " + " | ".join(told) + " |"


def _pair(row: Mapping[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    return between(row), "" if row["least"] is None else f"{row['least']:.2f} ({row['without']})"


def _judged(studies: Sequence[Study]) -> Iterator[str]:
    """The claim, number by number: does it order policies as the running model does?"""
    frames = [
        closed_loop.correlations(study)
        .filter(pl.col("outcome") == "kl", pl.col("predictor").str.starts_with("open_"))
        .join(study.answers.group_by("task").agg(contexts=pl.col("context").n_unique()), on="task", maintain_order="left")
        .with_columns(cell=pl.format("{} ({})", "task", pl.lit(model(study))))
        for study in studies
    ]
    yield from ("", "**Claim by claim**, with 95 % intervals over contexts", "")
    for (predictor,), mine in pl.concat(frames).group_by("predictor", maintain_order=True):
        found = [
            Verdict(r["cell"], r["contexts"], r["rho"], r["low"], r["high"], worded(at_least(ORDERED), r["low"], r["high"]))
            for r in mine.iter_rows(named=True)
        ]
        told = "; ".join(f"{v.cell} {v.said('.2f')} ({v.contexts} contexts)" for v in found)
        yield f"* *{PREDICTORS[str(predictor)]} orders policies as the running model does* (its KL; the whole interval at {ORDERED} or above)."
        yield f"  Rank correlation: {told}. {verdict(found)}"


def _groups(study: Study) -> Iterator[str]:
    """Of each group of layers alone, with KL."""
    frame = closed_loop.by_layers(study).drop_nulls("rho")
    groups = frame.sort("first_layer")["layers"].unique(maintain_order=True).to_list()
    yield from (
        "",
        "| rank correlation with KL of these layers alone | " + " | ".join(groups) + " |",
        "|---|" + "---|" * len(groups),
    )
    for (task, predictor), mine in frame.group_by("task", "predictor", maintain_order=True):
        at = {r["layers"]: between(r) for r in mine.iter_rows(named=True)}
        yield f"| {task}: {PREDICTORS[str(predictor)]} | " + " | ".join(at.get(g, "") for g in groups) + " |"


def _growth(study: Study) -> Iterator[str]:
    """How many times the closed error is the open one, at the first step and at the last, median over policies."""
    yield ""
    for (task,), mine in study.growth.filter(pl.col("open") > 0).group_by("task", maintain_order=True):
        ratio = mine.with_columns(ratio=pl.col("closed") / pl.col("open"))
        many = mine.select(pl.col("step").n_unique()).item()
        per_step = ratio.group_by("step").agg(pl.col("ratio").median()).sort("step")["ratio"].to_list()
        grown = f"{per_step[0]:.2f} at the first step, {per_step[-1]:.2f} at step {many}"
        yield f"* {task}: closed-loop output error over open-loop, median over policies: {grown}."


def _finding(study: Study) -> Iterator[str]:
    for row in closed_loop.finding(study).drop_nulls("auc").iter_rows(named=True):
        within = "" if row["within"] is None else f", {row['within']:.2f} within a policy (mean of {row['policies']})"
        told = f"area under the curve {row['auc']:.2f} over {row['cases']} policies and contexts{within}"
        yield f"* {row['task']}: {NUMBERS[row['number']]} against solved: {told}."


def _misleading(study: Study) -> Iterator[str]:
    name = labels([FULL, *(p["id"] for p in study.about["policies"])])
    frame = closed_loop.misleading(study).with_columns(gap=pl.col("closed_second") - pl.col("closed_first"))
    for (task, predictor), mine in frame.sort("gap", descending=True, maintain_order=True).group_by(
        "task", "predictor", maintain_order=True
    ):
        pairs = "; ".join(
            f"{name[r['first']]} ({r['open_first']:.2f}, solved {r['closed_first']:.0%}) over {name[r['second']]} ({r['open_second']:.2f}, "
            f"{r['closed_second']:.0%})"
            for r in mine.head(SHOWN).iter_rows(named=True)
        )
        yield f"* {task}: {PREDICTORS[str(predictor)]} misleads in {mine.height} pairs of policies, such as {pairs}."


def layers(frame: pl.DataFrame, advice: Mapping[str, Any]) -> Iterator[str]:
    """`sensitivity`: what each policy costs in a group of layers alone, and the largest reduction that each group bears; advice: a policy file
    of kvsim advise, whose pages stand beside."""
    name, groups = (
        labels(frame["policy"].unique(maintain_order=True)),
        frame.sort("first_layer")["layers"].unique(maintain_order=True),
    )
    yield from (
        "",
        "**Which layers bear it?** NLL added to plain text when the policy acts in these layers alone, nats a token",
        "",
    )
    yield from ("| policy | " + " | ".join(groups) + " |", "|---|" + "---|" * len(groups))
    for (policy,), mine in frame.group_by("policy", maintain_order=True):
        at = {r["layers"]: f"{r['d_nll']:+.3f}{_span(r)}" for r in mine.iter_rows(named=True)}
        yield f"| {name[str(policy)]} | " + " | ".join(at[g] for g in groups) + " |"
    found = {r["layers"]: r for r in borne(frame).iter_rows(named=True)}
    best = ("none" if r["policy"] is None else f"{r['reduction']:.1f}x, {name[r['policy']]}" for r in (found[g] for g in groups))
    yield f"| largest reduction whose upper end is at most {LIMIT} | " + " | ".join(best) + " |"
    pages = {int(n): [pages_of(x)] for n, x in advice["layers"].items()} | {
        int(n): [pages_of(x) for x in of.values()] for n, of in advice["heads"].items()
    }
    spans = ([x for n in range(first, last + 1) for x in pages[n]] for first, last in (map(int, g.split("-")) for g in groups))
    yield "| `kvsim advise -t mass=0.9` reads | " + " | ".join(f"{PAGES * len(x) / sum(x):.1f}x fewer" for x in spans) + " |"


def pages_of(policy: str) -> int:
    return int(re.search(r"read=pages\((\d+)\)", policy)[1])  # type: ignore[index]  # advice always says it


def _span(row: Mapping[str, Any]) -> str:
    return "" if row["low"] is None else f" ({row['low']:+.3f} to {row['high']:+.3f})"


def injected(study: Study) -> Iterator[str]:
    """Each policy beside itself with the evidence given to its reads in some layers."""
    scores = {r["policy"]: r for r in _forced(study).iter_rows(named=True)}
    pairs = [(p["id"], f"{p['id']} + ") for p in study.about["policies"] if not p["inject"] and p["id"] != FULL]
    name, given = labels([a for a, _ in pairs]), next(p["inject"] for p in study.about["policies"] if p["inject"])
    what = f"its reads in layers {given[0]} to {given[-1]} given the evidence that is still held"
    yield from ("", f"**What is finding the evidence worth?** {scores[FULL]['contexts']} needles; each policy, and {what}", "")
    yield from ("| policy | solved, KL | with the evidence |", "|---|---|---|")
    for own, start in pairs:
        with_it = next(r for policy, r in scores.items() if policy.startswith(start))
        yield f"| {name[own]} | {_cell(scores[own])} | {_cell(with_it)} |"
