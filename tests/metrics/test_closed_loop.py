"""Counts, intervals and correlations of closed-loop studies, against values by hand and laws."""

from __future__ import annotations

import json
from itertools import product
from math import comb

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import tables
from kvsim.errors import BadTrace
from kvsim.metrics import sensitivity
from kvsim.metrics.closed_loop import (
    FULL,
    by_layers,
    correlations,
    family,
    finding,
    foretold,
    misleading,
    open_study,
    pairs,
    scores,
)
from kvsim.metrics.paired import auc, ranks, sign_test, spearman, wilson
from kvsim.policies.language import parse_policy, per_layer

H2O, QUEST, TOVA = (parse_policy(x).id for x in ("h2o(hold=share(0.5))", "quest(read=share(0.25))", "tova(hold=share(0.5))"))


# ------------------------------------------------------------------------------------------------ counts
def test_wilson_is_the_one_of_the_textbook():
    assert wilson(0.5, 20) == pytest.approx((0.299298, 0.700702), abs=1e-6)
    assert wilson(0.0, 10) == pytest.approx((0, 0.277533), abs=1e-6)
    assert wilson(1.0, 0) == (0.0, 1.0)


@given(st.integers(0, 40), st.integers(1, 40))
def test_wilson_holds_the_share_and_is_symmetric(k, n):
    share = min(k, n) / n
    low, high = wilson(share, n)
    assert 0 <= low <= share <= high <= 1
    assert wilson(1 - share, n) == pytest.approx((1 - high, 1 - low))
    assert wilson(share, 4 * n)[1] - wilson(share, 4 * n)[0] < high - low


@given(st.integers(0, 12), st.integers(0, 12))
def test_the_sign_test_counts_every_outcome(wins, losses):
    n = wins + losses
    outcomes = [abs(2 * k - n) >= abs(wins - losses) for k in range(n + 1)]
    naive = sum(comb(n, k) for k in range(n + 1) if outcomes[k]) / 2**n
    assert sign_test(wins, losses) == pytest.approx(naive)


def test_nine_to_none_is_rare_and_five_to_none_is_not():
    assert sign_test(9, 0) == pytest.approx(2 / 512)
    assert sign_test(5, 0) == pytest.approx(2 / 32)


@given(st.lists(st.integers(-5, 5), min_size=3, max_size=12), st.integers(0, 99))
def test_spearman_is_the_correlation_of_mean_ranks(x, seed):
    y = np.random.default_rng(seed).permutation(x).tolist()
    naive = [np.mean([sorted(x).index(v), len(x) - 1 - sorted(x, reverse=True).index(v)]) for v in x]
    assert ranks(x).tolist() == naive
    found = spearman(x, y)
    assert np.isnan(found) if len(set(x)) == 1 else found == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1])


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=12))
def test_auc_is_how_often_a_solved_case_is_above(cases):
    won, lost = ([x for x, solved in cases if solved is what] for what in (True, False))
    found = auc([x for x, _ in cases], [solved for _, solved in cases])
    naive = [(a > b) + (a == b) / 2 for a, b in product(won, lost)]
    assert found == pytest.approx(np.mean(naive)) if naive else np.isnan(found)


# ------------------------------------------------------------------------------------------------ a study by hand
def written(folder, solved, twice=(), forms=()):
    """solved {policy: one score a context, None where full attention fails}; twice: contexts of two prompts, the second solved by nobody."""
    prompts = [(c, c) for c in range(len(next(iter(solved.values()))))] + [(c, -1) for c in twice]
    answers, steps, layers = [], [], []
    for (request, (context, place)), policy in product(enumerate(prompts), [FULL, *solved]):
        mine = 0.0 if place < 0 else 1.0 if policy == FULL else solved[policy][place]
        full = 1.0 if place < 0 else float(all(x[place] is not None for x in solved.values()))
        rank = 0 if policy == FULL else 1 + [*solved].index(policy)
        score = full if policy == FULL else (mine or 0.0)
        answers.append(
            {
                "policy": policy, "request": request, "mode": "forced", "sample": 0, "task": "needle", "context": f"c{context}",
                "answer_tokens": 3, "score": score, "full_score": full, "nll": 1.0 + 0.01 * rank, "full_nll": 1.0, "text": "x",
            }
        )  # fmt: skip
        for step, role in enumerate((1, 1, 3)):
            at = {"policy": policy, "request": request, "step": step, "role": role}
            steps.append(
                at
                | {
                    "mode": "forced",
                    "sample": 0,
                    "pos": 9 + step,
                    "token": 1,
                    "said": 2,
                    "kl": 0.1 * rank * (1 + step),
                    "top1_agree": True,
                    "nll": 1.0,
                }
            )
            layers += [
                at | {"layer": layer, "held_tokens": 10.0, "read_tokens": 10.0 / (1 + rank), "injected_tokens": 0.0, "rel_l2": 0.2 * rank, "cosine": 1.0}
                | ({} if policy == FULL else {"open_mass_recall": 0.5 + 0.1 * rank, "open_rel_l2": 0.1 * rank, "open_evidence_read": 1.0, "open_evidence_dense": 2.0})
                for layer in (0, 1)
            ]  # fmt: skip
    for name, rows in (("answers", answers), ("steps", steps), ("layers", layers)):
        columns = {c: [r.get(c) for r in rows] for c in dict.fromkeys(k for r in rows for k in r)}
        schema = tables.LIVE_TABLES[name]
        tables.write(folder / f"{name}.parquet", [tables.table(name, columns, schema)])
    about = {"schema": tables.LIVE_SCHEMA, "layers": [0, 1], "policies": [{"id": p, "form": p} for p in [FULL, *solved]]}
    about["policies"] = [{"id": p.id, "form": p.form} for p in forms] or about["policies"]
    (folder / "live.json").write_text(json.dumps(about))
    return open_study(folder)


