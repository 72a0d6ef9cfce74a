"""What a closed-loop study says: scores with intervals, policies in pairs, and whether the open loop foretold it.

The unit of evidence is a context. Several prompts from one context share its text and its prefill, so they count as one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.errors import BadTrace
from kvsim.metrics.interval import FEWEST, picks
from kvsim.metrics.paired import sign_test, spearman, wilson
from kvsim.places import from_json
from kvsim.tables import LIVE_SCHEMA

FULL = "full() >> everything()"
ANSWER_ROLES = (2, 3)
PREDICTORS = {  # of the open loop -> in words; a larger value should mean a better policy
    "open_mass_recall": "mass recall, open loop",
    "open_evidence": "evidence mass read, open loop",
    "open_rel_l2": "output error, open loop",
    "rel_l2": "output error, closed loop",
}
BETTER = {"open_mass_recall": 1, "open_evidence": 1, "open_rel_l2": -1, "rel_l2": -1, "kl": -1, "score": 1}
OUTCOMES = ("score", "kl")
APART = {"open_mass_recall": 0.03, "open_evidence": 0.05, "open_rel_l2": 0.03}  # what the open loop calls a difference
WORSE = 0.25  # and of the contexts that many fewer solved contradict it


@dataclass(frozen=True)
class Study:
    """The directory of a `kvsim live`."""

    path: Path
    about: dict[str, Any]

    def table(self, name: str) -> pl.LazyFrame:
        """answers, steps or layers; steps and layers with `answering`: what follows the step's token is the answer, or text that is fed."""
        frame = pl.scan_parquet(self.path / f"{name}.parquet").with_columns(pl.col("policy").cast(pl.String))
        if name == "answers":
            return frame
        of = ["policy", "request", *(("mode", "sample") if name == "steps" else ("layer",))]
        following = pl.col("role").shift(-1).over(of, order_by="step").fill_null(pl.col("role"))
        return frame.with_columns(answering=following.is_in(ANSWER_ROLES))

    @property
    def contexts(self) -> pl.LazyFrame:
        """request, context, task."""
        return self.table("answers").select("request", "context", "task").unique()


