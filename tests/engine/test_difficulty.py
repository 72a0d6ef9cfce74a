"""gap(file=...): features and fit against plain loops, depths against the file, what is refused."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
from scipy.special import expit

from kvsim import cli
from kvsim.codecs.calibration import load, save
from kvsim.engine.difficulty import coverage, fit
from kvsim.engine.stop import features, foretold
from kvsim.errors import WrongUse
from kvsim.kernels.dense import LOG2E
from kvsim.policies.allocate import for_layer
from kvsim.policies.language import canonical, parse
from kvsim.replay.calibrate import calibrate
from kvsim.replay.difficulty import foretell, levels_of
from kvsim.replay.lanes import source_of
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize
from kvsim.trace.open import open_trace
from tests.engine.test_stop import scenes, told

POLICY = "quest(read=gap(min=0, floor=pages(2), cap=pages(8)))"


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    where = tmp_path_factory.mktemp("t")
    return [synthesize(where / str(seed), seed=seed, prompt=180, steps=20, requests=2) for seed in (20, 21)]


@pytest.fixture(scope="module")
def file(traces, tmp_path_factory):
    return calibrate(traces[0], POLICY, tmp_path_factory.mktemp("f") / "c.npz", target=0.8)


def using(file, risk=None):
    return f'quest(read=gap(file="{file}"' + (f", risk={risk}))" if risk else "))")


# ------------------------------------------------------------------------------------------------ features and fit
def naive(s, level, age):
    """[gap, top1, entropy, age] and the pages, of one scene."""
    many = len(s.bound)
    k = min(max(level, s.forced + 1), many)
    fall = (s.bound[k - 1] - s.bound[k]) / LOG2E if k < many else 0.0
    w = [len(rows) * 2.0 ** (b - max(s.bent(s.bound))) for rows, b in zip(s.tokens, s.bent(s.bound), strict=True)]
    share = [x / sum(w) for x in w]
    return [min(max(fall, 0), 50), math.log(max(share)), -sum(x * math.log(x) for x in share if x), math.log(1 + age)], k


def test_features_are_their_definitions():
    for s, rng in scenes(7, 300):
        level, age = int(rng.integers(1, 10)), int(rng.integers(0, 99))
        x, k = features(told(s), np.array([level]), np.array([age]))
        want, pages = naive(s, level, age)
        assert k[0, 0, 0] == pages
        assert np.allclose(x[0, 0, 0], want, atol=1e-9)


def test_depth_is_the_first_level_that_is_safe_enough():
    for s, rng in scenes(8, 300):
        levels, w, risk = [1, 2, 4, 8], rng.normal(size=(4, 5)), float(rng.uniform(0.05, 0.9))
        got = int(foretold(told(s), np.array(levels), np.array([3]), w, risk).pages[0, 0])
        for level, mine in zip(levels, w, strict=True):
            x, k = naive(s, level, 3)
            if k == len(s.bound) or expit(np.dot(x, mine[:-1]) + mine[-1]) <= risk or level == levels[-1]:
                assert got == k
                break


def test_the_fit_finds_what_was_planted():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(20_000, 3)) * [1, 10, 0.1], np.array([1.0, -0.2, 5.0, -0.5])
    missed = rng.random(len(x)) < expit(x @ w[:-1] + w[-1])
    assert np.allclose(fit(x, missed), w, rtol=0.12, atol=0.02)


def test_the_fit_is_on_average_right():
    """The score equation of the intercept, but for its small ridge."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 4))
    missed = rng.random(400) < 0.3
    w = fit(x, missed)
    assert expit(x @ w[:-1] + w[-1]).mean() == pytest.approx(missed.mean(), abs=1e-3)


@pytest.mark.parametrize("missed", [False, True])
def test_one_outcome_alone_gives_finite_weights(missed):
    w = fit(np.column_stack([np.ones(50), np.arange(50.0)]), np.full(50, missed))
    assert np.isfinite(w).all()
    assert (expit(w[-1] + w[0]) > 0.5) == missed


# ------------------------------------------------------------------------------------------------ the file and the policy
def test_the_file_says_where_it_came_from(traces, file):
    about = load(str(file)).about
    assert about["traces"] == [{"id": traces[0].id, "sha256": traces[0].sha256}]
    assert about["contexts"] == [r.digest for r in traces[0].requests]
    assert len({*about["contexts"]}) == 2
    assert about["options"]["levels"] == [2, 3, 4, 6, 8] == levels_of(parse(POLICY).part("read").read)
    assert about["options"]["target"] == 0.8


def test_it_parses_back_and_fixed_rules_are_written_as_before(file):
    chain = parse(using(file, 0.25))
    assert parse(canonical(chain)) == chain
    assert f'gap(file="{file}@{load(str(file)).digest}", risk=0.25)' in canonical(chain)
    assert "read=gap(min=0, floor=pages(2), cap=pages(8))," in canonical(parse(POLICY))


