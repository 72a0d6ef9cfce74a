"""Traces in, four small frames out: how loose bounds are, how deep proofs go, what boxes buy, how sets age.

A cell is the decode steps of one role (question, forced answer, free answer) on the contexts of one task; roles are never averaged together.
Every frame has the columns cell and, per row, plain means over its contexts, steps and heads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

import kvsim
from analyses.cells import FEWEST, ROLES, chosen, spread
from kvsim.metrics.quality import ratio
from kvsim.metrics.spread import TELLING
from kvsim.metrics.traffic import side_bytes
from kvsim.policies.protocol import Chain
from kvsim.trace.open import Trace

PAGES = (4, 8, 16, 32, 64)
PAGE = 16  # of everything that does not compare page sizes
BUDGET = 128  # tokens per query head and step
MASS = 0.95  # of the attention mass: what the proof `mass(eps=0.05)` promises

QUEST, ORACLE, RANDOM = "quest", "oracle", "random pages"
MULTIBOX = {
    "2 boxes, in order": (2, "order"),
    "2 boxes, clustered": (2, "cluster"),
    "4 boxes, in order": (4, "order"),
    "4 boxes, clustered": (4, "cluster"),
}
KEPT = {  # policies that keep a set of pages: for how many steps (None: for good)
    "quest, every 16 steps": 16,
    "quest, every 64 steps": 64,
    "quest, once": None,
    "oracle, every 64 steps": 64,
    "oracle, once": None,
    "random pages, once": None,
}
DEPTHS = {
    "exact_pages_r1": "proof of the best token",
    "exact_pages_r10": "proof of the best 10 tokens",
    "exact_pages_r64": "proof of the best 64 tokens",
    "mass_pages_005": "proof of 95 % of the mass",
}
REACHED = {
    QUEST: "95 % of the mass, quest's order",
    ORACLE: "95 % of the mass, oracle's order",
    RANDOM: "95 % of the mass, random order",
}
SHARES = tuple(round(0.1 + 0.025 * i, 3) for i in range(25))  # of the bytes that full attention reads

WHERE = ("cell", "context")


@dataclass(frozen=True)
class Found:
    """slack: page size, layer · depth: what is wanted, layer · bytes: policy, share of full attention's bytes · age: policy, age of the
    set in doublings · cells: contexts, layers and steps that all of them rest on."""

    slack: pl.DataFrame
    depth: pl.DataFrame
    bytes: pl.DataFrame
    age: pl.DataFrame
    cells: pl.DataFrame


def policies() -> dict[str, Chain]:
    """Name -> policy. All read BUDGET tokens; curves give the other budgets."""
    full, read = kvsim.full(), kvsim.tokens(BUDGET)
    quest, oracle, random = kvsim.quest, kvsim.oracle, kvsim.random_read
    by = {QUEST: quest, ORACLE: oracle, RANDOM: random}
    return {
        **{size(n): full >> quest(read=read, page=n) for n in PAGES},
        **{name: full >> quest(read=read, page=PAGE, index=kvsim.boxes(n=n, by=by)) for name, (n, by) in MULTIBOX.items()},
        ORACLE: full >> oracle(read=read, page=PAGE),
        RANDOM: full >> random(read=read, page=PAGE),
        **{name: full >> by[name.split(",")[0]](read=read, page=PAGE, refresh=n or "never") for name, n in KEPT.items()},
    }


def size(page: int) -> str:
    """The name of quest at a page size; the usual one is just quest."""
    return QUEST if page == PAGE else f"{QUEST}, pages of {page}"


def measure(traces: Iterable[str | Path], workers: int | None = None) -> Found:
    """Replays every trace twice (once for all policies, once with counterfactuals of quest) -> the frames."""
    parts = [_replayed(kvsim.open_trace(path), workers) for path in traces]
    heads, ledger, curves, explain = (pl.concat(tables) for tables in zip(*parts, strict=True))
    cells = _cells(heads)
    heads, ledger, curves, explain = (
        t.join(cells.select("cell"), on="cell", how="semi") for t in (heads, ledger, curves, explain)
    )
    return Found(slack(heads), depth(explain, ledger, curves), by_bytes(curves, ledger), age(heads), cells)


def _replayed(trace: Trace, workers: int | None) -> list[pl.DataFrame]:
    """heads, ledger, curves, explain of one trace, with cell and context, policies by their names here."""
    layers = spread([x.id for x in trace.captured_layers])
    steps = sorted({s for r in trace.requests for s in chosen(r.roles[r.prompt :])})
    chains = policies()
    run = kvsim.replay(trace, list(chains.values()), layers=layers, steps=steps, workers=workers)
    deep = kvsim.replay(trace, chains[QUEST], layers=layers, steps=steps, workers=workers, explain=True)
    role = run.heads.select("request", "step", "role").unique()
    row = pl.DataFrame([{"layer": x["layer"], "row_bytes": x["row_bytes"]} for x in run.info["layers"]])
    row = row.cast({"layer": run.ledger.schema["layer"]})
    tables = {
        "heads": run.heads,
        "ledger": run.ledger.join(role, on=["request", "step"]).join(row, on="layer"),
        "curves": run.curves.filter(pl.col("role") >= 0),
        "explain": deep.explain.join(role, on=["request", "step"]),
    }
    names = {p["id"]: name for p, name in zip(run.info["policies"], chains, strict=True)}
    task = re.sub(r"-\d+$", "", trace.id)  # the study numbers its contexts
    where = {
        "cell": pl.format("{}: {}", pl.lit(task), pl.col("role").replace_strict(ROLES, return_dtype=pl.String)),
        "context": pl.format("{} {}", pl.lit(trace.id), "request"),
        "policy": pl.col("policy").cast(pl.String).replace_strict(names, return_dtype=pl.String),
    }
    return [t.with_columns(**where) for t in tables.values()]


def _cells(heads: pl.DataFrame) -> pl.DataFrame:
    """cell, contexts, layers, steps (of one context, the fewest): those with enough steps."""
    each = heads.group_by(WHERE).agg(pl.col("step").n_unique().alias("steps"), pl.col("layer").unique().sort().alias("layers"))
    found = each.group_by("cell").agg(pl.len().alias("contexts"), pl.col("layers").first(), pl.col("steps").min())
    return found.filter(pl.col("steps") >= FEWEST).sort("cell")


# ---------------------------------------------------------------------------------------------- the four questions
def slack(heads: pl.DataFrame) -> pl.DataFrame:
    """-> cell, layer, page, slack (bound minus best logit, mean over pages, in scaled logits), loosest (of a step's loosest page)."""
    of = {size(n): n for n in PAGES}
    return (
        heads.filter(pl.col("policy").is_in(list(of)))
        .group_by("cell", "layer", pl.col("policy").replace_strict(of, return_dtype=pl.Int64).alias("page"))
        .agg(_mean("slack_mean").alias("slack"), _mean("slack_max").alias("loosest"))
        .sort("cell", "layer", "page")
    )


def depth(explain: pl.DataFrame, ledger: pl.DataFrame, curves: pl.DataFrame) -> pl.DataFrame:
    """-> cell, layer, wanted, order, part (mean share of all pages that must be read), p95 (over heads and steps; null for what is only
    reached on average: the fewest pages with which a head's mean recall is MASS, no proof in hand)."""
    visible = ledger.filter(pl.col("policy") == QUEST).select(*WHERE, "layer", "step", "visible_tokens").unique()
    pages = pl.col("visible_tokens").truediv(PAGE).ceil().alias("pages_there")
    there = visible.select(*WHERE, "layer", "step", pages)
    proofs = (
        explain.join(there, on=[*WHERE, "layer", "step"])
        .select("cell", "layer", *((pl.col(n) / pl.col("pages_there")).alias(said) for n, said in DEPTHS.items()))
        .unpivot(index=["cell", "layer"], variable_name="wanted", value_name="part")
        .group_by("cell", "layer", "wanted")
        .agg(pl.col("part").mean(), pl.col("part").quantile(0.95, "linear").alias("p95"))
    )
    enough = pl.col("pages").filter(pl.col("mass_recall_mean") >= MASS).min()
    reached = (
        curves.filter(pl.col("policy").is_in(list(REACHED)))
        .group_by(*WHERE, "policy", "layer", "q_head")
        .agg(enough)
        .join(there.group_by(*WHERE, "layer").agg(pl.col("pages_there").mean()), on=[*WHERE, "layer"])
        .group_by("cell", "layer", pl.col("policy").replace_strict(REACHED, return_dtype=pl.String).alias("wanted"))
        .agg((pl.col("pages") / pl.col("pages_there")).fill_null(1).mean().alias("part"), pl.lit(None, pl.Float64).alias("p95"))
    )
    order = {said: i for i, said in enumerate([*DEPTHS.values(), *REACHED.values()])}
    return (
        pl.concat([proofs, reached])
        .with_columns(order=pl.col("wanted").replace_strict(order, return_dtype=pl.Int64))
        .select("cell", "layer", "wanted", "order", "part", "p95")
        .sort("cell", "layer", "order")
    )


def by_bytes(curves: pl.DataFrame, ledger: pl.DataFrame) -> pl.DataFrame:
    """-> cell, policy, share, mass_recall, rel_l2: the two measures where the rows of the physical pages that a kv head's query heads
    read together, and the index scanned to choose them, are this share of the bytes that full attention reads.

    Every (context, layer) is interpolated between its own budgets; no mean where one of them has no such budget."""
    unit = (*WHERE, "policy", "layer")
    whole = pl.col("visible_tokens").cast(pl.Int64) * pl.col("row_bytes")
    cost = ledger.group_by(unit).agg(
        side_bytes().cast(pl.Float64).mean().alias("side"), whole.cast(pl.Float64).mean().alias("whole")
    )
    named = (size(4), size(8), QUEST, *MULTIBOX, ORACLE, RANDOM)
    each = (
        curves.filter(pl.col("policy").is_in(named))
        .group_by(*unit, "pages")
        .agg(_mean("read_bytes_mean"), _mean("mass_recall_mean"), _whole_mean("rel_l2_mean"))
        .join(cost, on=unit)
        .with_columns(share=(pl.col("read_bytes_mean") + pl.col("side")) / pl.col("whole"))
        .sort(*unit, "pages")
    )
    rows = []
    for key, curve in each.group_by(unit, maintain_order=True):
        values = {m: _at(curve.drop_nulls(f"{m}_mean"), f"{m}_mean") for m in ("mass_recall", "rel_l2")}
        frame = pl.DataFrame({"share": SHARES, **values}).fill_nan(None)
        rows.append(frame.with_columns(**{n: pl.lit(v) for n, v in zip(unit, key, strict=True)}))
    rank = {name: i for i, name in enumerate(named)}
    return (
        pl.concat(rows)
        .group_by("cell", "policy", "share")
        .agg(_whole_mean("mass_recall"), _whole_mean("rel_l2"))
        .drop_nulls("mass_recall")
        .sort("cell", pl.col("policy").replace_strict(rank, return_dtype=pl.Int64), "share")
    )


def _at(curve: pl.DataFrame, column: str) -> list[float]:
    """A curve over its share of bytes -> its value at SHARES, NaN outside of it."""
    return np.interp(SHARES, curve["share"], curve[column].cast(pl.Float64), left=math.nan, right=math.nan).tolist()


def age(heads: pl.DataFrame) -> pl.DataFrame:
    """-> cell, policy, age (low end of a doubling, in steps since the set was ranked), ages (in words), mass_recall, rel_l2,
    evidence_recall (ratio of sums), read_tokens (per query head), the same as anew_…: quest ranked anew at the
    same steps, and of_steps, how many they are.

    Policies that rank at every step have no age; they stand where the first set would at that step."""
    every: Mapping[str, int | None] = {QUEST: None, **KEPT, ORACLE: None, RANDOM: None}
    steps = [pl.when(pl.col("policy") == name).then(pl.col("step") % n if n else pl.col("step")) for name, n in every.items()]
    told = heads.filter(pl.col("policy").is_in(list(every))).with_columns(steps=pl.coalesce(steps).cast(pl.Int64))
    means, at = ("mass_recall", "rel_l2", "read_tokens"), (*WHERE, "layer", "q_head", "step")
    anew = [pl.col(n).alias(f"anew_{n}") for n in (*means, "evidence_read")]
    fresh = heads.filter(pl.col("policy") == QUEST).select(*at, *anew)
    low = pl.when(pl.col("steps") == 0).then(0).otherwise(2 ** (pl.col("steps").log(2) + 1e-9).floor()).cast(pl.Int64)
    words = (
        pl.when(pl.col("age") < 2).then(pl.col("age").cast(pl.String)).otherwise(pl.format("{}–{}", "age", 2 * pl.col("age") - 1))
    )
    rank = {name: i for i, name in enumerate(every)}
    return (
        told.join(fresh, on=at)
        .group_by("cell", "policy", low.alias("age"))
        .agg(
            *(_mean(prefix + n) for prefix in ("", "anew_") for n in means),
            *(_evidence(prefix) for prefix in ("", "anew_")),
            pl.struct("context", "step").n_unique().alias("of_steps"),
        )
        .with_columns(ages=words)
        .sort("cell", pl.col("policy").replace_strict(rank, return_dtype=pl.Int64), "age")
    )


def _evidence(prefix: str) -> pl.Expr:
    """Evidence recall as a ratio of sums, null where the steps hardly look at the evidence."""
    recall = ratio(pl.col(f"{prefix}evidence_read"), pl.col("evidence_dense"))
    return pl.when(_mean("evidence_dense") >= TELLING).then(recall).alias(f"{prefix}evidence_recall")


def _mean(column: str) -> pl.Expr:
    return pl.col(column).cast(pl.Float64).mean()


def _whole_mean(column: str) -> pl.Expr:
    """Null where a row has none: a mean over fewer contexts, layers or heads would be one over others."""
    value = pl.col(column).cast(pl.Float64)
    return pl.when(value.is_not_null().all()).then(value.mean())
