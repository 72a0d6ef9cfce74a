"""What would a step take? A bill of `kvsim cost predict`, and the cost model behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from kvsim.cost.check import check, foretold
from kvsim.cost.model import CostModel
from kvsim.cost.numbers import seconds
from kvsim.cost.predict import Bill
from kvsim.errors import WrongUse
from kvsim.metrics.quality import quality
from kvsim.report import facts, theme
from kvsim.report.charts.cost import (
    GRADES,
    error_of_fits,
    predicted_against_measured,
    time_against_error,
    time_by_part,
    time_by_step,
)
from kvsim.report.html import Figure, Section, Table
from kvsim.report.view import LEGEND, View

PARTS = {  # class of a launch -> what a step is spent on, of theme.TIMES
    "step": "whole step, as measured", "rest": "all that is not the cache", "dense_attn": "attention", "gather_attn": "attention",
    "page_scan": "index: scan and top-k", "topk": "index: scan and top-k", "summary_update": "summaries and codes written",
    "dequant": "codes decoded", "scores": "scores looked at", "routing": "scores looked at", "tier_move": "rows moved or fetched",
    "host_fetch": "rows moved or fetched", "ssd_fetch": "rows moved or fetched", "collective": "rows moved or fetched",
}  # fmt: skip
MOST = 40  # fits on the chart


@dataclass(frozen=True)
class Costs:
    """What the command line gave: a bill of the run, a cost model, samples that it is held against."""

    bill: Bill | None = None
    model: CostModel | None = None
    samples: pl.DataFrame | None = None


def section(view: View, costs: Costs) -> Section:
    """Raises WrongUse for a bill of other policies, and for samples without a model."""
    if costs.samples is not None and costs.model is None:
        raise WrongUse("--samples: which model they are held against is not said; add --model MODEL.json")
    text = ["No GPU ran these policies: times are predicted from counted bytes by a model that was fitted to measured kernels."]
    blocks: list[Figure | Table] = []
    if costs.bill is not None:
        text += costs.bill.notes
        blocks += _bill(view, costs.bill)
    if costs.model is not None:
        blocks += _fits(view, costs.model)
        blocks += _calibration(view, costs.model, costs.samples) if costs.samples is not None else []
    return Section("Time", text, blocks=blocks)


# ---------------------------------------------------------------------------------------------- the bill
def _bill(view: View, bill: Bill) -> list[Figure | Table]:
    told = {s["policy"]: s for s in bill.summary}
    other = [s.label for s in view.look if s.policy not in told]
    if len(other) == len(view.look):
        raise WrongUse(f"--bill: of other policies than {view.run.path}; kvsim cost predict {view.run.path} makes one")
    notes = [f"Not priced: {', '.join(other)}."] if other else []
    totals = view.labelled(
        pl.DataFrame([_total(s) for s in told.values()], schema_overrides={"low": pl.Float64, "high": pl.Float64})
    )
    return [_breakdown(view, told, totals, notes), _worth(view, totals, notes), *_over_steps(view, bill, notes)]


def _total(s: dict[str, Any]) -> dict[str, Any]:
    floor = "≥ " if s["unknown"] or s["high_us"] is None else ""
    ms = {n: us / 1e3 for n, us in s["tpot_us"].items()} | {
        "low": s["low_us"] / 1e3,
        "high": None if s["high_us"] is None else s["high_us"] / 1e3,
    }
    return {"policy": s["policy"], "said": f"{floor}{seconds(s['tpot_us']['p50'])}, {s['grade']}", "grade": s["grade"]} | ms


def _breakdown(view: View, told: dict[str, Any], totals: pl.DataFrame, notes: list[str]) -> Figure:
    order = {n: i for i, n in enumerate(theme.TIMES)}
    rows = [
        (p, PARTS[c["class"]], c["us"] / 1e3)
        for p, s in told.items()
        for c in s["classes"]
        if c["class"] in PARTS and c["us"] is not None
    ]
    parts = pl.DataFrame(rows, {"policy": pl.String, "part": pl.String, "ms": pl.Float64}, orient="row")
    parts = (
        parts.group_by("policy", "part")
        .agg(pl.col("ms").sum())
        .with_columns(order=pl.col("part").replace_strict(order, return_dtype=pl.Int8))
    )
    data = view.labelled(parts.sort("policy", "order"))
    how = (
        "Mean predicted time of a decode step by what it is spent on. Upright bar: the p99 over steps. At the end the median and its grade; "
        "≥: the time of a part is not known, so it is a floor."
    )
    chart = time_by_part(data, totals, view.of_label(data["policy"]))
    return view.figure("time", "What does a step spend its time on?", how, chart, data, notes)


def _worth(view: View, totals: pl.DataFrame, notes: list[str]) -> Figure:
    lost = view.labelled(quality(view.run.heads)).select("policy", "rel_l2")
    data = totals.select("policy", "p50", "low", "high", "grade").join(lost, on="policy", how="inner", maintain_order="left")
    how = "Median predicted time of a decode step across, with the interval of its grade; mean output error up. Down and to the left is better."
    chart = time_against_error(data, view.of_label(data["policy"]))
    return view.figure("time-error", "What error does the time saved cost?", how, chart, data, [*notes, LEGEND], clickable=True)


def _over_steps(view: View, bill: Bill, notes: list[str]) -> list[Figure]:
    together = view.together(1)
    mean = bill.steps.group_by("policy", (pl.col("step") // together * together).alias("step")).agg(
        ms=pl.col("step_us").mean() / 1e3
    )
    data = view.labelled(mean.sort("policy", "step"))
    if data["step"].n_unique() < 2:
        return []
    how = (
        "Predicted time of each decode step, mean over contexts. Spikes are cuts: a batch whose contexts cut at different steps bears their "
        "mean."
    )
    if together > 1:
        notes = [*notes, f"Each point is {together} steps together."]
    chart = time_by_step(data, view.of_label(data["policy"]))
    return [view.figure("time-steps", "Is every step as fast as the next?", how, chart, data, [*notes, LEGEND], clickable=True)]


# ---------------------------------------------------------------------------------------------- the model
def _fits(view: View, model: CostModel) -> list[Figure]:
    rows = [
        (_kernel(f.key), f.held.get("mape"), f.held.get("p90"), f.held.get("n"), f.bandwidth_gbps())
        for f in model.fits
        if f.held.get("n")
    ]
    data = pl.DataFrame(
        rows, {"kernel": pl.String, "mape": pl.Float64, "p90": pl.Float64, "shapes": pl.Int64, "gbps": pl.Float64}, orient="row"
    )
    if data.is_empty():
        return []
    data = data.sort("mape", descending=True)
    where = model.gpu.name if model.gpu else "a device that is not named"
    how = f"Fits of kernels on {where}. Dot: the mean error on shapes that were left out of a fit; bar: their 90th percentile."
    notes = [f"The {MOST} of {data.height} fits with the largest error are drawn."] if data.height > MOST else []
    return [
        view.figure(
            "fits", "How wrong is the cost model on shapes it has not seen?", how, error_of_fits(data.head(MOST)), data, notes
        )
    ]


def _calibration(view: View, model: CostModel, samples: pl.DataFrame) -> list[Figure | Table]:
    found = check(model, samples)
    told = foretold(model, samples).filter(pl.col("predicted_us").is_not_null(), pl.col("t_us") > 0)
    told = told.with_columns(kernel=pl.col("class") + " " + pl.col("variant").fill_null(""))
    kept = told.sort("kernel", "t_us").gather_every(-(-max(told.height, 1) // theme.ROW_CAP))
    data = kept.select("kernel", "batch", "context", "t_us", "predicted_us", "grade")
    if data.is_empty():
        return [_checked(found)]
    how = (
        "Left: each sample's measured time across, the predicted up; on the dashed line both are the same. Right: how far they are apart. "
        f"Grades: {', '.join(GRADES)}, from what was measured to what is only bytes over the peak."
    )
    notes = ["A sample that the model was fitted to shows hardly any error; only others tell."]
    if kept.height < told.height:
        notes.append(f"Every {-(-told.height // theme.ROW_CAP)}th of {told.height} samples is drawn.")
    title = "Does the model foretell what was measured?"
    figure = view.figure("calibration", title, how, predicted_against_measured(data), data, notes)
    return [figure, _checked(found)]


def _checked(found: dict[str, Any]) -> Table:
    columns = ("kernel", "calibrated samples", "MAPE", "P90", "bias", "MAPE of bytes over the peak")
    rows = []
    for r in found["rows"]:
        shares = (r.get("mape"), r.get("p90"), r.get("bias"), r["plain"].get("mape"))
        rows.append((f"{r['class']} {r['variant']}", str(r["n"]), *map(facts.percent, shares)))
    left = [f"Left out: {n} {why}." for why, n in found["left_out"].items() if n]
    return Table("The model against these samples, as kvsim cost check prints it.", columns, rows, notes=left)


def _kernel(key: dict[str, Any]) -> str:
    heads = f"{key['q_heads']}/{key['kv_heads']} heads × {key['head_dim']}, {key['kv_bits']} bits"
    page = f", pages of {key['page']}" if key.get("page") else ""
    return f"{key['class']} {key['variant'] or ''}: {heads}{page}"
