"""What a closed-loop study says: scores with intervals, policies in pairs, and whether the open loop foretold it.

The unit of evidence is a context. Several prompts from one context share its text and its prefill, so they count as one."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.metrics.interval import FEWEST, picks
from kvsim.metrics.live_study import FULL, PREDICTORS, Study, condense, open_study
from kvsim.metrics.paired import auc, sign_test, spearman, wilson

__all__ = [
    "FULL", "PREDICTORS", "Study", "by_layers", "condense", "correlations", "family", "finding", "foretold", "misleading", "open_study",
    "pairs", "scores",
]  # fmt: skip
BETTER = {"open_mass_recall": 1, "open_evidence": 1, "open_rel_l2": -1, "rel_l2": -1, "kl": -1, "score": 1}
Sides = dict[
    str, tuple[NDArray[np.float64], NDArray[np.float64]]
]  # a measure is the ratio of two sums over contexts, [policies, contexts]
OUTCOMES = ("score", "kl")
APART = {"open_mass_recall": 0.03, "open_evidence": 0.05, "open_rel_l2": 0.03}  # what the open loop calls a difference
FOUND = {"first_hit": -1, "hits": 1, "all_read": 1}  # + where more should be better
WORSE = 0.25  # and of the contexts that many fewer solved contradict it


def family(policy: str) -> str:
    """What a policy is without its numbers: h2o >> quest."""
    names = re.findall(r"(?:^|>> )(\w+)\(", policy)
    return " >> ".join(n for n in names if n not in ("full", "everything")) or "full"


# ------------------------------------------------------------------------------------------------ scores
def scores(study: Study) -> pl.DataFrame:
    """-> policy, task, mode, samples, contexts, solved, score, low, high (Wilson, contexts as the cases), full_fails, solved_there, kl,
    kl_question, top1_agree, nll, full_nll; sorted.

    score: mean over contexts of the prompts that full attention solves, null where a task has none; full_fails: answers that full attention
    itself does not give, of which the policy gave `solved_there`. kl: at the steps that say the answer (of plain text: all), kl_question: before
    them; both of the forced run, means over contexts."""
    answers, fine = study.answers, pl.col("full_score") == 1
    by = ["policy", "task", "mode"]
    told = answers.group_by(by).agg(
        samples=pl.len(),
        contexts=pl.col("context").n_unique(),
        solved=(fine & (pl.col("score") == 1)).sum(),
        full_fails=(pl.col("full_score") < 1).sum(),
        solved_there=((pl.col("full_score") < 1) & (pl.col("score") == 1)).sum(),
        nll=pl.col("nll").mean(),
        full_nll=pl.col("full_nll").mean(),
    )
    each = answers.filter(fine).group_by(*by, "context").agg(pl.col("score").mean())
    shares = each.group_by(by).agg(score=pl.col("score").mean(), n=pl.len())
    ends = [wilson(row["score"], row["n"]) for row in shares.iter_rows(named=True)]
    shares = shares.with_columns(
        low=pl.Series([x for x, _ in ends], dtype=pl.Float64), high=pl.Series([x for _, x in ends], dtype=pl.Float64)
    )
    apart = study.apart.group_by("policy", "task").agg(pl.col("kl", "kl_question", "top1_agree").mean())
    out = told.join(shares.drop("n"), on=by, how="left").join(apart, on=["policy", "task"], how="left")
    return out.sort("task", "mode", "policy")


def pairs(study: Study, mode: str = "forced") -> pl.DataFrame:
    """-> first, second, task, contexts, only_first, only_second, p_score, kl_lower, kl_higher, p_kl: every two policies on the same contexts.

    only_first: contexts of which `first` solves more (of what full attention solves); kl_lower: contexts in which its KL is lower; p: two-sided
    exact sign tests. Not corrected for how many pairs there are."""
    score = (
        study.answers.filter(pl.col("mode") == mode, pl.col("full_score") == 1, pl.col("policy") != FULL)
        .group_by("policy", "task", "context")
        .agg(pl.col("score").mean())
    )
    apart = study.apart.filter(pl.col("policy") != FULL)
    rows = []
    for task in apart["task"].unique(maintain_order=True).sort():
        wide = {name: _wide(frame.filter(pl.col("task") == task), name) for name, frame in (("score", score), ("kl", apart))}
        policies = [p for p in apart["policy"].unique().sort() if p in wide["kl"]]
        for i, a in enumerate(policies):
            for b in policies[i + 1 :]:
                more, fewer = _wins(wide["score"], a, b)
                higher, lower = _wins(wide["kl"], a, b)
                n = len(wide["kl"][a])
                rows.append((a, b, task, n, more, fewer, sign_test(more, fewer), lower, higher, sign_test(lower, higher)))
    names = ("first", "second", "task", "contexts", "only_first", "only_second", "p_score", "kl_lower", "kl_higher", "p_kl")
    return pl.DataFrame(rows, list(names), orient="row")


def _wide(frame: pl.DataFrame, name: str) -> dict[str, NDArray[np.float64]]:
    """By policy, the values of all contexts in one order; a context that a policy lacks is NaN."""
    contexts = frame["context"].unique().sort()
    out = {}
    for (policy,), mine in frame.group_by("policy"):
        out[str(policy)] = (
            pl.DataFrame({"context": contexts}).join(mine, on="context", how="left")[name].cast(pl.Float64).to_numpy()
        )
    return out


def _wins(by: dict[str, NDArray[np.float64]], a: str, b: str) -> tuple[int, int]:
    """In how many contexts a is above b, and below."""
    if a not in by or b not in by:
        return 0, 0
    return int((by[a] > by[b]).sum()), int((by[a] < by[b]).sum())


# ------------------------------------------------------------------------------------------------ open against closed
def foretold(study: Study) -> pl.DataFrame:
    """-> policy, family, task, read, every predictor, kl, score, low, high: what the open loop said beside what the closed loop measured, and
    the share of tokens that were read; sorted."""
    ratios = [
        (pl.col(f"{n}_0").sum() / pl.when(pl.col(f"{n}_1").sum() > 0).then(pl.col(f"{n}_1").sum())).alias(n)
        for n in ("read", *PREDICTORS)
    ]
    open_loop = study.predicted.group_by("policy", "task").agg(ratios)
    closed = scores(study).filter(pl.col("mode") == "forced").select("policy", "task", "kl", "score", "low", "high")
    names = pl.col("policy").map_elements(family, return_dtype=pl.String).alias("family")
    return open_loop.join(closed, on=["policy", "task"]).with_columns(names).sort("task", "policy")


def correlations(study: Study, seed: int = 0) -> pl.DataFrame:
    """-> task, predictor, outcome, policies, rho, low, high, least, without: Spearman's rank correlation over policies, turned so that + means
    the predictor is right.

    low, high: 95 % percentile bootstrap over contexts, null below 8 of them; least: the smallest rho when one family of policies is left out,
    `without` that family. Policies of one family are not independent, so these describe this set of policies."""
    rows = []
    for task in study.predicted["task"].unique().sort():
        names, families, sides = _sides(study, task)
        if not names:
            continue
        n = next(iter(sides.values()))[0].shape[1]
        drawn = picks(n, seed) if n >= FEWEST else None
        for predictor in PREDICTORS:
            for outcome in OUTCOMES:
                rho, low, high = _agreement(sides, predictor, outcome, drawn)
                if np.isnan(rho):
                    continue
                pair = [BETTER[x] * _ratio(sides[x], np.ones((1, n)))[0] for x in (predictor, outcome)]
                left = {f: _rho(*(x[families != f] for x in pair)) for f in sorted(set(families.tolist()))}
                left = {f: x for f, x in left.items() if not np.isnan(x)}
                worst = min(left, key=lambda f: left[f], default=None)
                rows.append((task, predictor, outcome, len(names), rho, low, high, None if worst is None else left[worst], worst))
    schema = {
        "task": pl.String, "predictor": pl.String, "outcome": pl.String, "policies": pl.Int64, "rho": pl.Float64, "low": pl.Float64,
        "high": pl.Float64, "least": pl.Float64, "without": pl.String,
    }  # fmt: skip
    return pl.DataFrame(rows, schema, orient="row")


def by_layers(study: Study, outcome: str = "kl", seed: int = 0) -> pl.DataFrame:
    """-> task, predictor, first_layer, layers, rho, low, high: `correlations` of one group of layers' open-loop numbers alone."""
    rows = []
    groups = study.predicted.select("first_layer", "last_layer").unique().sort("first_layer")
    for task in study.predicted["task"].unique().sort():
        for first, last in groups.iter_rows():
            _, _, sides = _sides(study, task, first)
            n = next(iter(sides.values()))[0].shape[1]
            drawn = picks(n, seed) if n >= FEWEST else None
            for name in ("open_mass_recall", "open_evidence", "open_rel_l2"):
                rho, low, high = _agreement(sides, name, outcome, drawn)
                rows.append((task, name, first, f"{first}-{last}" if last > first else f"{first}", rho, low, high))
    schema = {"task": pl.String, "predictor": pl.String, "first_layer": pl.Int64, "layers": pl.String} | dict.fromkeys(
        ("rho", "low", "high"), pl.Float64
    )
    return pl.DataFrame(rows, schema, orient="row").with_columns(pl.col("rho", "low", "high").fill_nan(None))


