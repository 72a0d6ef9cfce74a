"""One budget over all layers: shared before the replay, the same for any workers, found again when it goes on."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from kvsim.engine import model_scope
from kvsim.engine.model_scope import Preview
from kvsim.errors import WrongUse
from kvsim.policies.language import parse, per_layer
from kvsim.replay import share
from kvsim.replay.asked import resolve
from kvsim.replay.needs import check_needs
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize
from tests.engine.lanes import lane, run
from tests.replay.test_run import same_files

MODEL = 'defensivekv(hold=tokens(20), window=8, scope="model")'
COMPAT = 'defensivekv(hold=tokens(20), window=8, scope="model", compat=True)'


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("traces") / "deep", requests=2, layers=3, prompt=60, steps=4)


@pytest.fixture(scope="module")
def alone(deep, tmp_path_factory):
    return replay(deep, [MODEL, COMPAT, "tova(hold=tokens(9))"], tmp_path_factory.mktemp("runs") / "run", workers=1, strict=True)


def cuts(run, policy):
    """{(request, layer): held per kv head after the first step, its own token apart}"""
    rows = run.ledger.filter((pl.col("policy").cast(str) == policy) & (pl.col("step") == 0)).sort("request", "layer", "kv_head")
    return {at: (of["held_tokens"] - 1).to_list() for at, of in rows.group_by(["request", "layer"], maintain_order=True)}


def names(run):
    return {i: p["id"] for i, p in enumerate(run.info["policies"])}


def test_the_best_rows_of_all_layers_share_the_sum_of_the_budgets():
    """8 rows, 3 of them safe: .9 .8 .8 .7 and, of two .6, the lower layer's."""
    a = Preview(4, np.array([1, 1]), [np.array([0.9, 0.1]), np.array([0.6, 0.8])])
    b = Preview(4, np.array([1, 0]), [np.array([0.8, 0.7]), np.array([0.6])])
    assert [x.tolist() for x in model_scope.share([a, b])] == [[2, 3], [3, 0]]
    assert [x.tolist() for x in model_scope.share([a, Preview(1, np.array([9]), [np.array([5.0])])])] == [[1, 1], [9]]


def test_layers_together_hold_what_they_would_hold_alone(deep, alone):
    for policy in (names(alone)[0], names(alone)[1]):
        held = cuts(alone, policy)
        for request in (0, 1):
            mine = [n for (r, _), heads in held.items() if r == request for n in heads]
            assert sum(mine) == 3 * 2 * 20
            assert len(set(mine)) > 1
            assert "compat=True" in policy or min(mine) >= 8


def test_what_is_kept_are_the_best_of_the_model(deep, alone):
    """The layer scope gives a layer its own budget; with the limits it was handed it would keep the same rows as the model scope."""
    found = cuts(alone, names(alone)[0])
    asked = resolve(deep, MODEL)
    [(_, keep, layers)] = share.sharing(asked)
    for request in asked.requests:
        previews = [model_scope.preview(share.source_of(deep.lane(request, x)), keep) for x in layers]
        least = min(np.sort(s)[::-1][n - safe - 1] for x, p in zip(layers, previews, strict=True)
                    for s, n, safe in zip(p.scores, found[request.id, x.id], p.safe, strict=True) if n > safe)  # fmt: skip
        most = max(np.sort(s)[::-1][n - safe] for x, p in zip(layers, previews, strict=True)
                   for s, n, safe in zip(p.scores, found[request.id, x.id], p.safe, strict=True) if n - safe < len(s))  # fmt: skip
        assert least >= most


def test_two_workers_write_the_same_bytes(deep, alone, tmp_path):
    two = replay(deep, [MODEL, COMPAT, "tova(hold=tokens(9))"], tmp_path / "two", workers=2)
    assert same_files(alone.path, two.path)


def test_a_replay_that_goes_on_does_not_rank_again(deep, alone, tmp_path, monkeypatch):
    policies, out = [MODEL, COMPAT, "tova(hold=tokens(9))"], tmp_path / "out"

    def interrupted(task_done, tasks):
        if task_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(deep, policies, out, workers=1, progress=interrupted)
    assert len(json.loads((tmp_path / "out.partial" / "limits.json").read_text())["limits"]) == 2 * 2 * 3
    monkeypatch.setattr(model_scope, "preview", None)
    assert same_files(alone.path, replay(deep, policies, out, workers=1).path)


def test_layers_of_another_policy_stand_apart(deep, alone):
    some = replay(deep, per_layer({1: "full()"}, default=MODEL), workers=1)
    held = cuts(some, names(some)[0])
    assert held[0, 1] == [60, 60]
    assert sum(held[0, 0] + held[0, 2]) == 2 * 2 * 20


def test_a_missing_layer_is_refused(deep, tmp_path):
    with pytest.raises(
        WrongUse, match=r"defensivekv needs all_layers: layers 1 are not captured or not asked for; capture with --layers all"
    ):
        check_needs(deep, resolve(deep, MODEL, layers=[0, 2]))
    bare = synthesize(tmp_path / "bare", prompt=60, without=("wo_norm",))
    for policy in ("criticalkv(hold=tokens(40), window=8)", "defensivekv(hold=tokens(40), window=8)"):
        with pytest.raises(WrongUse, match=r"kv needs wo_norm: the values table is not in the trace; capture with --wo-norm"):
            check_needs(bare, resolve(bare, policy))


def test_one_layer_of_many_cannot_know_its_limits():
    with pytest.raises(WrongUse, match="defensivekv shares one budget over all layers, and layer 3 was given alone: use replay"):
        run(lane(among=(3, 5)), parse('defensivekv(hold=tokens(20), window=5, scope="model")'))
