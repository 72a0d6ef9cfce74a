"""Diagnostics of keep policies as anyone can take them from their tables."""

from __future__ import annotations

import polars as pl
import pytest

from kvsim.metrics.compaction import resident_pages
from kvsim.metrics.diagnostics import diagnostics
from kvsim.metrics.keeping import error_metrics, lag_histogram, lag_metrics, recurrence_metrics, tier_metrics, tiers_over_steps

UNIT = {"policy": "p", "request": 0, "layer": 2, "role": -1}


def frame(rows: int, **columns):
    return pl.DataFrame({**{k: [v] * rows for k, v in UNIT.items()}, **columns}).lazy()


# The card's example of D10: needed {3,7}, {2,7}, {2,9}; evicted {2}, {2,5}, {2,5}; 2 left at the cut after prefill, 5 after step 0.
LAGS = frame(
    3,
    kv_head=[0, 0, 0],
    q_head=[0, 0, 0],
    step=[0, 1, 2],
    mass=[[0.2], [0.0, 0.35], [0.1, 0.3]],
    needed=[2, 2, 2],
    again=[[], [2], [2]],
    again_lag=[[], [2], [3]],
    evicted_tokens=[1, 2, 2],
)


def values(found):
    return dict(found.select("metric", "value").collect().rows())


def test_the_example_of_needed_again():
    found = values(lag_metrics(LAGS))
    assert found["needed_again_pair"] == pytest.approx(2 / 6)
    assert found["needed_again_token"] == pytest.approx(1 / 2)
    assert found["needed_again_step"] == pytest.approx(2 / 3)
    assert found["hit_rate"] == pytest.approx(1 / 3)


def test_missed_mass_by_horizon_is_over_the_steps_that_reach_so_far_back():
    found = values(lag_metrics(LAGS))
    assert found["fmm_lag_1"] == pytest.approx((0.2 + 0.35 + 0.4) / 3)
    assert found["fmm_lag_2"] == pytest.approx((0.35 + 0.3) / 2)
    assert "fmm_lag_4" not in found


def test_the_histogram_adds_up():
    found = lag_histogram(LAGS)
    assert found["lag"].to_list() == [1, 2]
    assert found["mass"].to_list() == pytest.approx([0.3 / 3, 0.65 / 3])
    assert found["again"].to_list() == pytest.approx([0, 2 / 3])


def test_tokens_of_two_kv_heads_are_different_tokens():
    both = pl.concat([LAGS, LAGS.with_columns(kv_head=pl.lit(1, pl.Int64), again=pl.lit([], pl.List(pl.Int64)))])
    assert values(lag_metrics(both))["needed_again_token"] == pytest.approx(1 / 4)


def test_nothing_evicted_has_no_share_of_tokens():
    nothing = frame(
        1, kv_head=[0], q_head=[0], step=[0], mass=[[0.0]], needed=[2], again=[[]], again_lag=[[]], evicted_tokens=[0]
    )
    typed = nothing.with_columns(pl.col("again", "again_lag").cast(pl.List(pl.Int64)))
    found = values(lag_metrics(typed))
    assert found["hit_rate"] == 1
    assert "needed_again_token" not in found


RECURRENCE = frame(
    4,
    kv_head=[0, 1, 0, 0],
    set=["deployed", "deployed", "deployed", "oracle"],
    dormancy=[1, 1, 4, 1],
    events=[5] * 4,
    returns=[2, 0, 0, 1],
    pairs=[4, 4, 0, 2],
    spells=[3, 1, 0, 1],
    pairs_alive=[3, 1, 0, 2],
    spells_alive=[2, 0, 0, 1],
    churn_full=[0.5, 0.1, 0.5, 0.25],
    churn_held=[0.2, 0.4, 0.2, 0.0],
    score_cosine=[0.9, 0.8, 0.9, None],
)


def test_recurrence_is_a_ratio_of_sums_over_kv_heads():
    found = values(recurrence_metrics(RECURRENCE))
    assert found == pytest.approx(
        {
            "lir_event": 2 / 8,
            "lir_spell": 2 / 4,
            "lir_event_alive": 2 / 4,
            "lir_spell_alive": 1.0,
            "lir_event_oracle": 0.5,
            "lir_spell_oracle": 1.0,
            "churn_held": 0.3,
            "churn_oracle": 0.25,
            "score_cosine": 0.85,
        }
    )


