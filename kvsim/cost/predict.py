"""A run priced: every decode step of every policy and request, what prefill gains, and the distribution of the time per output token."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kvsim.cost.launches import Kernels
from kvsim.cost.ledger import Work, work
from kvsim.cost.model import GRADES, CostModel
from kvsim.cost.numbers import seconds
from kvsim.cost.overlap import layers_of
from kvsim.cost.prefill import extra
from kvsim.cost.price import parts, steps
from kvsim.cost.prices import Prices, priced_for
from kvsim.cost.samples import write_whole
from kvsim.errors import BadProfile, Uncalibrated, WrongUse

PERCENTILES = (50, 95, 99)
AHEAD = (
    "--overlap next_layer: fetches of a layer behind the compute of the one before, all layers alike; it takes pages that are known a layer "
    "ahead, as those of sparda_proxy are"
)
AT_EVENTS = ("routing", "tier_move")  # what only steps that change the held set do; and looking at scores, where only they look


@dataclass(frozen=True)
class Bill:
    """steps, parts: one row a step, and a step and class; prefill: a policy, request and part; summary: plain data, one entry a policy."""

    steps: pl.DataFrame
    parts: pl.DataFrame
    prefill: pl.DataFrame
    summary: list[dict[str, Any]]
    notes: list[str]


@dataclass(frozen=True)
class Asked:
    """batch: so many requests at once, all like the one replayed. overlap: as in overlap.step_time. The rest as in price.Prices and
    launches.Kernels."""

    batch: int = 1
    variant: str | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    how: Kernels = field(default_factory=Kernels)
    weights_bytes: int | None = None
    graph: str | None = None
    overlap: str = "none"  # of overlap.OVERLAPS: whether fetches hide behind the layer before


def predict(model: CostModel, about: dict[str, Any], ledger: pl.LazyFrame, events: pl.LazyFrame, asked: Asked) -> Bill:
    """run.json, ledger and events of a run -> its bill.

    Raises WrongUse for a model of other heads and a batch that does not fit in memory."""
    found = work(about, ledger, events, asked.how, asked.batch, asked.graph)
    prices = priced_for(
        model, found.heads, rest=asked.variant, kernels=asked.kernels, weights_bytes=asked.weights_bytes, graph=asked.graph
    )
    _refuse_what_does_not_fit(model, found, asked)
    by_class = parts(prices, found.launches)
    ahead = layers_of(found.launches) if asked.overlap == "next_layer" else None
    by_step = found.steps.join(steps(by_class, ahead), on="step").with_columns(pl.col("unknown").list.join(", "))
    prefill, notes = _prefill(prices, about, found, asked)
    names = found.steps.select("step", "policy", "request", "at")
    by_class = names.join(by_class, on="step").sort("step", maintain_order=True)
    told = {"overlap": asked.overlap} if ahead is not None else {}
    summary = [
        _summary(p, rows, by_class.filter(policy=p), prefill.filter(policy=p), asked.how) | told
        for (p,), rows in by_step.group_by("policy", maintain_order=True)
    ]
    notes += [AHEAD] if ahead is not None else []
    return Bill(_named(by_step), _named(by_class), prefill, summary, found.notes + notes + _measured(model, by_class))


def _named(table: pl.DataFrame) -> pl.DataFrame:
    return table.drop("step").rename({"at": "step"})


def _refuse_what_does_not_fit(model: CostModel, found: Work, asked: Asked) -> None:
    most, weights = found.steps.sort("resident_bytes").row(-1, named=True), asked.weights_bytes or 0
    if model.gpu and model.gpu.memory_gb and most["resident_bytes"] + weights > model.gpu.memory_gb * 1e9:
        raise WrongUse(
            f"--batch {asked.batch}: {most['policy']} holds {most['resident_bytes'] / 1e9:.1f} GB at step {most['at']} of request"
            f" {most['request']}{f', beside {weights / 1e9:.1f} GB of weights' if weights else ''}, and {model.gpu.name} has"
            f" {model.gpu.memory_gb:g} GB; lower --batch"
        )


def _prefill(prices: Prices, about: dict[str, Any], found: Work, asked: Asked) -> tuple[pl.DataFrame, list[str]]:
    """policy, request, part, bytes, us, low_us, high_us, grade, by of what is added to prefill."""
    forms = {p["id"]: p.get("form") or p["id"] for p in about.get("policies", [])}
    launches, notes = extra(forms, found.first, asked.how, asked.batch)
    ids = found.first.select(pl.col("id").cast(pl.Int64).alias("step"), "policy", "request")
    each = launches.drop("part").with_columns(step=pl.int_range(pl.len(), dtype=pl.Int64))
    priced = parts(prices, each).filter(pl.col("class") == "prefill_extra") if each.height else parts(prices, each)
    named = (
        launches.select("step", "part")
        .join(ids, on="step", how="left", maintain_order="left")
        .with_columns(row=pl.int_range(pl.len(), dtype=pl.Int64))
    )
    out = named.drop("step").join(priced, left_on="row", right_on="step", how="left", maintain_order="left")
    return out.select("policy", "request", "part", "bytes", "us", "low_us", "high_us", "grade", "by"), notes


def _summary(policy: str, rows: pl.DataFrame, by_class: pl.DataFrame, prefill: pl.DataFrame, how: Kernels) -> dict[str, Any]:
    """What stdout shows of a policy. Percentiles over all steps of all requests, and over the requests' means."""
    means = rows.group_by("request").agg(pl.col("step_us").mean())["step_us"].to_numpy()
    steps_us = rows["step_us"].to_numpy()
    middle = rows.sort("step_us").row(rows.height // 2, named=True)
    count = rows.height
    classes = by_class.group_by("class", maintain_order=True).agg(
        us=pl.col("us").sum() / count,
        bytes=pl.col("bytes").sum() / count,
        grade=pl.col("grade").replace_strict({g: i for i, g in enumerate(GRADES)}, return_dtype=pl.Int64).max(),
        by=pl.col("by").first(),
    )
    added = prefill.group_by("request").agg(pl.col("us").sum())["us"]
    return {
        "policy": policy,
        "steps": count,
        "tpot_us": _percentiles(steps_us),
        "tpot_requests_us": _percentiles(means),
        "tpot_staggered_us": _percentiles(_staggered(rows, by_class, how)),
        "overlap_us": float(np.median(rows["overlap_us"].to_numpy())),
        "low_us": middle["low_us"],
        "high_us": middle["high_us"],
        "grade": GRADES[max(GRADES.index(g) for g in rows["grade"].unique())],
        "binding": rows["binding"].mode().sort()[0],
        "unknown": sorted({c for u in rows["unknown"].unique() for c in u.split(", ") if c}),
        "classes": [r | {"grade": GRADES[r["grade"]]} for r in classes.to_dicts()],
        "prefill_extra_us": float(added.mean() or 0.0),  # type: ignore[arg-type]  # of numbers
        "prefill": prefill.group_by("part", maintain_order=True).agg(pl.col("us").mean(), pl.col("grade").first()).to_dicts(),
        "peak_resident_bytes": int(rows["resident_bytes"].max()),  # type: ignore[arg-type]
        "peak_away_bytes": int(rows["away_bytes"].max()),  # type: ignore[arg-type]
    }


def _staggered(rows: pl.DataFrame, by_class: pl.DataFrame, how: Kernels) -> Any:
    """step_us where the requests of a batch have their events at different steps: every step bears the mean of them. step_us itself is of a
    batch that has them all at once."""
    events = (*AT_EVENTS, "scores") if how.scores_at == "events" else AT_EVENTS
    spent = by_class.filter(pl.col("class").is_in(events)).group_by("request", "at").agg(event=pl.col("us").sum())
    both = rows.join(spent, on=["request", "at"], how="left").with_columns(pl.col("event").fill_null(0.0))
    return both.select(pl.col("step_us") - pl.col("event") + pl.col("event").mean().over("request")).to_series().to_numpy()


def _percentiles(us: Any) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(us, q)) for q in PERCENTILES}


