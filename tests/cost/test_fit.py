"""What the fit must recover, refuse and leave alone."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from kvsim.cost.fit import fit, half
from kvsim.cost.form import features, hot_share
from kvsim.cost.gate import marked
from kvsim.cost.hardware import named_gpu
from kvsim.cost.residual import grid
from kvsim.cost.robust import interval, solve
from kvsim.errors import WrongUse
from tests.cost.made import SHAPES, samples

A100 = named_gpu("a100-80")


def only(found):
    [one] = found.fits
    return one


# ------------------------------------------------------------------------------------------------ what is recovered
def test_exact_samples_give_the_exact_form():
    one = only(fit(samples(launch=12, gbps=1500), A100, draws=20))
    assert one.coefficients == pytest.approx({"launch": 12, "bytes": 1e3 / 1500})
    assert one.bandwidth_gbps() == pytest.approx(1500)
    assert one.held["mape"] < 1e-9
    assert one.ci95["launch"] == pytest.approx((12, 12))


@pytest.mark.parametrize(("term", "truth"), [("sequence", 0.7), ("longest", 9.0)])
def test_a_term_that_is_there_earns_its_place(term, truth):
    one = only(fit(samples(noise=0.02, repeats=2, **{term: truth}), A100, draws=0))
    assert set(one.coefficients) == {"launch", "bytes", term}
    assert one.coefficients[term] == pytest.approx(truth, rel=0.1)


def test_a_term_that_is_not_there_does_not():
    chosen = [set(only(fit(samples(noise=0.05, repeats=2, seed=s), A100, draws=0)).coefficients) for s in range(8)]
    assert chosen.count({"launch", "bytes"}) >= 7


def test_a_tenth_of_wild_timings_does_not_move_the_fit():
    one = only(fit(samples(noise=0.03, outliers=0.1, repeats=4, seed=3), A100, draws=0))
    assert one.coefficients["launch"] == pytest.approx(12, rel=0.05)
    assert one.bandwidth_gbps() == pytest.approx(1500, rel=0.05)


def test_intervals_hold_the_truth():
    """A small version of `tools/cost.py synthetic`; with 20 sets of 95 % intervals, fewer than 16 hits have a chance of 0.3 %."""
    held = []
    for seed in range(20):
        one = only(fit(samples(noise=0.05, outliers=0.1, repeats=2, seed=seed), A100, draws=40, seed=seed))
        low, high = one.ci95["bytes"]
        held.append(low <= 1e3 / 1500 <= high)
        assert high - low < 0.2 * 1e3 / 1500  # and they say something
    assert sum(held) >= 16


@given(st.integers(0, 10_000), st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_without_outliers_the_robust_fit_is_least_squares_of_logs(seed, terms):
    """Noise of a millionth: the fit is within it of relative non-negative least squares, and no coefficient is negative."""
    rng = np.random.default_rng(seed)
    x, truth = rng.uniform(0.1, 10, (20, terms)), rng.uniform(0, 3, terms)
    t = (x @ truth) * np.exp(rng.normal(0, 1e-6, 20))
    found = solve(x, t, np.zeros(terms), np.ones(20))
    assert (found >= 0).all()
    assert found == pytest.approx(nnls(x / t[:, None], np.ones(20))[0], rel=1e-3, abs=1e-4)


def test_no_byte_moves_faster_than_the_link():
    quick = samples(launch=12, gbps=4000)
    one = only(fit(quick, A100, draws=0))
    assert one.bandwidth_gbps() <= 1.02 * A100.bandwidth_gbps * (1 + 1e-9)
    assert only(fit(quick, None, draws=0)).bandwidth_gbps() == pytest.approx(4000)


def test_few_shapes_widen_an_interval():
    draws, fitted = np.random.default_rng(0).normal(1, 0.1, (500, 1)), np.array([1.0])
    few, many = (np.ptp(interval(draws, fitted, cells)[0]) for cells in (4, 1000))
    assert many == pytest.approx(2 * 1.96 * 0.1, rel=0.1)
    assert few / many == pytest.approx(3.182 / 1.96 * np.sqrt(4 / 3), rel=0.01)


def test_l2_is_a_region_of_its_own():
    assert hot_share(np.array([1.0, 10, 11.25, 12.5, 40]), 10).tolist() == pytest.approx([1, 1, 0.5, 0, 0])
    assert hot_share(np.array([1.0]), None).tolist() == [0]
    rows = samples(cache="unknown")
    layers = rows["bytes"].to_numpy() / 1e6
    assert features(rows.with_columns(cache=pl.lit("cold")), ("bytes", "l2"), A100.l2_bytes)[:, 1].sum() == 0
    warm = features(rows, ("bytes", "l2"), A100.l2_bytes)
    assert warm.sum(1) == pytest.approx(layers)  # every byte in one region
    t = 5 + warm @ np.array([1e3 / 1500, 1e3 / 4000])
    one = only(fit(rows.with_columns(t_us=pl.Series(t)), A100, draws=0))
    assert one.coefficients["l2"] == pytest.approx(1e3 / 4000)


def steps(rest, gbps, contexts=(8192, 16384, 32768)):
    """Whole steps of a model of 32 layers, ms as papers print them; a rest of the step for each weight format."""
    rows = [
        samples(launch=t, gbps=gbps, shapes=[(1, c) for c in contexts], variant=v).with_columns(pl.lit("step").alias("class"))
        for v, t in rest.items()
    ]
    return pl.concat(rows)


def test_steps_share_a_bandwidth_and_have_a_rest_each():
    found = fit(steps({"fp16": 900.0, "awq": 400.0}, 60), A100, draws=20).fits
    assert [f.key["variant"] for f in found] == ["awq", "fp16"]
    assert [f.coefficients["launch"] for f in found] == pytest.approx([400, 900])
    assert [f.bandwidth_gbps() for f in found] == pytest.approx([60, 60])
    assert [f.rows["shapes"] for f in found] == [3, 3]
    assert found[0].held["mape"] < 1e-9
    noise = pl.Series([1.01, 0.99, 1, 1, 1.01, 0.99])
    noisy = fit(steps({"fp16": 900.0, "awq": 400.0}, 60).with_columns(pl.col("t_us") * noise), A100, draws=100).fits
    for one, rest in zip(noisy, (400, 900), strict=True):  # draws without a variant, or of one shape, are drawn again
        low, high = one.ci95["launch"]
        assert low < rest < high
        assert high - low < 0.75 * rest
    one = fit(steps({"fp16": 900.0}, 60), A100, draws=0)
    assert "fewer than 4 shapes" in one.refused[0]["why"]


# ------------------------------------------------------------------------------------------------ what is between shapes
def test_the_grid_interpolates_and_knows_its_hull():
    places = np.array([[0, 0], [0, 4], [4, 0], [2, 2.0]])
    found = grid(places, np.array([0, 0, 0, 1.0]))
    missed, inside = found.at(np.array([[2, 2], [1, 1], [0, 0], [4, 4], [0, 4.0]]))
    assert missed.tolist() == pytest.approx([1, 0.5, 0, 0, 0])
    assert inside.tolist() == [True, True, True, False, True]


def test_a_measured_place_is_inside_and_gets_its_own_residual_back():
    rng = np.random.default_rng(1)
    places, missed = np.log2(rng.integers(1, 3000, (30, 2))), rng.normal(size=30)
    back, inside = grid(places, missed).at(places)
    assert inside.all()
    assert back == pytest.approx(missed)


def test_what_the_form_misses_is_in_the_prediction():
    """A step that no term has: 22 % slower from 16 requests on."""
    rows = samples().with_columns(t_us=pl.when(pl.col("batch") >= 16).then(pl.col("t_us") * 1.22).otherwise("t_us"))
    one = only(fit(rows, A100, draws=0))
    told, inside = one.times(rows)
    assert inside.all()
    assert told == pytest.approx(rows["t_us"].to_numpy())


def test_a_grid_of_one_batch_is_an_interval():
    found = grid(np.array([[3.0, 0], [3, 2], [3, 4], [3, 4]]), np.array([0, 1, 2, 4.0]))
    missed, inside = found.at(np.array([[3, 1], [3, 4], [3, 5], [2, 1.0]]))
    assert missed.tolist() == [0.5, 3, 0, 0]  # repeats by their median
    assert inside.tolist() == [True, True, False, False]


def test_a_grid_on_a_slanted_line_does_not_fall_over():
    found = grid(np.array([[0, 0], [1, 1], [2, 2.0]]), np.zeros(3))
    assert found.at(np.array([[1, 1.0]]))[1].tolist() == [True]


# ------------------------------------------------------------------------------------------------ what is left out
def test_rows_that_cannot_be_true_are_marked():
    rows = samples(gbps=1500)
    times = pl.when(pl.col("bytes") == pl.col("bytes").max()).then(1.0).otherwise("t_us")
    odd = marked(rows.with_columns(t_us=times), A100)
    assert odd["status"].value_counts().sort("status").rows() == [("impossible", 1), ("ok", len(SHAPES) - 1)]
    hot = marked(rows.with_columns(t_us=pl.when(pl.col("bytes") == pl.col("bytes").min()).then(0.1).otherwise("t_us")), A100)
    assert hot.filter(pl.col("status") != "ok")["status"].to_list() == ["l2_hot"]
    twice = pl.concat([rows, rows.with_columns(pl.col("t_us") * 1.3)])
    assert marked(twice, A100)["status"].unique().to_list() == ["conflicting"]
    assert marked(pl.concat([rows, rows.with_columns(pl.col("t_us") * 1.2)]), A100)["status"].unique().to_list() == ["ok"]
    assert marked(odd, A100).equals(odd)  # marking again changes nothing


def test_marked_rows_do_not_enter_a_fit_and_are_counted():
    rows = samples()
    wild = rows.with_columns(pl.col("t_us") * 9, status=pl.lit("impossible"), cache=pl.lit("cold"))
    hot = rows.with_columns(pl.col("t_us") / 9, cache=pl.lit("hot"))
    found = fit(pl.concat([rows, wild.head(5), hot]), A100, draws=0)
    assert only(found).coefficients == pytest.approx(only(fit(rows, A100, draws=0)).coefficients)
    assert {k: n for k, n in found.left_out.items() if n} == {"impossible": 5, "hot cache": len(SHAPES)}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (samples(shapes=SHAPES[:3]), "fewer than 4 shapes; measure 8 to 12"),
        (samples(shapes=[(1, 4096), (2, 4096), (1, 8192), (4, 4096), (2, 8192)]), "less than 8 times apart in bytes"),
        (samples().with_columns(bytes=pl.lit(None, pl.Int64)), "no bytes; import with --geometry"),
    ],
)
def test_what_cannot_be_identified_is_not_fitted(rows, why):
    found = fit(rows, A100)
    assert found.fits == []
    assert why in found.refused[0]["why"]
    assert found.left_out[next(k for k in found.left_out if k.startswith("no fit"))] == rows.height


def test_a_bandwidth_above_the_link_is_refused():
    fetch = samples(launch=2, gbps=90).with_columns(pl.lit("host_fetch").alias("class"))
    with pytest.raises(
        WrongUse, match=r"host_fetch made: up to \d+ GB/s where the link of NVIDIA A100 SXM4 80GB moves 32 GB/s at most"
    ):
        fit(marked(fetch, A100), A100)


def test_halves_split_shapes_and_not_rows():
    rows = pl.concat([samples(), samples(seed=1, noise=0.1, kv_heads=4)])
    chosen = half(rows)
    assert 0.3 < chosen.mean() < 0.7
    assert chosen.head(len(SHAPES)).to_list() == chosen.tail(len(SHAPES)).to_list()