def open_study(path: str | Path) -> Study:
    """Raises BadTrace: not a study."""
    file = Path(path) / "live.json"
    try:
        about = from_json(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise BadTrace(f"{path}: not the directory of a kvsim live ({e})") from None
    if about.get("schema") != LIVE_SCHEMA:
        raise BadTrace(f"{file}: schema {about.get('schema')!r}, expected {LIVE_SCHEMA!r}")
    return Study(Path(path), about)


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
    answers = study.table("answers").collect()
    fine = pl.col("full_score") == 1
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
    apart = _kl_by_context(study).group_by("policy", "task").agg(pl.col("kl", "kl_question", "top1_agree").mean())
    out = told.join(shares.drop("n"), on=by, how="left").join(apart, on=["policy", "task"], how="left")
    return out.sort("task", "mode", "policy")


def _kl_by_context(study: Study) -> pl.DataFrame:
    """policy, task, context, kl, kl_question, top1_agree of the forced run."""
    answering = pl.col("answering")
    return (
        study.table("steps")
        .filter(pl.col("mode") == "forced")
        .join(study.contexts, on="request")
        .group_by("policy", "task", "context")
        .agg(
            kl=pl.col("kl").filter(answering).cast(pl.Float64).mean(),
            kl_question=pl.col("kl").filter(~answering).cast(pl.Float64).mean(),
            top1_agree=pl.col("top1_agree").filter(answering).mean(),
        )
        .collect()
    )


def pairs(study: Study, mode: str = "forced") -> pl.DataFrame:
    """-> first, second, task, contexts, only_first, only_second, p_score, kl_lower, kl_higher, p_kl: every two policies on the same contexts.

    only_first: contexts of which `first` solves more (of what full attention solves); kl_lower: contexts in which its KL is lower; p: two-sided
    exact sign tests. Not corrected for how many pairs there are."""
    score = (
        study.table("answers")
        .filter(pl.col("mode") == mode, pl.col("full_score") == 1, pl.col("policy") != FULL)
        .group_by("policy", "task", "context")
        .agg(pl.col("score").mean())
        .collect()
    )
    apart = _kl_by_context(study).filter(pl.col("policy") != FULL)
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
def predictors(study: Study, *by: str) -> pl.DataFrame:
    """-> policy, task, context (and `by`, such as layer): of the answering steps, sums to make ratios of: NAME_0 over NAME_1 for each of
    PREDICTORS; layers that every policy reads whole count, too."""
    sides = {
        "open_mass_recall": (pl.col("open_mass_recall"), pl.col("open_mass_recall").is_not_null()),
        "open_evidence": (pl.col("open_evidence_read"), pl.col("open_evidence_dense")),
        "open_rel_l2": (pl.col("open_rel_l2"), pl.col("open_rel_l2").is_not_null()),
        "rel_l2": (pl.col("rel_l2"), pl.col("rel_l2").is_not_null()),
    }
    return (
        study.table("layers")
        .filter(pl.col("answering"), pl.col("policy") != FULL)
        .join(study.contexts, on="request")
        .group_by("policy", "task", "context", *by)
        .agg(x.cast(pl.Float64).sum().alias(f"{name}_{i}") for name, pair in sides.items() for i, x in enumerate(pair))
        .sort("policy", "task", "context", *by)
        .collect()
    )


def foretold(study: Study) -> pl.DataFrame:
    """-> policy, family, task, every predictor, kl, score: what the open loop said beside what the closed loop measured; sorted."""
    ratios = [
        (pl.col(f"{n}_0").sum() / pl.when(pl.col(f"{n}_1").sum() > 0).then(pl.col(f"{n}_1").sum())).alias(n) for n in PREDICTORS
    ]
    open_loop = predictors(study).group_by("policy", "task").agg(ratios)
    closed = scores(study).filter(pl.col("mode") == "forced").select("policy", "task", "kl", "score", "low", "high")
    names = pl.col("policy").map_elements(family, return_dtype=pl.String).alias("family")
    return open_loop.join(closed, on=["policy", "task"]).with_columns(names).sort("task", "policy")


def correlations(study: Study, seed: int = 0) -> pl.DataFrame:
    """-> task, predictor, outcome, policies, rho, low, high, least, without: Spearman's rank correlation over policies, turned so that + means
    the predictor is right.

    low, high: 95 % percentile bootstrap over contexts, null below 8 of them; least: the smallest rho when one family of policies is left out,
    `without` that family. Policies of one family are not independent, so these describe this set of policies."""
    rows = []
    for task in study.contexts.collect()["task"].unique().sort():
        names, families, sides = _sides(study, task)
        if not names:
            continue
        n = next(iter(sides.values()))[0].shape[1]
        drawn = picks(n, seed) if n >= FEWEST else None
        for predictor in PREDICTORS:
            for outcome in OUTCOMES:
                pair = [BETTER[x] * _ratio(sides[x], np.ones((1, n)))[0] for x in (predictor, outcome)]
                rho = _rho(*pair)
                if np.isnan(rho):
                    continue
                low = high = None
                if drawn is not None:
                    again = [BETTER[x] * _ratio(sides[x], drawn) for x in (predictor, outcome)]
                    many = np.array([_rho(a, b) for a, b in zip(*again, strict=True)])
                    low, high = np.nanpercentile(many, [2.5, 97.5]).tolist()
                left = {f: _rho(*(x[families != f] for x in pair)) for f in sorted(set(families.tolist()))}
                left = {f: x for f, x in left.items() if not np.isnan(x)}
                worst = min(left, key=lambda f: left[f], default=None)
                rows.append((task, predictor, outcome, len(names), rho, low, high, None if worst is None else left[worst], worst))
    schema = {
        "task": pl.String, "predictor": pl.String, "outcome": pl.String, "policies": pl.Int64, "rho": pl.Float64, "low": pl.Float64,
        "high": pl.Float64, "least": pl.Float64, "without": pl.String,
    }  # fmt: skip
    return pl.DataFrame(rows, schema, orient="row")


def by_layer(study: Study, outcome: str = "kl") -> pl.DataFrame:
    """-> task, predictor, layer, rho: how well one layer's open-loop numbers alone order the policies by the outcome."""
    frame, rows = predictors(study, "layer"), []
    for task in study.contexts.collect()["task"].unique().sort():
        names, _, sides = _sides(study, task)
        if not names:
            continue
        wanted = BETTER[outcome] * _ratio(sides[outcome], np.ones((1, next(iter(sides.values()))[0].shape[1])))[0]
        for layer in frame["layer"].unique().sort():
            mine = frame.filter(pl.col("task") == task, pl.col("layer") == layer)
            sums = mine.group_by("policy").agg(pl.col(f"{n}_{i}").sum() for n in PREDICTORS for i in (0, 1)).sort("policy")
            for n in ("open_mass_recall", "open_evidence", "open_rel_l2"):
                below = sums[f"{n}_1"].to_numpy()
                value = np.divide(sums[f"{n}_0"].to_numpy(), below, out=np.full(len(below), np.nan), where=below > 0)
                rows.append((task, n, layer, _rho(BETTER[n] * value, wanted)))
    schema = {"task": pl.String, "predictor": pl.String, "layer": pl.Int64, "rho": pl.Float64}
    return pl.DataFrame(rows, schema, orient="row").with_columns(pl.col("rho").fill_nan(None))


def _sides(
    study: Study, task: str
) -> tuple[list[str], NDArray[np.str_], dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]]:
    """(policies, their families, {measure: (above, below) f64[policies, contexts]}); a measure is the ratio of their sums over contexts."""
    frame = predictors(study).filter(pl.col("task") == task)
    names = frame["policy"].unique().sort().to_list()
    contexts = frame["context"].unique().sort().to_list()
    grid = pl.DataFrame({"policy": names}).join(pl.DataFrame({"context": contexts}), how="cross")
    wide = grid.join(frame, on=["policy", "context"], how="left")
    apart = grid.join(_kl_by_context(study).filter(pl.col("task") == task), on=["policy", "context"], how="left")
    answers = study.table("answers").filter(pl.col("mode") == "forced", pl.col("task") == task, pl.col("full_score") == 1)
    solved = grid.join(
        answers.group_by("policy", "context").agg(pl.col("score").mean()).collect(), on=["policy", "context"], how="left"
    )

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


def growth(study: Study) -> pl.DataFrame:
    """-> policy, step, closed, open: output error of the forced run, means over layers and prompts: how what one step loses is carried on."""
    return (
        study.table("layers")
        .filter(pl.col("policy") != FULL)
        .group_by("policy", "step")
        .agg(closed=pl.col("rel_l2").cast(pl.Float64).mean(), open=pl.col("open_rel_l2").cast(pl.Float64).mean())
        .sort("policy", "step")
        .collect()
    )
