"""Flash attention without its kernel: a twin with the kernel's arguments stands in its place, everything around it is transformers' own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flash_attention

from kvsim.capture.check import verify
from kvsim.capture.hooks import BACKENDS
from kvsim.capture.run import capture
from kvsim.cli.traces import ATTENTION
from kvsim.errors import WrongUse
from kvsim.trace.open import open_trace
from tests.capture import tiny

BACKEND = "flash_attention_2"


def twin(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **others: Any,
) -> torch.Tensor:
    """q [1, S, Hq, dk], k and v [1, T, Hkv, d] -> [1, S, Hq, dv]; the last query sees the last key, and `window_size[0]` before its own."""
    if q.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")  # as the kernel does
    group, (s, t) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    q, k, v = (x[0].transpose(0, 1).double() for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    logit = q @ k.transpose(1, 2) * (softmax_scale or q.shape[2] ** -0.5)
    if softcap:
        logit = softcap * torch.tanh(logit / softcap)
    own, pos = torch.arange(t - s, t)[:, None], torch.arange(t)
    hidden = (pos > own) & causal
    if window_size[0] >= 0:
        hidden |= pos < own - window_size[0]
    out = torch.softmax(logit.masked_fill(hidden, -torch.inf), -1) @ v
    return out.transpose(0, 1)[None].to(torch.bfloat16)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """The twin, as far as transformers can tell, is what flash_attn ships."""
    for name, value in {
        "_loaded_implementation": BACKEND,
        "_flash_fn": twin,
        "_flash_varlen_fn": twin,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": None,
        "_unpad_fn": None,
        "_process_flash_kwargs_fn": flash._lazy_define_process_function(twin),
        "_process_with_kvcache_kwargs_fn": dict,
    }.items():
        monkeypatch.setattr(flash, name, value, raising=False)
    monkeypatch.setattr(flash_attention, "_use_top_left_mask", False)


def model(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    made = tiny.model(family, dtype)
    made.config._attn_implementation = BACKEND  # transformers would look for the package
    return made


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("chunk", [None, 11])
def test_what_the_kernel_saw_and_gave_is_in_the_trace(tmp_path, family, chunk):
    made, prompt = model(family), tiny.tokens(40)
    alone = tiny.generated(made, prompt, 12)
    report = capture(made, prompt, tmp_path / "t", steps=12, chunk=chunk, k_pre=family != "deepseek_v3")
    found = verify(report.path, made)
    assert all(x.sound and x.equal == x.outputs == 72 for x in found)
    assert max(x.apart for x in found) < 0.1
    assert chunk or list(report.tokens) == prompt + alone
    assert open_trace(report.path).manifest["capture"]["attention_backend"] == BACKEND


@pytest.mark.parametrize("sink", [-3.0, 3.0])  # the first changes outputs by less than bfloat16 is allowed
def test_what_a_kernel_leaves_out_is_not_captured(tmp_path, sink):
    made = model("gpt_oss")
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.sinks.fill_(sink)
    with pytest.raises(WrongUse, match="flash_attention_2 leaves out soft caps or learned sinks"):
        capture(made, tiny.tokens(20), tmp_path / "t")


def test_the_command_offers_what_can_be_watched():
    assert ATTENTION == BACKENDS


def test_a_dtype_that_a_kernel_does_not_take_is_one_line(tmp_path):
    with pytest.raises(WrongUse) as e:
        capture(model("llama", torch.float32), tiny.tokens(20), tmp_path / "t")
    assert re.search(r"LlamaForCausalLM: a forward with a DynamicCache fails \(FlashAttention only support", str(e.value))
    assert "\n" not in str(e.value)
