"""kvsim advise: what it never does worse than, who needs nothing, what it says of contexts that it has not seen."""

from __future__ import annotations

import json
from dataclasses import replace as changed

import numpy as np
import polars as pl
import pytest

from kvsim import cli
from kvsim.advise.advice import advise, trial
from kvsim.advise.menus import Target, menus, target
from kvsim.errors import WrongUse
from kvsim.metrics.interval import FEWEST
from kvsim.metrics.run import open_run
from kvsim.policies.language import parse_policy
from kvsim.replay.run import replay
from kvsim.synth import generate
from kvsim.trace.bits import narrow, widen

EASY = 1  # the layer whose queries look at themselves alone
POLICIES = ["quest(read=pages(1))", "oracle(read=pages(1))", "oracle(read=pages(2))", "oracle(read=pages(4))"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Ten contexts of two layers; in one of them every query looks for its own position, and for nothing else."""
    plant = generate._plant

    def planted(rng, r, layer, dtype, *rest):
        x = plant(rng, r, layer, dtype, *rest)
        own = 60 * np.repeat(widen(x.k), layer.group, 0).swapaxes(0, 1)
        own[..., layer.key_dim // 4 * 2 :] = 0
        return changed(x, q=narrow(own, dtype)) if layer.id == EASY else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "_plant", planted)
        return generate.synthesize(tmp_path_factory.mktemp("t") / "t", requests=10, layers=2, prompt=200, steps=4, seed=2)


@pytest.fixture(scope="module")
def run(trace, tmp_path_factory):
    out = tmp_path_factory.mktemp("r") / "run"
    replay(trace, POLICIES, out, workers=1)
    return open_run(out)


@pytest.fixture(scope="module", params=["mass=0.9", "far=0.8", "evidence=0.9", "rel_l2=0.3"])
def of(request, run):
    goal = target(request.param)
    return goal, menus(run, goal)[1]


# ------------------------------------------------------------------------------------------------ the advice
def test_it_reaches_the_target_and_never_costs_more_than_one_budget_for_all(of):
    goal, contexts = of
    advice = advise(contexts, goal)
    assert advice.value <= goal.x + 1e-9 if goal.measure == "rel_l2" else advice.value >= goal.x - 1e-9
    every = [
        sum(m.cost[:, k].sum() for m in contexts) / len(contexts)
        for k in range(contexts[0].pages + 1)
        if sum(m.loss[:, k].sum() for m in contexts) <= goal.loss * sum(m.weight for m in contexts)
    ]
    assert advice.bound <= advice.bytes <= min(every)


def test_the_layer_that_needs_nothing_gets_one_page(run):
    advice = advise(menus(run, target("mass=0.9"))[1], target("mass=0.9"))
    assert {advice.pages[EASY, head] for head in (0, 1)} == {1}
    assert max(advice.pages[0, head] or 99 for head in (0, 1)) > 1


def test_everything_is_read_where_scan_and_gather_cost_more(run):
    """At 13 of 14 pages the summaries cost more than the page that is left out."""
    (menu, *_) = menus(run, target("mass=0.9"))[1]
    dear = menu.cost[:, :-1] >= menu.cost[:, -1:]
    assert dear.any()
    advice = advise([menu], Target("mass", 1 - 1e-6))
    chosen = [advice.pages[u] for u in menu.units]
    assert None in chosen
    assert not any(b is not None and dear[i, b - 1] for i, b in enumerate(chosen))


def test_menus_say_what_a_replay_of_the_budget_says(trace, run, tmp_path):
    """The naive way: replay the advice, and average its rows."""
    goal = target("mass=0.9")
    chain, contexts = menus(run, goal)
    advice = advise(contexts, goal)
    again = replay(trace, advice.policy(chain, "p"), tmp_path / "again", workers=1)
    heads, ledger = (pl.from_arrow(x) if not isinstance(x, pl.DataFrame) else x for x in (again.heads, again.ledger))
    assert heads["mass_recall"].mean() == pytest.approx(advice.value, abs=1e-4)
    used = ledger.select((pl.col("read_bytes") + pl.col("index_bytes")).sum()).item() / ledger.n_unique(["request", "step"])
    assert used == pytest.approx(advice.bytes, rel=1e-9)


def test_far_and_evidence_are_ratios_of_sums(run):
    for measure, top, below in (
        ("far", pl.col("far_mass") * pl.col("far_recall"), "far_mass"),
        ("evidence", pl.col("evidence_read"), "evidence_dense"),
    ):
        goal = target(f"{measure}=0.9")
        contexts = menus(run, goal)[1]
        ids = run.heads.filter(
            pl.col("policy").str.contains("quest"), pl.col(f"{measure}_recall").is_not_null() if measure == "far" else True
        )
        want = ids.select(top.cast(pl.Float64).sum() / pl.col(below).cast(pl.Float64).sum()).collect().item()
        got = goal.value(sum(m.loss[:, 0].sum() for m in contexts) / sum(m.weight for m in contexts))
        assert got == pytest.approx(want, abs=1e-4)


# ------------------------------------------------------------------------------------------------ on other contexts
def test_a_trial_counts_bytes_at_equal_value(of):
    goal, contexts = of
    tried = trial(advise(contexts[:2], goal), contexts[2:])
    assert tried.contexts == len(contexts) - 2 == FEWEST
    assert tried.saving == pytest.approx(1 - tried.bytes / tried.same_bytes)
    assert tried.interval is not None
    assert tried.interval[0] <= tried.saving <= tried.interval[1]
    assert tried.oracle is not None
    assert 0 < tried.oracle < tried.bytes < tried.dense


def test_one_budget_for_all_saves_nothing_against_itself(run):
    goal = target("mass=0.9")
    contexts = menus(run, goal)[1]
    advice = advise(contexts[:2], goal)
    flat = changed(advice, pages=dict.fromkeys(advice.pages, 3))
    assert trial(flat, contexts[2:]).saving == pytest.approx(0, abs=1e-12)


def test_too_few_contexts_have_no_interval(run):
    contexts = menus(run, target("mass=0.9"))[1]
    assert trial(advise(contexts[:3], target("mass=0.9")), contexts[3:]).interval is None


def test_it_is_not_tried_where_it_was_made(run):
    contexts = menus(run, target("mass=0.9"))[1]
    with pytest.raises(WrongUse, match="the advice was made from this context"):
        trial(advise(contexts[:3], target("mass=0.9")), contexts[2:])


# ------------------------------------------------------------------------------------------------ the command
def test_the_file_is_a_policy_that_replay_takes(run, trace, tmp_path, capsys):
    out = tmp_path / "p.toml"
    assert cli.main(["advise", str(run.path), "-t", "mass=0.9", "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "no interval: fewer than 8 contexts" in said
    assert said.endswith(f"{out}\n")
    assert f"made from {run.about['trace']['id']}@" in out.read_text()
    policy = parse_policy(f"@{out}")
    assert policy.id.startswith("p@")
    assert (
        cli.main(["replay", str(trace.path), "-p", f"@{out}", "-o", str(tmp_path / "r"), "--requests", "1", "--workers", "1"])
        == 0
    )


def test_it_replays_a_trace_by_itself(trace, tmp_path, capsys):
    out = tmp_path / "p.toml"
    assert cli.main(["advise", str(trace.path), "-t", "rel_l2=0.2", "-o", str(out), "--workers", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trial"]["contexts"] == 5
    assert {(u["layer"], u["kv_head"]) for u in told["pages"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-t", "mass=0.9", "--verify"], "--verify runs the advice in a live model"),
        (["-t", "mass=2"], "expected a number between 0 and 1, for example mass=0.95"),
        (["-t", "rel_l2"], "for example rel_l2=0.1"),
        (["-t", "mas=0.9"], "did you mean 'mass'?"),
    ],
)
def test_refused(run, tmp_path, capsys, words, said):
    assert cli.main(["advise", str(run.path), *words, "-o", str(tmp_path / "p.toml")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "p.toml").exists()


def test_a_run_without_curves_is_refused(trace, tmp_path, capsys):
    replay(trace, "tova(hold=tokens(20))", tmp_path / "run", requests=[0], workers=1)
    assert cli.main(["advise", str(tmp_path / "run"), "-t", "mass=0.9", "-o", str(tmp_path / "p.toml")]) == 2
    assert "curves of 0 policies that rank pages by a summary" in capsys.readouterr().err
