"""What cannot be captured truthfully is refused by name, in one line, and leaves nothing that looks like a trace."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvsim.capture.check import verify
from kvsim.capture.estimate import free_memory
from kvsim.capture.prompt import CONTEXT, FORCED, Prompt
from kvsim.capture.run import capture, planned, recording
from kvsim.errors import BadTrace, WrongUse
from kvsim.trace.open import open_trace
from tests.capture import tiny

IDS = tiny.tokens(20)


@pytest.fixture
def llama():
    return tiny.model("llama")


def refused(words: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(WrongUse) as e:
        call(*args, **options)
    assert re.search(words, str(e.value)), str(e.value)
    assert "\n" not in str(e.value)


def generates(model: Any, out: Any, prompt: int = 20, ids: Any = None, **options: Any) -> None:
    """The user's own generate() inside a recording."""
    ids = torch.tensor([IDS]) if ids is None else ids
    mask = options.pop("attention_mask", torch.ones_like(ids))
    with recording(model, IDS[:prompt], out, steps=8) as found, torch.no_grad():
        found.tokens = model.generate(ids, attention_mask=mask, max_new_tokens=6, **options)[0].tolist()


# ------------------------------------------------------------------------------------------------ how it is run
def test_batches(llama, tmp_path):
    refused("batch of 2 prompts", capture, llama, [IDS, IDS], tmp_path / "t")
    refused("forward of batch 2", generates, llama, tmp_path / "u", ids=torch.tensor([IDS, IDS]))


def test_beam_search(llama, tmp_path):
    refused("batch 3.*beam search", generates, llama, tmp_path / "t", num_beams=3)


def test_assisted_and_prompt_lookup_decoding(llama, tmp_path):
    draft = tiny.model("llama", num_hidden_layers=1)
    refused("speculative", generates, llama, tmp_path / "t", assistant_model=draft)
    refused("speculative", generates, llama, tmp_path / "u", ids=torch.tensor([IDS[:10] * 2]), prompt_lookup_num_tokens=3)


def test_a_wrong_prompt_length(llama, tmp_path):
    refused("20 tokens after 0 of a prompt of 7", generates, llama, tmp_path / "t", prompt=7)


def test_static_and_quantised_caches(llama, tmp_path):
    refused("StaticCache.*DynamicCache", generates, llama, tmp_path / "t", cache_implementation="static")
    with recording(llama, IDS, tmp_path / "u") as found, torch.no_grad():
        from transformers import StaticCache

        refused("StaticCache", llama, torch.tensor([IDS]), cache=StaticCache(config=llama.config, max_cache_len=40))
        found.tokens = IDS
        llama(torch.tensor([IDS]), use_cache=True)


