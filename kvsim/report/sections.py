"""A run -> the sections of its page, one question each; what a run does not have is said, never left out in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from kvsim.metrics.budget import ALL_STEPS, by_budget
from kvsim.metrics.quality import MEASURES, fate, quality, roles
from kvsim.metrics.raster import Place, at, pages_recorded, raster, telling_place
from kvsim.metrics.run import RunTables
from kvsim.metrics.traffic import traffic
from kvsim.report import facts
from kvsim.report.charts.budget import quality_against
from kvsim.report.charts.loss import layer_head_map, mass_by_fate
from kvsim.report.charts.raster import Extent, kept_and_read
from kvsim.report.charts.steps import evidence_by_step
from kvsim.report.html import Figure, Section
from kvsim.report.names import family
from kvsim.report.theme import ROW_CAP, Style, labelled, styles

STRIPS = 8  # policies on the raster
CELLS, SAMPLED, PAGE = 160, 64, 16  # the raster: most cells across, most steps down, tokens a cell where no pages were read
LEGEND = "A click on the legend keeps one policy."


def sections(run: RunTables, name: str = "") -> list[Section]:
    """The page of one run; `name` goes before the names of its figures."""
    look = styles(p.id for p in sorted(run.policies, key=lambda p: p.role == "baseline") if p.rows)
    split = facts.role_table(run, look)
    tables = [facts.policy_table(run, look), *([split] if split else [])]
    return [
        Section("What to trust", (facts.OPEN_LOOP, facts.RECALL), facts.facts(run), tables),
        _budgets(run, look, name),
        _fates(run, look, name),
        _map(run, look, name),
        _steps(run, look, name),
        _raster(run, look, name),
    ]


# ---------------------------------------------------------------------------------------------- quality and budget
def _budgets(run: RunTables, look: Sequence[Style], name: str) -> Section:
    lines, dots = labelled(_curves(run), look), labelled(_points(run), look)
    both = pl.concat([lines.select(dots.columns), dots])
    beside = [*facts.absent(run), *facts.other_forced(run, look)]
    read = [
        "Lines: a read policy at every budget, all from one ranking per step. Points: each policy at the budget it ran with.",
        "Higher recall and lower output error at the left are better; full attention has no output error and stands on the floor of 0.001.",
    ]
    if lines.is_empty():
        read.append(
            "This run has no curves: only a policy that ranks pages over everything, such as full() >> quest(...), has them."
        )
    rows = "Bytes: K and V rows of a KV head, those of all its query heads together, plus index, scales and scores as at the budget it ran with."
    captions = {"tokens": [*read, *beside, LEGEND], "bytes": [rows, *beside, LEGEND]}
    return Section(
        "Quality for a read budget",
        ("What does reading more buy, and who loses least at the same cost?",),
        blocks=[
            Figure(f"{name}quality-{x}", quality_against(x, lines, dots, look), " ".join(said), both, clickable=True)
            for x, said in captions.items()
        ],
    )


def _curves(run: RunTables) -> pl.DataFrame:
    """by_budget with the steps in words, thinned to stay under the cap."""
    many = run.tables["curves"].select(pl.struct("policy", "role").n_unique()).collect().item() or 1
    frame = by_budget(run.tables["curves"], run.heads, run.ledger, most=max(3, min(40, ROW_CAP // 2 // many)))
    split = frame.filter(pl.col("role") != ALL_STEPS)["role"].n_unique() > 1
    frame = frame if split else frame.filter(pl.col("role") == ALL_STEPS)
    return _worded(frame.cast({"tokens": pl.Float64})).drop("role", "pages")


def _points(run: RunTables) -> pl.DataFrame:
    """Each policy at its own budget, over all decode steps and, with several roles, over the steps of each."""
    frame, split = quality(run.heads).with_columns(role=pl.lit(ALL_STEPS, pl.Int8)), quality(run.heads, "role")
    if split["role"].n_unique() > 1:
        frame = pl.concat([frame, split.select(frame.columns)])
    moved = traffic(run.ledger, run.layers).select("policy", bytes="touched_bytes")
    columns = ("policy", "steps", pl.col("read_tokens").alias("tokens"), "bytes", *MEASURES)
    return _worded(frame).join(moved, on="policy", how="left", maintain_order="left").select(columns)


def _worded(frame: pl.DataFrame) -> pl.DataFrame:
    """With `steps`, the role in words; all decode steps first."""
    return frame.sort(pl.col("role") != ALL_STEPS, "role", maintain_order=True).with_columns(facts.role_words().alias("steps"))


# ---------------------------------------------------------------------------------------------- where it is lost
def _fates(run: RunTables, look: Sequence[Style], name: str) -> Section:
    parts, lost = labelled(fate(run.heads), look), labelled(quality(run.heads), look)
    caption = (
        "Mean dense attention mass by what became of its tokens: evicted mass is gone for good, unread mass can be read at the next step, "
        "coded mass is blurred. Beside it the output error, which also sees what coding costs."
    )
    figure = Figure(f"{name}fate", mass_by_fate(parts, lost, look), caption, parts)
    return Section("Where the attention mass went", ("Gone, skipped or blurred: three different risks.",), blocks=[figure])


def _map(run: RunTables, look: Sequence[Style], name: str) -> Section:
    group, heads = 1, run.heads.select("layer", "q_head").unique().collect()
    while heads.select("layer", pl.col("q_head") // group).n_unique() > ROW_CAP:
        group *= 2
    cells = labelled(quality(run.heads, "layer", (pl.col("q_head") // group * group).alias("q_head")), look)
    fit = look[: ROW_CAP // heads.select("layer", pl.col("q_head") // group).n_unique()]
    cells = cells.filter(pl.col("policy").is_in([s.label for s in fit]))
    cells = cells.select("policy", "layer", "q_head", "rel_l2", "missed_mass", "evidence_recall", "mass_recall")
    caption = "Missed mass: dense attention mass on tokens that were evicted or not read."
    if group > 1:
        caption += f" Query heads are taken {group} by {group}, named by the first."
    if len(fit) < len(look):
        caption += f" To stay readable it has {len(fit)} of {len(look)} policies; without {_list(look[len(fit) :])}."
    figure = Figure(f"{name}map", layer_head_map(cells, fit), caption, cells, clickable=True)
    return Section(
        "Layers and heads", ("Which layers and heads lose, and is it the same ones under every policy?",), blocks=[figure]
    )


def _list(look: Sequence[Style]) -> str:
    return ", ".join(s.label for s in look)


# ---------------------------------------------------------------------------------------------- when it is lost
def _steps(run: RunTables, look: Sequence[Style], name: str) -> Section:
    title, text = "Evidence, step by step", ("Is the evidence there when the answer needs it?",)
    many = run.heads.select(pl.struct("policy", "role", "step").n_unique()).collect().item()
    together = -(-many // (ROW_CAP // 2))  # steps that one point stands for
    frame = labelled(quality(run.heads, "role", (pl.col("step") // together * together).alias("step")), look)
    if frame["evidence_dense"].is_null().all():
        return Section(title, (*text, "No prompt of this run marks evidence, so there is nothing to follow here."))
    frame = frame.select("policy", "role", "step", "evidence_recall", "rel_l2", "evidence_dense").with_columns(facts.role_words())
    bands = roles(run.heads).sort("first").with_columns(facts.role_words())
    apart = all(last < first for last, first in zip(bands["last"], bands["first"][1:], strict=False))
    caption = (
        "Ratios of sums over layers and heads at each step; a gap where less than 0.001 of dense mass lies on evidence. A dot grows with "
        "the dense attention mass on evidence (lowest panel): where full attention itself hardly looks at it, a miss matters little."
    )
    if together > 1:
        caption += f" Each point is {together} steps together."
    if not apart:
        caption += " The roles of tokens overlap along the steps of different contexts; each role has its own line."
    chart = evidence_by_step(frame, bands if apart else bands.clear(), look)
    return Section(title, text, blocks=[Figure(f"{name}steps", chart, f"{caption} {LEGEND}", frame, clickable=True)])


# ---------------------------------------------------------------------------------------------- what was kept and read
def _raster(run: RunTables, look: Sequence[Style], name: str) -> Section:
    place = telling_place(run.heads, run.ledger)
    lost = {r["policy"]: r for r in quality(run.heads.filter(at(place))).iter_rows(named=True)}
    paged = pages_recorded(run.tables["plans"], place)
    drawn = [s for s in look if s.policy in lost and family(s.policy) != "full"][:STRIPS] or list(look[:1])
    ledger = run.ledger.filter(pl.col("request") == place.request, pl.col("layer") == place.layer)
    steps = ledger.select(pl.col("step").unique().sort()).collect()["step"].to_list()
    total = int(ledger.select(pl.col("pos").max()).collect().item()) + 1
    sampled = steps[:: -(-len(steps) // SAMPLED)]
    strips, width = _strips(run, {s.policy: bool(lost[s.policy]["mass_unread"]) for s in drawn}, place, sampled, total, paged)
    evidence = _evidence(run, place)
    caption = (
        f"Context {place.request}, layer {place.layer}, KV head {place.kv_head}, query head {place.q_head}: the head "
        f"{'whose dense attention rests most on evidence' if evidence.height else 'with the largest output error'}. One strip a policy: "
        f"decode steps down ({len(sampled)} of {len(steps)}), position across ({width} tokens a cell). A stronger colour is a larger share "
        "of a cell's tokens; blank is evicted or not yet there."
    )
    if evidence.height:
        caption += " Framed: the evidence."
    if len(drawn) < len(look):
        caption += f" Not drawn: {_list([s for s in look if s not in drawn])}."
    titles = [_strip_title(s.label, lost[s.policy], s.policy in paged) for s in drawn]
    chart = kept_and_read(
        list(zip(titles, strips, strict=True)), evidence, Extent(-(-total // width), width, steps[0], steps[-1])
    )
    table = pl.concat([cells.select(pl.lit(s.label).alias("policy"), pl.all()) for s, cells in zip(drawn, strips, strict=True)])
    figure = Figure(f"{name}raster", chart, caption, table)
    return Section("What one head kept and read", ("Is the evidence still there, and is it read?",), blocks=[figure])


def _strips(
    run: RunTables, selective: Mapping[str, bool], place: Place, steps: list[int], total: int, paged: Mapping[str, int]
) -> tuple[list[pl.DataFrame], int]:
    """The raster of each policy, in cells of one width, widened until all are small enough to draw; -> rectangles, tokens a cell."""
    page = max(paged.values(), default=PAGE)
    width = page * -(-total // (page * CELLS))
    while True:
        found = [raster(run.tables, policy, place, steps, width, part) for policy, part in selective.items()]
        if sum(f.height for f in found) <= ROW_CAP or width >= total:
            return found, width
        width *= 2


def _strip_title(label: str, lost: Mapping[str, Any], paged: bool) -> str:
    recall = [] if lost["evidence_recall"] is None else [f"evidence recall {lost['evidence_recall']:.0%}"]
    unknown = ["pages read not recorded (replay with --plans)"] if lost["mass_unread"] and not paged else []
    return " · ".join([label, *recall, f"output error {facts.error(lost['rel_l2'])}", *unknown])


def _evidence(run: RunTables, place: Place) -> pl.DataFrame:
    spans = next((r.get("spans") or [] for r in run.requests if r.get("request") == place.request), [])
    rows = [(s["start"], s["stop"], s.get("label") or "evidence") for s in spans if s.get("kind") == "evidence"]
    return pl.DataFrame(rows, schema={"start": pl.Int64, "stop": pl.Int64, "label": pl.String}, orient="row")
