"""Models with a learned indexer: what it says of every token is in the trace, and what it chooses is what the model attends to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from kvsim.capture.check import summary, verify
from kvsim.capture.recorder import Keep
from kvsim.capture.run import capture, capture_all
from kvsim.capture.session import How
from kvsim.errors import WrongUse
from kvsim.live.needs import attended
from kvsim.replay.run import replay
from kvsim.trace.bits import widen
from kvsim.trace.check import check_trace
from kvsim.trace.open import Lane, open_trace, own_reads, with_known_reads
from kvsim.truth.dense import dense
from tests.capture import tiny
from tests.trace.test_moments import rewrite, with_column

PROMPT, STEPS, MOST = tiny.tokens(40), 9, tiny.INDEX["index_topk"]
DIM = tiny.INDEX["index_head_dim"]


def captured(tmp_path: Path, model: Any, **how: Any) -> list[Lane]:
    capture(model, PROMPT, tmp_path / "t", steps=STEPS, k_pre=False, **how)
    trace = open_trace(tmp_path / "t")
    return [trace.lane(trace.requests[0], layer) for layer in trace.captured_layers]


def scores(indexer: Any, hidden: torch.Tensor, resid: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, T], of a deepseek_v32 indexer, from its weights: the first numbers of a query and a key turn, in halves, the rest pass by."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        n = cos.shape[-1]
        a, b = x[..., : n // 2], x[..., n // 2 : n]
        shape = (len(x), *(1,) * (x.ndim - 2), n)
        c, s = (y.reshape(shape)[..., : n // 2] for y in (cos, sin))
        return torch.cat([a * c - b * s, b * c + a * s, x[..., n:]], -1)

    q = turned(indexer.wq_b(resid).view(len(resid), indexer.n_heads, indexer.head_dim))
    k = turned(indexer.k_norm(indexer.wk(hidden)))
    w = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    return torch.einsum("sh,sht->st", w, torch.relu(q @ k.T / math.sqrt(indexer.head_dim)))


def told(model: Any, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(scores, the tokens it chose) of every layer's indexer, over a whole text at once."""
    found = []

    def see(indexer: Any, args: Any, options: Any, best: torch.Tensor) -> None:
        hidden, resid, (cos, sin) = args[:3]
        with torch.no_grad():
            found.append((scores(indexer, hidden[0], resid[0], cos[0], sin[0]), best[0]))

    hooks = [x.self_attn.indexer.register_forward_hook(see, with_kwargs=True) for x in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


# ------------------------------------------------------------------------------------------------ what is captured
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_scores_and_choices_are_those_of_the_model(tmp_path, attention, chunk):
    model = tiny.model("deepseek_v32", attention=attention)
    lanes = captured(tmp_path, model, chunk=chunk)
    tokens = PROMPT + tiny.generated(model, PROMPT, STEPS)
    for lane, (score, best) in zip(lanes, told(model, tokens), strict=True):
        x, reads = lane.indexer, own_reads(lane)
        assert x is not None
        assert reads is not None
        assert (x.score_fn, x.k.shape, x.q.shape) == (
            "relu_weighted",
            (len(tokens), DIM),
            (STEPS, tiny.INDEX["index_n_heads"], DIM),
        )
        for i, t in enumerate(lane.t):
            mine = widen(x.w[i]) @ np.maximum(widen(x.q[i]) @ widen(x.k).T, 0)
            np.testing.assert_allclose(mine[: t + 1], score[t, : t + 1].numpy(), rtol=1e-3, atol=1e-4)
            assert set(np.flatnonzero(reads[i])) == set(best[t].tolist())
        assert lane.layer.index_topk == MOST


@pytest.mark.parametrize("family", tiny.INDEXED)
@pytest.mark.parametrize(("dtype", "attention"), [(torch.float32, "eager"), (torch.bfloat16, "eager"), (torch.bfloat16, "sdpa")])
def test_outputs_are_attention_over_what_was_chosen(tmp_path, family, dtype, attention):
    model = tiny.model(family, dtype, attention)
    lanes = captured(tmp_path, model)
    assert [*check_trace(tmp_path / "t")] == []
    assert all(x.sound for x in verify(tmp_path / "t", model))
    assert all(lane.sparse for lane in lanes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_whose_scores_do_not_decide_are_not_held_against_a_choice(tmp_path, dtype):
    """One index head with a negative weight: what it does not look at scores 0, the best, and a model takes any of these."""
    model = tiny.model("deepseek_v32", dtype, index_n_heads=1)
    lanes = captured(tmp_path, model)
    for lane in lanes:
        known = with_known_reads(lane)
        assert lane.indexer is not None
        tied = [t for t, w in zip(lane.t, lane.indexer.w[:, 0], strict=True) if w < 0]
        assert {*known.t} | {*tied} == {*lane.t}
        assert 0 < len(known.t) < len(lane.t)
    assert [*check_trace(tmp_path / "t")] == []
    found = verify(tmp_path / "t", model)
    assert all(x.sound for x in found)
    assert [x.steps for x in found] == [len(with_known_reads(lane).t) for lane in lanes]
    assert {x.steps + x.unknown for x in found} == {STEPS}
    said = f"{sum(x.unknown for x in found)} steps left out, of which tied scores do not tell what the indexer chose"
    assert summary(found).endswith(said)


def test_where_no_step_decides_nothing_is_compared(tmp_path):
    model = tiny.model("deepseek_v32")
    for layer in model.model.layers:
        layer.self_attn.indexer.wq_b.weight.data.zero_()  # every score is 0
    captured(tmp_path, model)
    assert [*check_trace(tmp_path / "t")] == []
    assert [(x.steps, x.unknown, x.sound) for x in verify(tmp_path / "t", model)] == [(0, STEPS, True)] * 2


def test_outputs_over_another_choice_are_found(tmp_path):
    """A trace whose indexer says something else than what the model attended to."""
    captured(tmp_path, tiny.model("deepseek_v32"), layers=[1])
    rewrite(
        tmp_path / "t", with_column("w", np.linspace(-1, 1, STEPS * tiny.INDEX["index_n_heads"], dtype=np.float32)), "index_q"
    )
    found = [*check_trace(tmp_path / "t")]
    assert any("`out` is" in line for line in found), found


def test_a_prompt_that_fits_is_attended_whole(tmp_path):
    model = tiny.model("deepseek_v32", index_topk=200)
    lanes = captured(tmp_path, model)
    assert [own_reads(lane) for lane in lanes] == [None, None]
    assert [*check_trace(tmp_path / "t")] == []
    assert all(x.sound for x in verify(tmp_path / "t", model))


def test_sampled_steps_have_their_index_queries(tmp_path):
    how = How(steps=STEPS, keep=Keep(k_pre=False, every=4))
    [_] = capture_all(tiny.model("deepseek_v32"), {0: PROMPT}, tmp_path / "t", how)
    trace = open_trace(tmp_path / "t")
    lanes = [trace.lane(trace.requests[0], layer) for layer in trace.layers]
    assert [lane.steps.tolist() for lane in lanes] == [[0, 4, 8]] * 2
    assert all(lane.indexer is not None and len(lane.indexer.q) == 3 for lane in lanes)
    assert [*check_trace(tmp_path / "t")] == []


def test_models_without_an_indexer_are_as_before(tmp_path):
    capture(tiny.model("deepseek_v3"), PROMPT, tmp_path / "t", steps=2, k_pre=False)
    assert not [*(tmp_path / "t").glob("index_*")]
    assert {x.index_topk for x in open_trace(tmp_path / "t").layers} == {None}


# ------------------------------------------------------------------------------------------------ replayed
def test_a_replay_reads_what_the_model_read(tmp_path):
    lanes = captured(tmp_path, tiny.model("deepseek_v32", torch.bfloat16))
    run = replay(tmp_path / "t", f"dsa(read=tokens({MOST}))", tmp_path / "run", plans=True, strict=True)
    plans = pl.read_parquet(run.path / "plans.parquet").sort("step")
    for lane in lanes:
        for head in range(lane.layer.kv_heads):
            mine = plans.filter(pl.col("layer") == lane.layer.id, pl.col("kv_head") == head)["pages"].to_list()
            assert mine == [np.flatnonzero(row).tolist() for row in own_reads(lane)]


def test_the_model_s_own_choice_has_the_model_s_own_output(tmp_path):
    """What a replay says dsa loses is how far the model's own output is from dense attention."""
    model = tiny.model("deepseek_v32")
    lanes = captured(tmp_path, model)
    run = replay(tmp_path / "t", [f"dsa(read=tokens({MOST}))"], tmp_path / "run")
    heads = pl.read_parquet(run.path / "heads.parquet")
    for lane in lanes:
        exact = dense(lane, top=0).out
        own = widen(lane.out).swapaxes(0, 1)
        lost = np.linalg.norm(own - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        mine = heads.filter(pl.col("layer") == lane.layer.id).sort("q_head", "step")["rel_l2"].to_numpy().reshape(lost.shape)
        assert lost.max() > 0.1
        np.testing.assert_allclose(mine, lost, atol=1e-4)
    assert not run.info.get("noise_floor")  # of outputs that are dense, which these are not


# ------------------------------------------------------------------------------------------------ refused
def test_an_indexer_that_scores_otherwise_is_refused(tmp_path, monkeypatch):
    model = tiny.model("deepseek_v32")
    monkeypatch.setattr(
        "transformers.models.deepseek_v32.modeling_deepseek_v32.F.relu", lambda x, inplace=False: x.clamp(min=0) ** 2
    )
    with pytest.raises(WrongUse, match="its indexer scores tokens by more than relu_weighted or dot"):
        capture(model, PROMPT, tmp_path / "t", steps=2, k_pre=False)


def test_a_layer_that_reads_another_one_s_choice_is_refused(tmp_path):
    model = tiny.model("glm_moe_dsa", indexer_types=["full", "shared"])
    with pytest.raises(
        WrongUse,
        match="layer 1: GlmMoeDsaAttention has indexed_attention attention and no indexer of its own that scores single tokens",
    ):
        capture(model, PROMPT, tmp_path / "t", steps=2, k_pre=False)


def test_a_running_model_is_refused():
    from kvsim.capture.layers import probe

    with pytest.raises(WrongUse, match="layer 0 attends to what its own indexer chooses"):
        attended(probe(tiny.model("deepseek_v32")))