def test_replayed_on_other_contexts(traces, file, tmp_path):
    run = replay(traces[1], [using(file, x) for x in (0.02, 0.2, 0.6)], tmp_path / "run", workers=1, strict=True)
    pages = [run.heads.filter(policy=p["id"])["read_pages"] for p in run.info["policies"]]
    assert pages[0].mean() > pages[1].mean() > pages[2].mean()
    assert all({*x} <= {2, 3, 4, 6, 8} for x in pages)


def test_foretold_and_observed_agree_about_others(traces, file):
    """Of one generator: what was learned from two contexts holds on average in two others."""
    found = foretell([traces[1]], using(file))
    n = found["n"].sum()
    assert n == 2 * 20 * 4 * 5
    assert (found["n"] * found["foretold"]).sum() / n == pytest.approx((found["n"] * found["observed"]).sum() / n, abs=0.15)
    assert (found["bin"] == (found["foretold"] * 10).cast(int)).mean() > 0.9


def test_the_same_context_is_refused_in_another_capture_too(traces, file, tmp_path, capsys):
    again = synthesize(tmp_path / "again", seed=20, prompt=180, steps=5, requests=2, dtype="float32")
    assert again.sha256 != traces[0].sha256
    for path in (traces[0].path, again.path):
        assert cli.main(["replay", str(path), "-p", using(file), "-o", str(tmp_path / "run")]) == 2
        assert (
            "gap: its calibration was made from the same context that is replayed, request 0 of trace" in capsys.readouterr().err
        )
    with pytest.raises(WrongUse, match="made from the same context"):
        foretell([again], using(file))


def test_other_requests_of_the_same_trace_may_be_replayed(traces, tmp_path):
    one = calibrate(traces[0], POLICY, tmp_path / "c.npz", requests=[0])
    replay(traces[0], using(one), tmp_path / "run", requests=[1], workers=1)
    with pytest.raises(WrongUse, match="request 0 of trace"):
        replay(traces[0], using(one), tmp_path / "no", workers=1)


def test_refused(traces, file, tmp_path):
    kvquant = tmp_path / "k.npz"
    save(kvquant, {"kind": "kvquant", "options": {}, "trace": {}}, {})
    for call, words in (
        (lambda: parse("quest(read=gap(min=1, floor=pages(2)))"), "gap: cap= is missing; give min=, floor= and cap=, or file="),
        (lambda: parse(f'quest(read=gap(file="{file}", min=1))'), "none beside file="),
        (lambda: parse(using(file, 1.5)), "gap(risk=1.5): expected a probability"),
        (
            lambda: parse(f'quest(page=8, read=gap(file="{file}"))'),
            "a file made for page=8 and this index, it was made for page=16",
        ),
        (lambda: parse(f'quest(index=digest(), read=gap(file="{file}"))'), "and this index, it was made for"),
        (lambda: parse(using(kvquant)), "was made for kvquant, and this is gap()"),
        (lambda: parse(using(tmp_path / "none")), "No such file"),
        (lambda: calibrate(traces, "kvquant()", tmp_path / "c"), "2 traces; expected one"),
        (lambda: calibrate(traces[0], "kvquant()", tmp_path / "c", target=0.5), "a target coverage is for gap() alone"),
        (lambda: calibrate(traces[0], POLICY, tmp_path / "c", target=2), "target coverage 2"),
        (lambda: calibrate(traces[0], POLICY.replace("pages", "tokens"), tmp_path / "c"), "its floor= and cap= are pages()"),
        (lambda: calibrate(traces[0], f"tova(hold=tokens(30)) >> {POLICY}", tmp_path / "c"), "a quest of its own"),
    ):
        with pytest.raises(WrongUse) as e:
            call()
        assert words in str(e.value)


def test_a_layer_that_the_file_does_not_cover_is_refused(file, tmp_path):
    with pytest.raises(WrongUse, match="nothing for layer 1, it covers the layers"):
        replay(synthesize(tmp_path / "t", layers=2, seed=5), using(file), tmp_path / "run")


def test_coverage_is_the_mass_recall_of_that_budget(traces, tmp_path):
    """The naive way: replay each level as a fixed budget."""
    levels = [2, 4, 8]
    run = replay(traces[1], [f"quest(read=pages({n}))" for n in levels], tmp_path / "run", requests=[0], workers=1)
    trace = open_trace(traces[1].path)
    layer = trace.captured_layers[0]
    source = source_of(trace.lane(trace.requests[0], layer))
    for head in range(layer.kv_heads):
        _, covered = coverage(source, for_layer(parse("quest(read=pages(1))"), layer).part("read"), head, levels)
        for i, policy in enumerate(run.info["policies"]):
            rows = run.heads.filter(policy=policy["id"]).filter(pl.col("q_head") // layer.group == head).sort("step", "q_head")
            assert np.allclose(covered[:, i], rows["mass_recall"], atol=1e-5)