def _agreement(
    sides: Sides, predictor: str, outcome: str, drawn: NDArray[Any] | None
) -> tuple[float, float | None, float | None]:
    """(rho, low, high) over policies, + where the predictor is right; drawn [draws, contexts]: how often each (None: no interval)."""
    n = sides[predictor][0].shape[1]
    pair = [BETTER[x] * _ratio(sides[x], np.ones((1, n)))[0] for x in (predictor, outcome)]
    rho = _rho(*pair)
    if drawn is None or np.isnan(rho):
        return rho, None, None
    again = [BETTER[x] * _ratio(sides[x], drawn) for x in (predictor, outcome)]
    many = np.array([_rho(a, b) for a, b in zip(*again, strict=True)])
    low, high = np.nanpercentile(many, [2.5, 97.5]).tolist()
    return rho, low, high


def _sides(study: Study, task: str, first_layer: int | None = None) -> tuple[list[str], NDArray[np.str_], Sides]:
    """(policies, their families, measures); first_layer: of one group of layers alone."""
    frame = study.predicted.filter(pl.col("task") == task)
    if first_layer is not None:
        frame = frame.filter(pl.col("first_layer") == first_layer)
    frame = frame.group_by("policy", "context").agg(pl.col(f"{n}_{i}").sum() for n in PREDICTORS for i in (0, 1))
    names = frame["policy"].unique().sort().to_list()
    contexts = frame["context"].unique().sort().to_list()
    grid = pl.DataFrame({"policy": names}).join(pl.DataFrame({"context": contexts}), how="cross")
    wide = grid.join(frame, on=["policy", "context"], how="left")
    apart = grid.join(study.apart.filter(pl.col("task") == task), on=["policy", "context"], how="left")
    answers = study.answers.filter(pl.col("mode") == "forced", pl.col("task") == task, pl.col("full_score") == 1)
    solved = grid.join(answers.group_by("policy", "context").agg(pl.col("score").mean()), on=["policy", "context"], how="left")

    def matrix(x: pl.Series) -> NDArray[np.float64]:
        return x.cast(pl.Float64).fill_null(0).to_numpy().reshape(len(names), len(contexts))

    sides = {n: (matrix(wide[f"{n}_0"]), matrix(wide[f"{n}_1"])) for n in PREDICTORS}
    for name, column in (("kl", apart["kl"]), ("score", solved["score"])):
        sides[name] = matrix(column), matrix(column.is_not_null())
    return names, np.array([family(p) for p in names]), sides