def _measured(model: CostModel, by_class: pl.DataFrame) -> list[str]:
    """What profilers saw at the memory against the bytes that the samples' formulas say, of the classes that are priced here."""
    told = model.about.get("bytes_measured") or {}
    return [
        f"{cls}: the profiler saw {told[cls]['ratio']:.2f} times the modelled bytes at the memory (median of {told[cls]['n']} samples)"
        for cls in by_class["class"].unique(maintain_order=True)
        if cls in told
    ]


def refuse_uncalibrated(rows: pl.DataFrame, what: str) -> None:
    """--strict. Raises Uncalibrated that names the first class whose time no measurement encloses."""
    rest = rows.filter(pl.col("grade") != "calibrated")
    if rest.height:
        first = rest.row(0, named=True)
        raise Uncalibrated(
            f"--strict: {rest.height} of {rows.height} {what} are not calibrated, the first {first['class']} ({first['grade']}, priced by"
            f" {first['by']}): measure samples of {first['class']} that enclose these shapes, and fit again"
        )


def write(bill: Bill, folder: str | Path) -> None:
    """steps.parquet, parts.parquet, prefill.parquet and summary.json in a new folder, there when complete. Raises WrongUse when it exists."""
    folder = Path(folder)
    if folder.exists():
        raise WrongUse(f"{folder}: exists already, and a bill is never overwritten; choose another -o, or remove it")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ("steps", "parts", "prefill"):
        getattr(bill, name).write_parquet(partial / f"{name}.parquet", compression="zstd")
    write_whole(
        partial / "summary.json", json.dumps({"policies": bill.summary, "notes": bill.notes}, indent=1, ensure_ascii=False) + "\n"
    )
    partial.rename(folder)