def test_a_static_cache_is_told_by_its_keys_too(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsim.capture.refuse.forward", lambda *given: None)
    refused("attends to 25 keys after 20 tokens", generates, llama, tmp_path / "t", cache_implementation="static")


def test_left_padding(llama, tmp_path):
    mask = torch.ones(1, 20)
    mask[0, :3] = 0
    refused("left padding", generates, llama, tmp_path / "t", attention_mask=mask)
    refused("hides tokens", capture, llama, {"input_ids": [IDS], "attention_mask": mask.tolist()}, tmp_path / "u")


def test_a_mask_that_is_not_causal(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsim.capture.refuse.forward", lambda *given: None)
    mask = torch.ones(1, 20)
    mask[0, :3] = 0
    refused("layer 0: its mask is not causal", generates, llama, tmp_path / "t", attention_mask=mask)


def test_a_compiled_model(llama, tmp_path):
    refused("compiled", capture, torch.compile(llama), IDS, tmp_path / "t")
    llama.compile()
    refused("compiled", capture, llama, IDS, tmp_path / "t")


def test_training_mode(llama, tmp_path):
    refused(r"model\.eval\(\)", capture, llama.train(), IDS, tmp_path / "t")


def test_another_dtype_than_asked(llama, tmp_path):
    refused("runs in float32, asked for bfloat16", capture, llama, IDS, tmp_path / "t", dtype="bfloat16")
    refused("float64", capture, tiny.model("llama", torch.float64), IDS, tmp_path / "t")


def test_a_prompt_longer_than_the_model(llama, tmp_path):
    refused("make 264 tokens, the model has 256 positions", capture, llama, tiny.tokens(250), tmp_path / "t", steps=14)


def test_tokens_of_another_tokenizer(llama, tmp_path):
    for odd in (97, -1):
        refused(f"token {odd} in the prompt, the model has 97", capture, llama, [*IDS, odd], tmp_path / "t")


def test_prompts_and_steps_that_make_no_sense(llama, tmp_path):
    refused("no tokens", capture, llama, [], tmp_path / "t")
    fed = Prompt(tuple(IDS), (CONTEXT,) * 10 + (FORCED,) * 10, 10)
    refused("10 tokens are fed in decode; take at least 10", capture, llama, fed, tmp_path / "t", steps=9)
    refused("steps 0: expected 1 or more", capture, llama, IDS, tmp_path / "t", steps=0)
    refused("expected one token or more", Prompt, (), (), 0)


def test_layers_that_are_not_there(llama, tmp_path):
    refused(r"layers \[2\].*\[0, 1\]", capture, llama, IDS, tmp_path / "t", layers=[0, 2])
    refused("no layer to capture", capture, llama, IDS, tmp_path / "t", layers=[])
    refused(r"layers \[0\].*\[3\]", capture, tiny.model("qwen3_next"), IDS, tmp_path / "t", layers=[0])


# ------------------------------------------------------------------------------------------------ what it is
def test_attention_that_does_not_pass_the_interface(tmp_path):
    config = AutoConfig.for_model("bloom", vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    refused(
        "BloomForCausalLM: no layer calls the attention interface",
        capture,
        AutoModelForCausalLM.from_config(config).eval(),
        IDS,
        tmp_path / "t",
    )


def test_one_layer_that_does_not_pass_the_interface(llama, tmp_path):
    class OtherAttention(torch.nn.Module):
        layer_idx = 1

        def forward(self, hidden_states: Any, **options: Any) -> Any:
            return hidden_states, None

    llama.model.layers[1].self_attn = OtherAttention()
    refused("layer 1: OtherAttention does not call the attention interface", capture, llama, IDS, tmp_path / "t")


def test_sdpa_with_soft_caps_or_sinks(tmp_path):
    for family in ("gemma2", "gpt_oss"):
        model = tiny.model(family)
        model.config._attn_implementation = "sdpa"  # transformers refuses too, unless it is forced
        refused("soft cap", capture, model, IDS, tmp_path / "t")


def test_attention_that_is_not_plain(llama, tmp_path, monkeypatch):
    import sys

    file = sys.modules[type(llama).__module__]
    eager = file.eager_attention_forward
    monkeypatch.setattr(file, "eager_attention_forward", lambda *a, **k: (eager(*a, **k)[0] * 1.05, None))
    refused("layer 0: LlamaAttention is not plain attention", capture, llama, IDS, tmp_path / "t")


def test_chunked_attention(tmp_path):
    model = tiny.model("llama")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    model.config.attention_chunk_size = 16
    refused("layer 1: LlamaAttention has chunked_attention", capture, model, IDS, tmp_path / "t")


def test_attention_backends_that_cannot_be_watched(llama, tmp_path):
    llama.config._attn_implementation = "flex_attention"
    refused("'flex_attention': expected eager, sdpa, flash_attention_2", capture, llama, IDS, tmp_path / "t")


def test_needs_that_a_model_cannot_meet(tmp_path):
    refused("before RoPE.*--no-k-pre", capture, tiny.model("deepseek_v3"), IDS, tmp_path / "t")
    refused("output projection.*--no-wo-norm", capture, tiny.model("qwen3_next"), IDS, tmp_path / "t")


def test_things_that_are_no_decoder(llama, tmp_path):
    refused("not a transformers model", capture, torch.nn.Linear(2, 2).eval(), IDS, tmp_path / "t")
    llama.config.is_encoder_decoder = True
    refused("encoder-decoder", capture, llama, IDS, tmp_path / "t")


# ------------------------------------------------------------------------------------------------ where it is written
def test_nothing_is_left_of_what_was_refused(llama, tmp_path):
    refused("positions", capture, llama, tiny.tokens(300), tmp_path / "t")
    refused("batch 3", generates, llama, tmp_path / "t", num_beams=3)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(llama, tmp_path):
    capture(llama, IDS, tmp_path / "t", steps=2)
    for restart in (False, True):
        refused("there is something already", capture, llama, IDS, tmp_path / "t", steps=2, restart=restart)


def test_an_unfinished_capture_is_replaced_when_asked(llama, tmp_path):
    def fails() -> None:
        with recording(llama, IDS, tmp_path / "t"), torch.no_grad():
            llama(torch.tensor([IDS]), use_cache=True)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    with pytest.raises(BadTrace, match="partial"):
        open_trace(tmp_path / "t")
    assert open_trace(tmp_path / "t", allow_partial=True).requests[0].total == 20
    refused("unfinished capture.*restart", capture, llama, IDS, tmp_path / "t", steps=2)
    capture(llama, IDS, tmp_path / "t", steps=2, restart=True)
    assert all(x.sound for x in verify(tmp_path / "t", llama))


def test_a_recording_nobody_ran(llama, tmp_path):
    def idle() -> None:
        with recording(llama, IDS, tmp_path / "t"):
            pass

    refused("0 tokens went through the model; expected the prompt's 20", idle)


def test_verify_with_another_model(llama, tmp_path):
    capture(llama, IDS, tmp_path / "t", steps=2)
    refused("trace is float32 and the model bfloat16", verify, tmp_path / "t", tiny.model("llama", torch.bfloat16))


def test_a_plan_refuses_as_the_capture_would(llama):
    refused("positions", planned, llama, tiny.tokens(300))


def test_a_prompt_that_does_not_fit_the_memory(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsim.capture.estimate.free_memory", lambda device: 10_000)
    refused("10,000 left; most of it is .*--", capture, llama, IDS, tmp_path / "t", steps=2)
    eager = tiny.model("llama", attn_implementation="eager", max_position_embeddings=8192)
    refused("most of it is eager attention.*--chunk", capture, eager, tiny.tokens(5000), tmp_path / "t", steps=2)
    assert not (tmp_path / "t").exists()
    monkeypatch.setattr("kvsim.capture.estimate.free_memory", lambda device: None)  # a system that does not say
    assert capture(llama, IDS, tmp_path / "t", steps=2).steps == 2


def test_the_memory_that_is_left_is_a_number_of_bytes():
    left = free_memory(torch.device("cpu"))
    assert left is None or 1 << 20 < left < 1 << 50
