"""The table of docs/capture.md is what tools/families.py finds, here for a handful of types; what is special in them is in their traces."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvsim.capture.check import verify
from kvsim.capture.run import capture
from kvsim.errors import WrongUse
from kvsim.trace.check import check_trace
from kvsim.trace.open import Lane, open_trace
from tests.capture import tiny as plain
from tools import families

PROMPT = plain.tokens(40)


@pytest.fixture(autouse=True, scope="module")
def still():
    families.quiet()


def lanes(path: Path) -> list[Lane]:
    trace = open_trace(path)
    return [trace.lane(trace.requests[0], layer) for layer in trace.captured_layers]


# ------------------------------------------------------------------------------------------------ the page
def test_the_page_has_every_type_once():
    told = re.search(r"transformers ([\d.]+): (\d+) of (\d+) model types", families.page_tables())
    rows = [line.split("`")[1] for line in families.page_tables().splitlines() if line.startswith("| `")]
    assert told is not None
    assert len(rows) == len(set(rows)) == int(told[3])
    assert int(told[2]) >= 20
    if told[1] == transformers.__version__:
        assert sorted(rows) == families.types()


# Among them: heads of all kinds, a partial rotation, one of single tensors, shared caches, positions that a model does not count, a window that
# only the cache is told; and refusals.
@pytest.mark.parametrize(
    "name", ["gptj", "phi", "gemma4_text", "bamba", "phimoe", "granite_swa", "diffllama", "minimax", "zamba2"]
)
def test_a_row_of_the_page_is_what_is_found(name):
    assert families.page_rows()[name] == families.examine(name).row


def test_a_row_that_is_not_as_the_page_says_fails(monkeypatch, capsys):
    assert families.main(["bloom"]) == 0
    monkeypatch.setattr(families, "page_rows", lambda: {"bloom": "| `bloom` | full |"})
    assert families.main(["bloom"]) == 1
    assert "<- the page: | `bloom` | full |" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ keys before RoPE
def turned(k_pre: np.ndarray, dim: int, theta: float) -> np.ndarray:
    """Keys [T, d] with pairs of neighbours among the first `dim` numbers turned, by the definition."""
    angle = np.arange(len(k_pre))[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    pairs = k_pre[:, 0:dim:2] + 1j * k_pre[:, 1:dim:2]
    pairs = pairs * np.exp(1j * angle)
    out = k_pre.copy()
    out[:, 0:dim:2], out[:, 1:dim:2] = pairs.real, pairs.imag
    return out


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_keys_that_are_turned_alone_are_seen(tmp_path, name):
    capture(families.tiny(name), PROMPT, tmp_path / "t", steps=4)
    for lane in lanes(tmp_path / "t"):
        rope = json.loads(lane.layer.rope or "")
        assert (rope["layout"], rope["rotary_dim"]) == ("interleaved", 4)
        assert lane.k_pre is not None
        for head in range(lane.layer.kv_heads):
            np.testing.assert_allclose(turned(lane.k_pre[head].astype(float), 4, 1e4), lane.k[head], atol=2e-5)
        assert not np.allclose(lane.k, lane.k_pre, atol=1e-2)


@pytest.mark.parametrize("name", ["phi", "stablelm"])
def test_the_part_of_a_key_that_is_not_turned_passes_by(tmp_path, name):
    model = families.tiny(name)
    capture(model, PROMPT, tmp_path / "t", steps=4)
    for lane in lanes(tmp_path / "t"):
        rope = json.loads(lane.layer.rope or "")
        dim = rope["rotary_dim"]
        assert (rope["layout"], dim < lane.layer.key_dim) == ("half", True)
        assert lane.k_pre is not None
        assert np.array_equal(lane.k_pre[..., dim:], lane.k[..., dim:])
    assert not list(check_trace(tmp_path / "t"))  # k is k_pre, rotated


def test_keys_normalised_after_rope_have_none_before_it(tmp_path):
    model = families.tiny("hunyuan_v1_dense")
    with pytest.raises(WrongUse, match="keys before RoPE cannot be had"):
        capture(model, PROMPT, tmp_path / "t", steps=4)
    capture(model, PROMPT, tmp_path / "t", steps=4, k_pre=False)
    assert {json.loads(x.rope or "")["layout"] for x in open_trace(tmp_path / "t").layers} == {"unknown"}


def test_a_rotation_that_is_not_seen_is_not_none(tmp_path, monkeypatch):
    model = plain.model("gpt2")
    capture(model, PROMPT, tmp_path / "t", steps=4)
    assert all(x.rope is None for x in open_trace(tmp_path / "t").layers)
    monkeypatch.setattr(sys.modules[type(model).__module__], "OwnRotaryEmbedding", object, raising=False)
    with pytest.raises(WrongUse, match="keys before RoPE cannot be had"):
        capture(model, PROMPT, tmp_path / "u", steps=4)


# ------------------------------------------------------------------------------------------------ layers
def test_layers_that_share_a_cache_name_it_and_hold_its_keys(tmp_path):
    model = families.tiny("gemma4_text")
    capture(model, PROMPT, tmp_path / "t", steps=12, k_pre=False)
    found = lanes(tmp_path / "t")
    assert [x.layer.kv_source_layer for x in found] == [None, None, 0, 1]
    for mine, source in zip(found[2:], found, strict=False):
        assert np.array_equal(mine.k, source.k)
        assert not np.array_equal(mine.q, source.q)
        assert len(mine.window_t) == len(PROMPT)  # all queries of the prompt, not only the last
    assert all(x.sound for x in verify(tmp_path / "t", model))


def test_a_window_that_only_the_cache_is_told(tmp_path):
    model = families.tiny("phimoe")
    capture(model, PROMPT, tmp_path / "t", steps=12)
    assert [(x.kind, x.window) for x in open_trace(tmp_path / "t").layers] == [("sliding", families.WINDOW)] * 2
    with pytest.raises(WrongUse, match="not causal within a window of 24"):  # its mask shows more than its cache keeps
        capture(families.tiny("moshi"), PROMPT, tmp_path / "u", steps=12, wo_norm=False)


def test_a_latent_cache_is_billed_as_it_is(tmp_path):
    capture(families.tiny("deepseek_v2", torch.bfloat16), PROMPT, tmp_path / "t", steps=4, k_pre=False)
    found = {(x.kind, x.shared_row_bytes, x.row_bytes) for x in open_trace(tmp_path / "t").layers}
    assert found == {("mla_expanded", (12 + 4) * 2, 32 // 6)}


def test_tokens_are_where_they_are_in_every_model(tmp_path):
    """A hybrid that takes a token without a position for the first one."""
    model = families.tiny("bamba")
    report = capture(model, PROMPT, tmp_path / "t", steps=12)
    with torch.no_grad():
        logits = model(torch.tensor([report.tokens]), use_cache=False).logits[0]
    assert list(report.tokens[40:]) == logits[39:-1].argmax(-1).tolist()


def failing(model: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=line) as e:
        capture(model, PROMPT, tmp_path / "t", steps=4)
    assert "\n" not in str(e.value)


def test_what_a_forward_says_is_in_the_line(tmp_path):
    failing(
        families.tiny("minimax"),
        r"MiniMaxForCausalLM: a forward with a DynamicCache fails \(MiniMax uses cache of its own",
        tmp_path,
    )


def test_layers_that_a_model_does_not_count(tmp_path):
    failing(families.tiny("zamba2"), r"Zamba2Attention attends as layer -1; expected one of the model's 3 layers", tmp_path)
