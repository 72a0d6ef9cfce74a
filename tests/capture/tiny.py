"""Random models small enough to run in a test, one for each kind of attention. Large initial weights, so that attention is sharp."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW = 24
VOCABULARY = 97
PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 20},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {},
    "gpt_neox": {"num_key_value_heads": 6},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256},
    "deepseek_v3": LATENT | EXPERTS | {"num_key_value_heads": 6, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    "qwen3_next": LINEAR | EXPERTS | {"num_experts": 2, "shared_expert_intermediate_size": 16, "num_hidden_layers": 4},
}
INDEX = {"index_n_heads": 8, "index_head_dim": 8, "index_topk": 12}
SCORED = {
    "num_key_value_heads": 6,
    "pad_token_id": None,
}  # the embedding of a pad token is 0, and with it all its scores, which tie
INDEXED: dict[str, dict[str, Any]] = {name: LATENT | INDEX | SCORED for name in ("deepseek_v32", "glm_moe_dsa")}
OWN_HEADS = {"phi3", "gpt_neox", "deepseek_v3", *INDEXED}  # their head size follows from others


def model(family: str, dtype: torch.dtype = torch.float32, attention: str = "eager", **other: Any) -> Any:
    """The same weights every time, in evaluation mode; no token ends a text."""
    given = PLAIN | (FAMILIES | INDEXED)[family] | other
    if family in OWN_HEADS:
        given.pop("head_dim")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given), attn_implementation=attention).to(dtype).eval()
    made.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, x in made.named_parameters():
            if name.endswith("sinks"):  # zeros would hide a sink that is left out
                x.copy_(torch.linspace(0, 3, len(x)))
    return made


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(model: Any, prompt: list[int], steps: int) -> list[int]:
    """What the model says after a prompt when nobody watches: `steps` tokens."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=steps, do_sample=False
        )
    return out[0, len(prompt) :].tolist()