def read_bill(folder: str | Path) -> Bill:
    """What `write` wrote. Raises BadProfile when the folder holds no bill."""
    folder = Path(folder)
    try:
        told = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        steps, parts, prefill = (pl.read_parquet(folder / f"{name}.parquet") for name in ("steps", "parts", "prefill"))
        bill = Bill(steps, parts, prefill, list(told["policies"]), [str(note) for note in told["notes"]])
        lines(bill)  # what it prints it can also be drawn from
        steps.select("policy", "step", "step_us")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, pl.exceptions.PolarsError) as e:
        what = f"{folder}: not a bill ({type(e).__name__})"
        raise BadProfile(f"{what}; kvsim cost predict RUN --model MODEL.json -o {folder} makes one") from None
    return bill


def lines(bill: Bill) -> list[str]:
    """What `kvsim cost predict` says: a block a policy."""
    said = []
    for s in bill.summary:
        floor = "≥ " if s["unknown"] or s["high_us"] is None else ""
        tpot = "  ".join(f"{q} {floor}{seconds(us)}" for q, us in s["tpot_us"].items())
        span = (
            f"{seconds(s['low_us'])} - {seconds(s['high_us'])}"
            if s["high_us"] is not None
            else f"from {seconds(s['low_us'])}, no upper end"
        )
        said += [
            s["policy"],
            f"  TPOT {tpot}  over {s['steps']} steps; a middle step {span}; {s['grade']}; {s['binding']} binds",
            *_fetched(s),
            *_apart(s),
            *(
                f"    {c['class']:15} {seconds(c['us']):>9}  {c['bytes'] or 0:14.0f} B  {c['grade']}, by {c['by']}"
                for c in s["classes"]
            ),
            f"  TTFT +{seconds(s['prefill_extra_us'])}"
            + "".join(f"; {p['part']} {seconds(p['us'] or 0.0)} ({p['grade']})" for p in s["prefill"]),
            f"  peak {s['peak_resident_bytes'] / 1e6:.1f} MB on the device"
            + (f", {s['peak_away_bytes'] / 1e6:.1f} MB on host and SSD" if s["peak_away_bytes"] else ""),
        ]
        if s["unknown"]:
            said.append(f"  no time is known for {', '.join(s['unknown'])}: these are floors")
    return said + bill.notes


def _apart(s: dict[str, Any]) -> list[str]:
    last = f"p{PERCENTILES[-1]}"
    if s["tpot_staggered_us"][last] == s["tpot_us"][last]:
        return []
    return [
        f"  requests that cut at once {last} {seconds(s['tpot_us'][last])}, at different steps {seconds(s['tpot_staggered_us'][last])}"
    ]


def _fetched(s: dict[str, Any]) -> list[str]:
    if s["overlap_us"] == s["tpot_us"]["p50"]:
        return []
    if s.get("overlap"):
        return [
            f"  fetches behind the layer before {seconds(s['tpot_us']['p50'])}, behind all else {seconds(s['overlap_us'])} (p50)"
        ]
    return [
        f"  fetches one after the other with the rest {seconds(s['tpot_us']['p50'])}, hidden behind it {seconds(s['overlap_us'])} (p50)"
    ]
