"""A captured trace is what the model computed, and the model is as it was."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvsim
from kvsim.capture.check import summary, verify
from kvsim.capture.hooks import Call
from kvsim.capture.layers import turns
from kvsim.capture.prompt import CONTEXT, FORCED, FREE, QUESTION, Prompt
from kvsim.capture.rotary import Turned
from kvsim.capture.run import capture, recording
from kvsim.errors import WrongUse
from kvsim.geometry import Span
from kvsim.trace.bits import widen
from kvsim.trace.check import check_trace
from kvsim.trace.open import Lane, open_trace
from kvsim.trace.reference import attend
from tests.capture import tiny

PROMPT, STEPS = 40, 20  # longer together, and the prompt alone, than a window


@pytest.fixture(params=["llama", "qwen3", "gemma2", "gpt_oss", "phi3", "gpt_neox"])
def family(request):
    return request.param


def lanes(path: Path) -> list[Lane]:
    trace = open_trace(path)
    return [trace.lane(trace.requests[0], layer) for layer in trace.captured_layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_output_is_attention_over_what_was_captured(family, dtype, tmp_path):
    model = tiny.model(family, dtype)
    capture(model, tiny.tokens(PROMPT), tmp_path / "t", steps=STEPS)
    found = verify(tmp_path / "t", model)
    assert [x.layer for x in found] == [0, 1]
    for x in found:
        assert x.outputs == x.equal == 6 * STEPS
        assert x.apart <= (1e-4 if dtype == torch.float32 else 1)
        assert x.sound
    assert summary(found).startswith("verified: 2 layers, 240 outputs")
    assert not list(check_trace(tmp_path / "t"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sdpa_is_captured_as_eager_is(attention, tmp_path):
    model = tiny.model("mistral", torch.bfloat16, attention)
    capture(model, tiny.tokens(PROMPT), tmp_path / "t", steps=STEPS)
    assert all(x.sound for x in verify(tmp_path / "t", model))


def test_attention_of_the_trace_is_that_of_a_model_nobody_watches(family, tmp_path):
    model = tiny.model(family)
    report = capture(model, tiny.tokens(PROMPT), tmp_path / "t", steps=STEPS, window_rows=8)
    with torch.no_grad():
        whole = model(torch.tensor([report.tokens]), output_attentions=True).attentions  # per layer [1, Hq, T, T]
    for lane, theirs in zip(lanes(tmp_path / "t"), whole, strict=True):
        theirs = theirs[0].double().numpy()
        t, group = np.concatenate([lane.window_t, lane.t]), lane.layer.group
        assert list(t) == list(range(PROMPT - 8, PROMPT + STEPS))
        for kv_head in range(lane.layer.kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            q = widen(np.concatenate([lane.window_q, lane.q])[:, heads])
            chance, _ = attend(q, t, widen(lane.k[kv_head]), lane.layer, kv_head)
            np.testing.assert_allclose(chance.swapaxes(0, 1), theirs[heads, t], atol=2e-5)
        assert lane.mass is not None
        np.testing.assert_allclose(lane.mass, theirs[:, :PROMPT, :PROMPT].sum(axis=1), rtol=1e-4, atol=1e-4)


def test_tokens_are_those_of_a_model_nobody_watches_before_and_after(family, tmp_path):
    model, prompt = tiny.model(family), tiny.tokens(PROMPT)
    alone = tiny.generated(model, prompt, STEPS)
    report = capture(model, prompt, tmp_path / "t", steps=STEPS)
    assert list(report.tokens) == prompt + alone
    assert tiny.generated(model, prompt, STEPS) == alone
    assert report.steps == STEPS
    assert report.prompt_tokens == PROMPT
    assert 0 <= report.stalled_seconds <= report.seconds


def touched(model: Any) -> list[Any]:
    """What a capture puts hooks on."""
    from kvsim.capture.hooks import files_of

    files = files_of(model)
    names = [(file, name) for file in files for name in sorted(vars(file)) if name.startswith("apply_rotary")]
    interfaces = [dict(file.ALL_ATTENTION_FUNCTIONS) for file in files if hasattr(file, "ALL_ATTENTION_FUNCTIONS")]
    return [interfaces, [getattr(*x) for x in names], dict(model._forward_pre_hooks)]


def test_hooks_are_gone_afterwards_even_after_an_error(tmp_path):
    model = tiny.model("llama")
    before = touched(model)
    capture(model, tiny.tokens(8), tmp_path / "t", steps=2)
    assert touched(model) == before

    def fails() -> None:
        with recording(model, tiny.tokens(8), tmp_path / "u"):
            assert touched(model) != before
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    assert touched(model) == before


def test_an_override_of_your_own_stays(tmp_path):
    import sys

    model = tiny.model("llama")
    file = sys.modules[type(model).__module__]
    eager, calls = file.eager_attention_forward, []

    def mine(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return eager(*args, **options)

    file.ALL_ATTENTION_FUNCTIONS["eager"] = mine
    try:
        capture(model, tiny.tokens(8), tmp_path / "t", steps=2)
        assert calls
        assert file.ALL_ATTENTION_FUNCTIONS["eager"] is mine
    finally:
        del file.ALL_ATTENTION_FUNCTIONS["eager"]


def test_keys_that_change_after_rope_have_none_before_it():
    x = torch.randn(1, 2, 5, 8)
    turned = Turned(x, 2 * x, x, x)
    call = partial(Call, torch.nn.Identity(), 0, x, v=x, out=x, mask=None, options={}, turned=turned, indexed=None)
    assert turns(call(k=2 * x))
    assert turns(call(k=torch.cat([x, 2 * x], dim=2)))  # after older ones
    assert not turns(call(k=2 * x + 1))
    assert not turns(call(k=torch.cat([2 * x, 2 * x], dim=3)))


def test_another_model_of_the_same_class_is_not_recorded(tmp_path):
    model, other = tiny.model("llama"), tiny.model("llama", initializer_range=0.5)
    with recording(model, tiny.tokens(8), tmp_path / "t", steps=4) as found:
        tiny.generated(other, tiny.tokens(30), 3)
        tokens = tiny.generated(model, tiny.tokens(8), 5)
        found.tokens = [*tiny.tokens(8), *tokens]
    assert open_trace(tmp_path / "t").requests[0].total == 12


# ------------------------------------------------------------------------------------------------ columns
def test_keys_before_rope_are_those_the_model_projects(tmp_path):
    for family, module in (("llama", "k_proj"), ("qwen3", "k_norm")):
        model, seen = tiny.model(family), []
        report = capture(model, tiny.tokens(PROMPT), tmp_path / family, steps=STEPS)
        layer = model.model.layers[1].self_attn
        hook = getattr(layer, module).register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
        with torch.no_grad():
            model(torch.tensor([report.tokens]))
        hook.remove()
        theirs = seen[0].reshape(PROMPT + STEPS, 2, 8).transpose(0, 1)
        mine = lanes(tmp_path / family)[1]
        assert mine.k_pre is not None
        np.testing.assert_allclose(mine.k_pre, theirs.detach(), atol=1e-5)
        assert not np.allclose(mine.k, mine.k_pre, atol=1e-2)


@pytest.mark.parametrize("chunk", [None, 3])
def test_statistics_of_prompt_queries_are_those_of_what_the_model_projects(tmp_path, chunk):
    for family, module in (("llama", "q_proj"), ("qwen3", "q_norm")):
        model, seen = tiny.model(family), []
        capture(model, tiny.tokens(PROMPT), tmp_path / family, steps=2, q_stats=True, chunk=chunk)
        layer = model.model.layers[1].self_attn
        hook = getattr(layer, module).register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
        with torch.no_grad():
            model(torch.tensor([tiny.tokens(PROMPT)]))
        hook.remove()
        theirs = seen[0].detach().reshape(PROMPT, 6, 8).transpose(0, 1).double().numpy()[:, 4:]
        stats = lanes(tmp_path / family)[1].q_stats
        assert stats is not None
        assert (stats.first, stats.queries) == (4, PROMPT - 4)
        for head, rows in enumerate(theirs):
            np.testing.assert_allclose(stats.mean[head], rows.mean(axis=0), atol=1e-5)
            np.testing.assert_allclose(stats.covariance[head], np.cov(rows.T, bias=True), atol=1e-5)


def test_queries_that_cannot_be_turned_back_have_no_statistics(tmp_path):
    with pytest.raises(WrongUse, match=r"layer 0: queries cannot be turned back, rope layout .* --q-stats"):
        capture(tiny.model("deepseek_v3"), tiny.tokens(8), tmp_path / "t", steps=2, k_pre=False, q_stats=True)


def test_value_norms_are_those_of_each_heads_part_of_the_output_projection(tmp_path):
    model = tiny.model("llama")
    capture(model, tiny.tokens(PROMPT), tmp_path / "t", steps=STEPS)
    lane = lanes(tmp_path / "t")[0]
    weight = model.model.layers[0].self_attn.o_proj.weight.detach().double().numpy()  # [hidden, Hq * dv]
    for head in range(6):
        projected = widen(lane.v[head // 3]) @ weight[:, head * 8 : head * 8 + 8].T
        assert lane.wo_norm is not None
        np.testing.assert_allclose(lane.wo_norm[head], np.abs(projected).sum(axis=1), rtol=1e-5)


def test_what_is_not_wanted_is_left_out(tmp_path):
    off = {"prefill_mass": False, "k_pre": False, "wo_norm": False, "window_rows": 0}
    capture(tiny.model("llama"), tiny.tokens(8), tmp_path / "t", steps=2, layers=[1], **off)
    trace = open_trace(tmp_path / "t")
    supply = trace.supplies(trace.requests[0], trace.captured_layers[0])
    assert (supply.window_rows, supply.prefill_mass, supply.k_pre, supply.wo_norm) == (0, False, False, False)
    assert [(x.id, x.captured) for x in trace.layers] == [(0, False), (1, True)]


def test_defaults_record_every_need(tmp_path):
    capture(tiny.model("llama"), tiny.tokens(100), tmp_path / "t", steps=2)
    trace = open_trace(tmp_path / "t")
    for layer in trace.captured_layers:
        supply = trace.supplies(trace.requests[0], layer)
        assert (supply.window_rows, supply.prefill_mass, supply.k_pre, supply.wo_norm, supply.contiguous) == (64, *[True] * 4)


def test_segments_close_every_64_steps(tmp_path):
    capture(tiny.model("llama"), tiny.tokens(8), tmp_path / "t", steps=130)
    for table in ("kv", "q", "values"):
        assert len(list((tmp_path / "t" / table).glob("request=0/layer=1/*.parquet"))) == 4  # the prompt, 64, 64, 2
    journal = [json.loads(line) for line in (tmp_path / "t/journal.jsonl").read_text().splitlines()]
    assert {x["path"] for x in journal if x["path"].startswith("q/request=0/layer=0")} == {
        f"q/request=0/layer=0/seg-0000{i}.parquet" for i in range(4)
    }


def test_a_prompt_in_chunks_gives_the_same_rows(tmp_path):
    model = tiny.model("gemma2")
    whole = capture(model, tiny.tokens(PROMPT), tmp_path / "whole", steps=STEPS, window_rows=16)
    parts = capture(model, tiny.tokens(PROMPT), tmp_path / "parts", steps=STEPS, window_rows=16, chunk=11)
    assert whole.tokens == parts.tokens
    assert all(x.sound for x in verify(tmp_path / "parts", model))
    for a, b in zip(lanes(tmp_path / "whole"), lanes(tmp_path / "parts"), strict=True):
        for name in ("k", "v", "k_pre", "q", "window_q", "mass", "wo_norm", "out"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=2e-4, err_msg=name)


# ------------------------------------------------------------------------------------------------ protocols
def same(a: Lane, b: Lane) -> bool:
    names = ("k", "v", "k_pre", "q", "window_q", "mass", "wo_norm", "out", "t", "steps")
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names)


def test_forcing_what_the_model_would_say_changes_nothing(tmp_path):
    model, prompt = tiny.model("gpt_oss"), tiny.tokens(PROMPT)
    free = capture(model, prompt, tmp_path / "free", steps=STEPS)
    forced = Prompt(free.tokens, (CONTEXT,) * PROMPT + (FORCED,) * STEPS, PROMPT)
    capture(model, forced, tmp_path / "forced", steps=STEPS)
    assert all(same(a, b) for a, b in zip(lanes(tmp_path / "free"), lanes(tmp_path / "forced"), strict=True))
    modes = [open_trace(tmp_path / name).requests[0] for name in ("free", "forced")]
    assert [(r.mode, set(r.roles[PROMPT:])) for r in modes] == [("greedy", {FREE}), ("teacher_forced", {FORCED})]


def test_a_question_is_fed_token_by_token(tmp_path):
    model = tiny.model("llama")
    given = Prompt(
        tuple(tiny.tokens(20)), (CONTEXT,) * 12 + (QUESTION,) * 5 + (FORCED,) * 3, 12, (Span("needle", 3, 6, "evidence"),), "text"
    )
    report = capture(model, given, tmp_path / "t", steps=10)
    trace = open_trace(tmp_path / "t")
    r = trace.requests[0]
    assert report.tokens[:20] == given.tokens
    assert (r.mode, r.prompt, r.total) == ("question_fed", 12, 22)
    assert list(r.roles) == [CONTEXT] * 12 + [QUESTION] * 5 + [FORCED] * 3 + [FREE] * 2
    assert r.evidence == given.spans
    assert list(lanes(tmp_path / "t")[0].steps) == list(range(10))


def test_the_models_own_sampling_can_be_recorded(tmp_path):
    model, prompt = tiny.model("qwen3"), tiny.tokens(PROMPT)
    with recording(model, prompt, tmp_path / "t", steps=STEPS) as found, torch.no_grad():
        torch.manual_seed(1)
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, PROMPT), max_new_tokens=12, do_sample=True)
        found.tokens, found.mode = out[0].tolist(), "sampled"
    r = open_trace(tmp_path / "t").requests[0]
    assert (r.mode, r.total) == ("sampled", PROMPT + 11)  # the last token it chose was never attended from
    assert all(x.sound for x in verify(tmp_path / "t", model))


def test_a_prompt_of_one_token(tmp_path):
    model = tiny.model("llama")
    capture(model, [5], tmp_path / "t", steps=4)
    assert all(x.sound for x in verify(tmp_path / "t", model))
    assert not list(check_trace(tmp_path / "t"))


def test_the_package_is_the_verb(tmp_path):
    model = tiny.model("llama")
    report = kvsim.capture(model, tiny.tokens(8), tmp_path / "t", steps=2)
    assert all(x.sound for x in kvsim.capture.verify(report.path, model))


# ------------------------------------------------------------------------------------------------ what a trace says of its model
def test_the_manifest_names_model_and_machine_and_no_path(tmp_path):
    model = tiny.model("llama")
    model.config._name_or_path = "/home/someone/models/tiny"
    capture(model, tiny.tokens(8), tmp_path / "t", steps=2)
    manifest = json.loads((tmp_path / "t/manifest.json").read_text())
    assert manifest["source"]["model"] == "tiny"
    assert manifest["source"]["config"]["hidden_size"] == 48
    assert manifest["capture"]["tool"] == "kvsim.capture"
    assert manifest["capture"]["device"] == "cpu"
    assert manifest["capture"]["attention_backend"] == "eager"
    assert "/home" not in json.dumps(manifest)
    assert str(tmp_path) not in json.dumps(manifest)


def test_layer_facts(tmp_path):
    facts = {}
    for family in ("llama", "gemma2", "gpt_oss", "gpt_neox"):
        capture(tiny.model(family), tiny.tokens(8), tmp_path / family, steps=2)
        facts[family] = open_trace(tmp_path / family).layers
    assert [(x.kind, x.window) for x in facts["gemma2"]] == [("sliding", tiny.WINDOW), ("full", None)]
    assert facts["gemma2"][0].scale == pytest.approx(20**-0.5)
    assert facts["gemma2"][0].softcap == 4.0
    assert facts["gpt_oss"][0].sinks == pytest.approx(np.linspace(0, 3, 6))
    assert {x.row_bytes for x in facts["llama"]} == {2 * 8 * 4}
    rope = json.loads(facts["llama"][0].rope or "")
    assert rope == {"kind": "default", "theta": 10000.0, "rotary_dim": 8, "layout": "half", "scaling": None, "magnitude": 1.0}
    assert json.loads(facts["gpt_neox"][0].rope or "")["rotary_dim"] == 2  # a quarter of 8
    yarn = json.loads(facts["gpt_oss"][0].rope or "")
    assert yarn["kind"] == "yarn"
    assert yarn["scaling"]["factor"] == 32
    assert yarn["magnitude"] > 1


def test_a_model_without_rope_has_none(tmp_path):
    model = tiny.model("gpt2")
    capture(model, tiny.tokens(8), tmp_path / "t", steps=2)
    assert all(x.rope is None for x in open_trace(tmp_path / "t").layers)
    assert all(x.sound for x in verify(tmp_path / "t", model))


def test_latent_rows_are_billed_as_the_cache_holds_them(tmp_path):
    model = tiny.model("deepseek_v3", torch.bfloat16)
    capture(model, tiny.tokens(8), tmp_path / "t", steps=2, k_pre=False)
    layer = open_trace(tmp_path / "t").layers[0]
    assert (layer.kind, layer.key_dim, layer.value_dim, layer.kv_heads) == ("mla_expanded", 12, 6, 6)
    assert layer.shared_row_bytes == (12 + 4) * 2  # a latent of 12 and a rotary key of 4, shared by 6 heads
    assert layer.row_bytes == 32 // 6


def test_linear_layers_are_listed_and_not_captured(tmp_path):
    model = tiny.model("qwen3_next")
    capture(model, tiny.tokens(8), tmp_path / "t", steps=2, wo_norm=False)
    trace = open_trace(tmp_path / "t")
    assert [x.kind for x in trace.layers] == ["linear"] * 3 + ["full"]
    assert [x.id for x in trace.captured_layers] == [3]
    assert all(x.sound for x in verify(trace, model))


def test_verify_tells_a_layer_that_attends_a_little_differently(tmp_path):
    model = tiny.model("llama")
    capture(model, tiny.tokens(PROMPT), tmp_path / "t", steps=STEPS)
    with torch.no_grad():
        model.model.layers[1].self_attn.scaling *= 1.001
    found = verify(tmp_path / "t", model)
    assert found[0].equal == found[0].outputs
    assert found[1].equal < found[1].outputs
