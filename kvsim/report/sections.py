"""A run -> the sections of its page, one question each; what a run does not have is said, never left out in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from kvsim.metrics import quality as measured
from kvsim.metrics.budget import ALL_STEPS, by_budget
from kvsim.metrics.raster import Place, at, pages_recorded, raster, telling_place
from kvsim.metrics.run import RunTables
from kvsim.metrics.traffic import traffic
from kvsim.report import facts
from kvsim.report.charts.budget import quality_against
from kvsim.report.charts.loss import layer_head_map, mass_by_fate
from kvsim.report.charts.raster import kept_and_read
from kvsim.report.charts.steps import evidence_by_step
from kvsim.report.html import Figure, Section
from kvsim.report.names import family
from kvsim.report.theme import ROW_CAP, Style, labelled, styles

STRIPS = 8  # policies on the raster
CELLS, SAMPLED, PAGE = 160, 64, 16  # the raster: most cells across, most steps down, tokens a cell where no pages were read


def sections(run: RunTables, name: str = "") -> list[Section]:
    """The page of one run; `name` goes before the names of its figures."""
    look = styles([p.id for p in sorted(run.policies, key=lambda p: p.role == "baseline")])
    roles = facts.role_table(run, look)
    return [
        Section(
            "What to trust",
            (facts.OPEN_LOOP, facts.RECALL),
            facts.facts(run),
            [facts.policy_table(run, look)] + ([roles] if roles else []),
        ),
        _budgets(run, look, name),
        _fates(run, look, name),
        _map(run, look, name),
        _steps(run, look, name),
        _raster(run, look, name),
    ]


def _budgets(run: RunTables, look: Sequence[Style], name: str) -> Section:
    curves, points = _curves(run), _points(run)
    told = [
        "Lines: a read policy at every budget, all from one ranking per step. Points: each policy at the budget it ran with.",
        "Up and to the left is better for recall, down and to the left for output error (floor 0.001, where full attention lies).",
        *facts.absent(run),
        *facts.other_forced(run, look),
    ]
    if curves.is_empty():
        told.append("This run has no curves: they are drawn for read policies that rank pages over everything (full() >> quest(...) and its baselines).")
    side = "Bytes are K and V rows of the union over a KV head's query heads, plus index, scales and scores at the budget the policy ran with."
    lines, dots = labelled(curves, look), labelled(points, look)
    table = pl.concat([lines.select(dots.columns), dots])
    click = "A click on the legend keeps one policy."
    return Section(
        "Quality for a read budget",
        ("What does reading more buy, and who loses least at the same cost?",),
        blocks=[
            Figure(f"{name}quality-tokens", quality_against("tokens", lines, dots, look), " ".join([*told, click]), table, clickable=True),
            Figure(f"{name}quality-bytes", quality_against("bytes", lines, dots, look), " ".join([side, *facts.absent(run), click]), table, clickable=True),
        ],
    )


def _curves(run: RunTables) -> pl.DataFrame:
    """by_budget with `steps` in words; thinned to stay under the cap, one role being all steps."""
    many = run.tables["curves"].select(pl.struct("policy", "role").n_unique()).collect().item() or 1
    frame = by_budget(run.tables["curves"], run.heads, run.ledger, most=max(4, min(40, ROW_CAP // many - 1)))
    if frame.filter(pl.col("role") != ALL_STEPS)["role"].n_unique() < 2:
        frame = frame.filter(pl.col("role") == ALL_STEPS)
    return _worded(frame.cast({"tokens": pl.Float64})).drop("role", "pages", "mass_recall_p10")


def _points(run: RunTables) -> pl.DataFrame:
    whole = measured.quality(run.heads).with_columns(role=pl.lit(ALL_STEPS, pl.Int8))
    split = measured.quality(run.heads, "role")
    both = pl.concat([whole, split.select(whole.columns)]) if split["role"].n_unique() > 1 else whole
    moved = traffic(run.ledger, run.layers).select("policy", bytes="touched_bytes")
    columns = ("policy", "steps", pl.col("read_tokens").alias("tokens"), "bytes", *measured.MEASURES)
    return _worded(both).join(moved, on="policy", how="left", maintain_order="left").select(columns)


def _worded(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(steps=pl.col("role").map_elements(facts.role, return_dtype=pl.String)).sort(pl.col("role") != ALL_STEPS, "policy", maintain_order=True)


def _fates(run: RunTables, look: Sequence[Style], name: str) -> Section:
    parts, error = labelled(measured.fate(run.heads), look), labelled(measured.quality(run.heads), look)
    caption = (
        "Mean dense attention mass by what became of its tokens: evicted mass is gone for good, unread mass can be read at the next step, coded "
        "mass is blurred. Beside it the output error, which also sees what coding costs."
    )
    chart = mass_by_fate(parts, error, look)
    return Section("Where the attention mass went", ("Gone, skipped or blurred: three different risks.",), blocks=[Figure(f"{name}fate", chart, caption, parts)])


def _map(run: RunTables, look: Sequence[Style], name: str) -> Section:
    group = 1
    heads = run.heads.select("layer", "q_head").unique()
    while heads.select("layer", pl.col("q_head") // group).unique().select(pl.len()).collect().item() > ROW_CAP:
        group *= 2
    cells = measured.quality(run.heads, "layer", (pl.col("q_head") // group * group).alias("q_head"))
    fit = look[: ROW_CAP // max(1, cells.group_by("policy").len()["len"].max() or 1)]  # type: ignore[operator, call-overload]
    frame = labelled(cells, fit).select("policy", "layer", "q_head", "rel_l2", "missed_mass", "evidence_recall", "mass_recall")
    caption = "Missed mass is dense attention mass on tokens that were evicted or not read."
    if group > 1:
        caption += f" Query heads are taken {group} by {group}, named by the first."
    if len(fit) < len(look):
        caption += f" To keep the chart small it has {len(fit)} of {len(look)} policies; without {', '.join(s.label for s in look[len(fit) :])}."
    figure = Figure(f"{name}map", layer_head_map(frame, fit), caption, frame, clickable=True)
    return Section("Layers and heads", ("Which layers and heads lose, and is it the same ones under every policy?",), blocks=[figure])


def _steps(run: RunTables, look: Sequence[Style], name: str) -> Section:
    title, text = "Evidence, step by step", ("Is the evidence there when the answer needs it?",)
    many = run.heads.select(pl.struct("policy", "role", "step").n_unique()).collect().item()
    together = -(-many // ROW_CAP)  # steps that one point stands for
    step = (pl.col("step") // together * together).alias("step")
    frame = labelled(measured.quality(run.heads, "role", step), look).select("policy", "role", "step", "evidence_recall", "rel_l2", "evidence_dense")
    if frame["evidence_dense"].is_null().all():
        return Section(title, (*text, "No prompt of this run marks evidence, so there is nothing to follow here."))
    bands = measured.roles(run.heads).sort("first")
    apart = all(a < b for a, b in zip(bands["last"], bands["first"][1:], strict=False))
    caption = (
        "Ratios of sums over layers and heads at each step; a gap where less than 0.001 of dense mass lies on evidence. A dot grows with the dense "
        "attention mass on evidence (lowest panel): where full attention itself hardly looks at it, a miss matters little. A click on the legend keeps one policy."
    )
    if together > 1:
        caption += f" Each point is {together} steps together."
    if not apart:
        caption += " The contexts ask at different steps, so a step holds tokens of several roles; each role has its own line."
    named = pl.col("role").map_elements(facts.role, return_dtype=pl.String)
    chart = evidence_by_step(frame.with_columns(named), bands.with_columns(named) if apart else bands.head(0), look)
    return Section(title, text, blocks=[Figure(f"{name}steps", chart, caption, frame, clickable=True)])


def _raster(run: RunTables, look: Sequence[Style], name: str) -> Section:
    place = telling_place(run.heads, run.ledger)
    at_place = {r["policy"]: r for r in measured.quality(run.heads.filter(at(place))).iter_rows(named=True)}
    paged = pages_recorded(run.tables["plans"], place)
    drawn = [s for s in look if s.policy in at_place and family(s.policy) != "full"][:STRIPS] or list(look[:1])
    ledger = run.ledger.filter(pl.col("request") == place.request, pl.col("layer") == place.layer)
    steps = ledger.select(pl.col("step").unique().sort()).collect()["step"].to_list()
    sampled = [steps[i * len(steps) // min(SAMPLED, len(steps))] for i in range(min(SAMPLED, len(steps)))]
    total = int(ledger.select(pl.col("pos").max()).collect().item()) + 1
    rasters, width = _rasters(run, [s.policy for s in drawn], place, sampled, total, max(paged.values(), default=PAGE), at_place)
    titles = [_strip_title(s.label, at_place[s.policy], s.policy in paged) for s in drawn]
    evidence = _evidence(run, place)
    caption = (
        f"Context {place.request}, layer {place.layer}, KV head {place.kv_head}, query head {place.q_head}: the head "
        f"{'whose dense attention rests most on evidence' if evidence.height else 'with the largest output error'}. One strip per policy: "
        f"decode steps down ({len(sampled)} of {len(steps)}), position across ({width} tokens a cell); a stronger colour is a larger share of a "
        "cell's tokens, blank is evicted or not yet there."
    )
    if evidence.height:
        caption += " Framed: the evidence."
    if len(drawn) < len(look):
        caption += f" Not drawn: {', '.join(s.label for s in look if s not in drawn)}."
    chart = kept_and_read(list(zip(titles, rasters, strict=True)), evidence, -(-total // width), width, (steps[0], steps[-1]))
    table = pl.concat([cells.select(pl.lit(s.label).alias("policy"), pl.all()) for s, cells in zip(drawn, rasters, strict=True)])
    return Section("What one head kept and read", ("Is the evidence still there, and is it read?",), blocks=[Figure(f"{name}raster", chart, caption, table)])


def _rasters(
    run: RunTables, policies: list[str], place: Place, steps: list[int], total: int, page: int, lost: Mapping[str, Mapping[str, float | None]]
) -> tuple[list[pl.DataFrame], int]:
    """The raster of each policy, in cells of equal width, widened until each is small enough to draw; -> rectangles, tokens a cell."""
    width = page * -(-total // (page * CELLS))
    while True:
        found = [raster(run.tables, p, place, steps, width, selective=bool(lost[p]["mass_unread"])) for p in policies]
        if max(f.height for f in found) <= ROW_CAP or width >= total:
            return found, width
        width *= 2


def _strip_title(label: str, q: Mapping[str, float | None], paged: bool) -> str:
    recall = q["evidence_recall"]
    words = [label, *([f"evidence recall {recall:.0%}"] if recall is not None else []), f"output error {facts.error(q['rel_l2'])}"]
    return " · ".join(words) + (" · pages read not recorded (replay with --plans)" if q["mass_unread"] and not paged else "")


def _evidence(run: RunTables, place: Place) -> pl.DataFrame:
    spans = next((r.get("spans") or [] for r in run.requests if r.get("request") == place.request), [])
    rows = [{"start": s["start"], "stop": s["stop"], "label": s.get("label") or "evidence"} for s in spans if s.get("kind") == "evidence"]
    return pl.DataFrame(rows, schema={"start": pl.Int64, "stop": pl.Int64, "label": pl.String})