def _ratio(pair: tuple[NDArray[np.float64], NDArray[np.float64]], drawn: NDArray[Any]) -> NDArray[np.float64]:
    """f64[draws, policies]: the ratio of sums over contexts, each as often as drawn."""
    above, below = (drawn @ x.T for x in pair)
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _rho(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    told = ~(np.isnan(x) | np.isnan(y))
    return spearman(x[told], y[told]) if told.sum() > 2 else float("nan")


def misleading(study: Study) -> pl.DataFrame:
    """-> task, predictor, first, second, open_first, open_second, closed_first, closed_second: pairs where the open loop calls `first` clearly
    better (APART), and it solves of the contexts at least a quarter fewer (WORSE)."""
    rows = []
    for a, b in permutations(foretold(study).iter_rows(named=True), 2):
        if a["task"] != b["task"] or a["score"] is None or b["score"] is None or b["score"] - a["score"] < WORSE:
            continue
        for name, least in APART.items():
            if a[name] is not None and b[name] is not None and BETTER[name] * (a[name] - b[name]) >= least:
                rows.append((a["task"], name, a["policy"], b["policy"], a[name], b[name], a["score"], b["score"]))
    names = ("task", "predictor", "first", "second", "open_first", "open_second", "closed_first", "closed_second")
    schema = dict.fromkeys(names[:4], pl.String) | dict.fromkeys(names[4:], pl.Float64)
    return pl.DataFrame(rows, schema, orient="row").sort("task", "predictor", "first", "second")


def finding(study: Study) -> pl.DataFrame:
    """-> task, number, cases, auc, policies, within: does finding the evidence tell what is solved? Of each of FOUND (study.hits) the area under
    the curve against solved over all (policy, context), and the mean of the areas of policies that solve some contexts and not others."""
    answers = study.answers.filter(pl.col("mode") == "forced", pl.col("full_score") == 1)
    solved = answers.group_by("policy", "task", "context").agg(solved=pl.col("score").mean() == 1)
    frame = study.hits.join(solved, on=["policy", "task", "context"]).sort("policy", "task", "context")
    rows = []
    for (task,), mine in frame.group_by("task", maintain_order=True):
        for name, sign in FOUND.items():
            each = [auc(sign * x[name].to_numpy(), x["solved"]) for _, x in mine.group_by("policy", maintain_order=True)]
            told = [x for x in each if not np.isnan(x)]
            within = float(np.mean(told)) if told else None
            rows.append((task, name, mine.height, auc(sign * mine[name].to_numpy(), mine["solved"]), len(told), within))
    schema = {
        "task": pl.String,
        "number": pl.String,
        "cases": pl.Int64,
        "auc": pl.Float64,
        "policies": pl.Int64,
        "within": pl.Float64,
    }
    return pl.DataFrame(rows, schema, orient="row").with_columns(pl.col("auc").fill_nan(None)).sort("task", "number")