@pytest.fixture
def study(tmp_path):
    return written(tmp_path, {H2O: [0, 0, 0, 1, None], QUEST: [1, 1, 1, 0, None], TOVA: [0, 0, 0, 0, None]}, twice=(0,))


def test_a_context_counts_once_and_what_full_attention_fails_is_told_apart(study):
    found = {row["policy"]: row for row in scores(study).iter_rows(named=True)}
    assert {row["contexts"] for row in found.values()} == {5}
    assert {row["samples"] for row in found.values()} == {6}
    assert {row["full_fails"] for row in found.values()} == {1}
    assert found[QUEST]["score"] == pytest.approx((0.5 + 1 + 1 + 0) / 4)  # the first context has a second prompt, which it fails
    assert (found[QUEST]["low"], found[QUEST]["high"]) == pytest.approx(wilson(0.625, 4))
    assert found[TOVA]["score"] == 0
    assert found[FULL]["kl"] == 0
    assert found[H2O]["kl"] == pytest.approx(0.1 * (2 + 3) / 2)  # steps that say the answer: after the last of the question
    assert found[H2O]["kl_question"] == pytest.approx(0.1)


def test_evidence_is_found_where_half_of_its_mass_was_read(study):
    assert study.hits.select("first_hit", "hits", "all_read").unique().rows() == [(0, 2, 0)]
    assert set(finding(study)["number"]) == {"first_hit", "hits", "all_read"}
    assert finding(study)["auc"].unique().to_list() == [0.5]  # the same everywhere tells nothing


def test_pairs_are_compared_on_the_same_contexts(study):
    found = {(r["first"], r["second"]): r for r in pairs(study).iter_rows(named=True)}
    row = found[H2O, TOVA]
    assert (row["only_first"], row["only_second"], row["p_score"]) == (1, 0, 1.0)
    assert (row["kl_lower"], row["kl_higher"], row["contexts"]) == (5, 0, 5)
    assert row["p_kl"] == pytest.approx(sign_test(5, 0))
    assert FULL not in {x for pair in found for x in pair}


def test_what_the_open_loop_foretold_stands_beside_what_was_measured(study):
    found = {r["policy"]: r for r in foretold(study).iter_rows(named=True)}
    assert found[TOVA]["open_mass_recall"] == pytest.approx(0.8)
    assert found[TOVA]["open_evidence"] == pytest.approx(0.5)
    assert found[H2O]["family"] == "h2o"
    row = correlations(study).filter(pl.col("predictor") == "open_rel_l2", pl.col("outcome") == "kl").row(0, named=True)
    assert row["rho"] == pytest.approx(1)
    assert row["low"] is None  # too few contexts to say how sure
    recall = correlations(study).filter(pl.col("predictor") == "open_mass_recall", pl.col("outcome") == "kl").row(0, named=True)
    assert recall["rho"] == pytest.approx(-1)
    assert {r["first"] for r in misleading(study).iter_rows(named=True) if r["predictor"] == "open_mass_recall"} == {TOVA}
    assert found[TOVA]["read"] == pytest.approx(1 / 4)
    groups = by_layers(study).filter(pl.col("predictor") == "open_rel_l2")
    assert groups.select("layers", "rho").rows() == [("0", pytest.approx(1)), ("1", pytest.approx(1))]
    last = study.growth.filter(pl.col("policy") == TOVA).row(2, named=True)
    assert (last["closed"], last["open"]) == pytest.approx((0.6, 0.3))


def test_correlations_have_intervals_from_eight_contexts_on(tmp_path):
    found = correlations(written(tmp_path, {H2O: [0, 1] * 4, QUEST: [1] * 8, TOVA: [0] * 8}))
    row = found.filter(pl.col("predictor") == "open_rel_l2", pl.col("outcome") == "kl").row(0, named=True)
    assert (row["low"], row["high"]) == pytest.approx((1, 1))
    shares = found.filter(pl.col("outcome") == "score", pl.col("predictor") == "open_rel_l2").row(0, named=True)
    assert shares["low"] <= shares["rho"] <= shares["high"]


def test_layers_bear_what_stays_within_the_limit(tmp_path):
    forms = [per_layer({layer: QUEST}, default="full()", name=f"only_{layer}") for layer in (0, 1)]
    study = written(tmp_path, {p.id: [1] * 8 for p in forms}, forms=[parse_policy("full()"), *forms])
    found = sensitivity.sensitivity(study)
    assert found["layers"].to_list() == ["0", "1"]
    assert found["d_nll"].to_list() == pytest.approx([0.01, 0.02], abs=1e-6)
    assert found["reduction"].to_list() == pytest.approx([2, 3])
    best = sensitivity.borne(found, limit=0.0101)
    assert best["policy"].to_list() == [QUEST, None]
    assert len(list(sensitivity.lines(study))) == 4


def test_a_family_is_a_policy_without_its_numbers():
    assert family(QUEST) == "quest"
    assert family(parse_policy("h2o(hold=share(0.5)) >> kivi(bits=2) >> quest(read=pages(3))").id) == "h2o >> kivi >> quest"
    assert family(FULL) == "full"


def test_another_directory_is_no_study(tmp_path):
    with pytest.raises(BadTrace, match="not the directory of a kvsim live"):
        open_study(tmp_path)
    for other in ('{"schema": "kvsim.run/1"}', "[]", "3"):
        (tmp_path / "live.json").write_text(other)
        with pytest.raises(BadTrace, match=r"expected 'kvsim\.live/1'"):
            open_study(tmp_path)