CLASSES = ("sinks", "recent", "full", "coded", "host")
TIERS = frame(
    2,
    q_head=[0, 1],
    step=[0, 0],
    **{f"{part}_{c}": [0.1, 0.2] for part in ("held", "read", "own") for c in CLASSES},
    **{f"without_{c}": [None, 0.5] for c in CLASSES},
)
HEADS = frame(
    2, q_head=[0, 1], step=[0, 0], mass_evicted=[0.5, 0.1], rel_l2=[0.5, 0.7],
    oracle_rel_l2=[0.1, 0.1], oracle_held_rel_l2=[0.3, 0.2], oracle_coded_rel_l2=[0.35, 0.15],
)  # fmt: skip


def test_a_lost_tier_is_added_to_what_is_evicted():
    found = values(tier_metrics(TIERS, HEADS))
    assert found["fmm_tier_disabled"] == pytest.approx(0.3 + 0.15 + 0.15)
    assert found["without_coded"] == 0.5
    steps = tiers_over_steps(TIERS, HEADS, 1)
    assert dict(steps.select("part", "mass").rows())["gone for good"] == pytest.approx(0.3)
    assert steps.height == 6


def test_levels_of_error_sum_to_the_policys():
    found = values(error_metrics(HEADS))
    assert found == pytest.approx({"error_budget": 0.1, "error_evict": 0.15, "error_code": 0.0, "error_index": 0.35})
    assert sum(found.values()) == pytest.approx(0.6)
    exact = values(error_metrics(HEADS.with_columns(oracle_coded_rel_l2=pl.lit(None, pl.Float64))))
    assert exact["error_code"] == 0
    assert sum(exact.values()) == pytest.approx(0.6)


def test_they_stand_in_diagnostics():
    heads = HEADS.with_columns(
        mass_evicted_prefill=0.0, read_churn=0.0, oracle_recall=1.0, oracle_held_recall=1.0, mass_recall=1.0, learned_sink_mass=0.0,
        dense=False, read_pages=None, held_pages=None, rounds=1, certified=None, role=pl.lit(3, pl.Int8),
    )  # fmt: skip
    tables = {name: x.drop("role") for name, x in (("lags", LAGS), ("recurrence", RECURRENCE), ("by_tier", TIERS))}
    frame = diagnostics(heads, **tables)
    found = frame.filter(pl.col("role") == -1)["metric"].to_list()
    answer = frame.filter(pl.col("role") == 3)["metric"].to_list()
    assert {x for x in found if x not in answer} == {
        x for x in found if x.startswith(("lir", "churn_held", "churn_oracle", "score"))
    }
    assert {"fmm_lag_1", "lir_event", "held_coded", "error_index", "fmm_running"} <= set(found)
    assert len(found) == len(set(found))


def test_pages_that_stay_and_pages_after_compaction():
    """Two heads of 8 prompt tokens, pages of 4. Head 0 keeps 0 and 7, and 4 on the host, head 1 keeps 4 to 7; step 0 adds token 8, step 1 token 9 and drops 7."""

    def runs(*ranges):
        return [{"start": a, "stop": b, "tier": t, "level": None} for a, b, t in ranges]

    tiers = frame(
        4, kv_head=[0, 1, 0, 1], step=[-1, -1, 1, 1],
        runs=[runs((0, 1, 2), (1, 4, 0), (4, 5, 8), (5, 7, 0), (7, 8, 1)), runs((0, 4, 0), (4, 8, 2)), runs((7, 8, 0)), runs((7, 8, 0))],
    )  # fmt: skip
    ledger = frame(
        4, kv_head=[0, 1, 0, 1], step=[0, 0, 1, 1], pos=[8, 8, 9, 9], visible_tokens=[9, 9, 10, 10], held_tokens=[3, 5, 3, 5]
    )
    found = resident_pages(ledger, tiers, page=4)
    assert found.select("head", "layer_pages", "head_compact", "layer_compact").rows() == [(3 + 2, 6, 1 + 2, 4), (2 + 2, 6, 3, 4)]
