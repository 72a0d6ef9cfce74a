"""python tools/families.py [TYPE...] [--write]: which decoders of transformers can be captured, found out by capturing one of each type.

A tiny random model is made from the configuration of every causal model type; nothing is downloaded. Green is a type whose float32 captures
are within 1e-4 of float64, whose 16-bit ones are bit for bit what the model's own attention gives again, and whose tokens are those it
generates alone. A type that is refused is so by `kvsim capture`, in its own words. The tables stand in docs/capture.md: --write puts them there;
without it, types that are not what the page says are printed, and fail."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvsim.capture.check import verify
from kvsim.capture.decode import decode
from kvsim.capture.layers import Anatomy, probe
from kvsim.capture.prompt import prompt_of
from kvsim.capture.run import capture
from kvsim.errors import WrongUse

PAGE = Path(__file__).parents[1] / "docs/capture.md"
MARKS = ("<!-- make families -->", "<!-- /make families -->")
PROMPT, STEPS, WINDOW = 40, 12, 24  # the prompt is longer than a window
WORDS = 97
RUNS = (
    (torch.float32, "eager"),
    (torch.bfloat16, "eager"),
    (torch.float16, "eager"),
    (torch.float32, "sdpa"),
    (torch.bfloat16, "sdpa"),
)
KINDS = {"full": "full", "sliding": "sliding", "mla_expanded": "MLA", "linear": "linear"}

# ------------------------------------------------------------------------------------------------ tiny models
SIZES: dict[int | float | None, str] = {  # what a field is set to, in whatever configuration has it
    48: "hidden_size n_embd d_model emb_dim lru_width",
    64: "intermediate_size ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim intermediate_size_mlp dense_intermediate_size dim_ff",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads "
    "linear_num_value_heads linear_num_key_heads linear_num_heads indexer_n_heads moe_topk",
    6: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads v_head_dim",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size q_lora_rank "
    "shared_experts_intermediate_size",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim index_topk indexer_budget rotary_dim "
    "prompt_length mamba_dt_rank",
    1: "num_experts_per_tok num_experts_per_token moe_k n_group topk_group num_expert_group n_shared_experts mamba_n_groups "
    "zero_expert_num indexer_kv_heads indexer_compress_ratio bos_token_id",
    8: "head_dim dim_head qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim indexer_head_dim "
    "mamba_d_head mamba_d_state mamba_chunk_size hidden_size_per_layer_input laurel_rank index_n_heads",
    12: "kv_lora_rank mamba_n_heads",
    WORDS: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    WINDOW: "sliding_window attention_window_size sliding_window_size",
    0.3: "initializer_range init_std",  # large weights, so that attention is sharp
    0: "pad_token_id",
    None: "eos_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}


def _each(names: str, own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: own for name in names.split()}


LATENT: dict[str, Any] = {"num_key_value_heads": 6, "head_dim": 4}
SCORED = {
    "pad_token_id": None
}  # of a pad token, whose embedding is 0, an indexer scores all tokens 0: which are best is anyone's guess
DECODER = {"is_decoder": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": MIXED["layer_types"] * 2}
OWN: dict[str, dict[str, Any]] = {  # what types need beside
    **_each("axk1 deepseek_v2 deepseek_v3 glm4_moe_lite", LATENT),
    **_each("axk2 deepseek_v32 glm_moe_dsa hy_v4", LATENT | SCORED),
    **_each("longcat_flash minicpm3 mistral4 sarvam_mla youtu", LATENT),
    **_each("bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert", DECODER),
    **_each("roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl", DECODER),
    **_each("cohere2 cohere2_moe exaone4 exaone_moe flint gemma3_text kolibri1 ministral olmo3 smollm3", MIXED),
    **_each("bailing_hybrid kimi_linear", LATENT | HYBRID),
    **_each("granitemoehybrid minimax", HYBRID),
    **_each("qwen3_next qwen3_5_text qwen3_5_moe_text qwen4_exp_text", {"num_hidden_layers": 4}),
    **_each("gemma4_text gemma4_unified_text", SHARED | {"per_layer_config": {}}),
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": MIXED
    | {"rope_parameters": {x: {"rope_type": "default", "rope_theta": 1e4} for x in MIXED["layer_types"]}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 64},
    },
    "dory": {"num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2}
    | {"layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2},
    "dots3_note_text": {"num_key_value_heads": 6, "per_layer_config": {}},
    "ernie4_5_moe": {"moe_layer_end_index": 1},
    "falcon_h1": {"mamba_d_ssm": 96},
    "gemma2": {"attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 20},
    "gemma3n_text": SHARED | {"activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [64] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "sliding_attention"]},
    "mamba2": {"num_heads": 12, "head_dim": 8, "n_groups": 1},
    "mimo_v2_flash": {"num_key_value_heads": 3},  # twice as many in sliding layers
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": DECODER
    | {"pronunciation_vocab_size": 9, "shape_vocab_size": 9, "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xmod": DECODER | {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "attention_hidden_size": 48, "attention_head_dim": 8, "num_key_value_heads": 6}
    | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "n_mamba_heads": 2},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "num_key_value_heads": 6,
    }
    | {"n_mamba_heads": 12, "mamba_headdim": 8, "hybrid_layer_ids": [1], "chunk_size": 8},
}

UNTRIED = {  # types of which no tiny model could be made
    "blt": "several models in one, over bytes",
    "dots3_note": "its parts have sizes of their own in every layer; its text model is `dots3_note_text`",
    "gemma3n": "its image part needs a package more; its text model is `gemma3n_text`",
    "gemma4_assistant": "drafts tokens for another model",
    "musicgen": "an encoder, a decoder and a codec in one",
    "musicgen_melody": "an encoder, a decoder and a codec in one",
    "zamba": "its layers share one attention, as those of `zamba2`",
}


def types() -> list[str]:
    """Every model type that transformers makes a causal decoder of."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def configuration(name: str) -> Any:
    """The type's own, with small sizes, inner configurations too."""
    cls = CONFIG_MAPPING[name]
    try:
        own = cls().to_dict()
    except Exception:  # some have no default
        own = SMALL
    return cls(**(_small(own) | OWN.get(name, {})))


def _small(own: dict[str, Any]) -> dict[str, Any]:
    """Sizes for the fields that are there; an inner configuration keeps its type."""
    inner = {k: v for k, v in own.items() if k.endswith("_config") and isinstance(v, dict) and v.get("model_type")}
    given = {k: size for k, size in SMALL.items() if k in own}
    return given | {k: _small(v) | OWN.get(v["model_type"], {}) | {"model_type": v["model_type"]} for k, v in inner.items()}


def tiny(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """The same weights every time, in evaluation mode; no token ends a text. Raises what transformers raises."""
    config = configuration(name)
    with torch.device("meta"):
        numbers = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if numbers > MOST:
        raise MemoryError(f"{numbers:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for part, x in model.named_parameters():
            if "sink" in part:  # zeros would hide a sink that is left out
                x.copy_(torch.linspace(0, 3, x.numel()).reshape(x.shape))
    return model


MOST = 20_000_000  # parameters of a tiny model


# ------------------------------------------------------------------------------------------------ one type
@dataclass(frozen=True)
class Family:
    """A row of either table: what was captured, or why nothing was."""

    name: str
    layers: str = ""
    columns: tuple[str, ...] = ()  # per run: yes, or how it failed
    without: str = ""
    refused: str = ""

    @property
    def green(self) -> bool:
        return not self.refused

    @property
    def row(self) -> str:
        cells = (self.refused,) if self.refused else (self.layers, *self.columns, self.without)
        return f"| `{self.name}` | {' | '.join(cells)} |"


def examine(name: str) -> Family:
    """Captures a tiny model of this type in every dtype and with every backend it has."""
    if name in UNTRIED:
        return Family(name, refused=f"not tried: {UNTRIED[name]}")
    try:
        model = tiny(name)
    except Exception as e:  # a type that is new: it needs sizes in OWN
        return Family(name, refused=f"not tried: no tiny model can be made of it: {type(e).__name__}")
    try:
        anatomy = probe(model)
        without = _without(anatomy)
        columns = [_column(name, dtype, attention, without) for dtype, attention in RUNS]
    except WrongUse as e:
        return Family(name, refused=_reason(str(e)))
    return Family(name, _layers(anatomy), tuple(columns), ", ".join(f"`{x}`" for x in without))


def _column(name: str, dtype: torch.dtype, attention: str, without: Sequence[str]) -> str:
    """What came of a capture: yes; -, where the type has no such backend; or what was wrong with it. Raises WrongUse."""
    try:
        model = tiny(name, dtype, attention)
    except (ValueError, ImportError):
        if attention == "eager":
            raise
        return "-"
    prompt: list[int] = torch.randint(2, WORDS, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    alone = _alone(model, prompt)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "t"
        report = capture(model, prompt, out, steps=STEPS, k_pre="k_pre" not in without, wo_norm="wo_norm" not in without)
        found = verify(out, model)
    if list(report.tokens) != alone:
        return "other tokens"
    wrong = [x for x in found if not x.sound]
    return "yes" if not wrong else f"layer {wrong[0].layer} {wrong[0].apart:.1g} away"


def _alone(model: Any, prompt: list[int]) -> list[int]:
    """The prompt and what the model says when nobody watches; in float32 without a cache, the whole text for every token: in 16 bits
    that rounds otherwise."""
    with torch.no_grad():
        if model.dtype != torch.float32:
            return decode(model, prompt_of(prompt), STEPS)
        tokens = list(prompt)
        for _ in range(STEPS):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens


def _without(anatomy: Anatomy) -> list[str]:
    """What its layers do not have, as options of capture."""
    no_key = any(x.rope is not None and x.id in anatomy.modules and x.id not in anatomy.turned for x in anatomy.layers)
    no_norm = set(anatomy.modules) - set(anatomy.projections)
    return [name for name, absent in (("k_pre", no_key), ("wo_norm", no_norm)) if absent]


def _layers(anatomy: Anatomy) -> str:
    """Kinds in the order they appear, and what is special."""
    kinds = list(dict.fromkeys(KINDS[x.kind] for x in anatomy.layers))
    able = [x for x in anatomy.layers if x.id in anatomy.modules]
    special = {
        "soft-cap": any(x.softcap is not None for x in able),
        "sinks": any(x.sinks is not None for x in able),
        "shared": any(x.kv_source_layer is not None for x in able),
        "indexer": bool(anatomy.indexers),
    }
    return ", ".join(kinds + [name for name, there in special.items() if there])


def _reason(line: str) -> str:
    """Without the layer and the model's name, which a table of types does not need."""
    return re.sub(r"^(layer \d+: )?(\w+: )?", "", line).split(";")[0].replace("|", "/")


# ------------------------------------------------------------------------------------------------ the page
def tables(families: Sequence[Family]) -> str:
    """Both tables, with a line above them that says what ran."""
    green, refused = ([f for f in families if f.green == is_green] for is_green in (True, False))
    heads = " | ".join(f"{str(dtype).removeprefix('torch.')} {attention}" for dtype, attention in RUNS)
    lines = [
        f"transformers {transformers.__version__}: {len(green)} of {len(families)} model types are captured.",
        "",
        f"| model type | layers | {heads} | without |",
        "|---" * (3 + len(RUNS)) + "|",
        *(f.row for f in green),
        "",
        "| not captured | why |",
        "|---|---|",
        *(f.row for f in refused),
    ]
    return "\n".join(lines) + "\n"


def page_tables() -> str:
    """What docs/capture.md says."""
    return PAGE.read_text().split(MARKS[0] + "\n")[1].split(MARKS[1])[0]


def page_rows() -> dict[str, str]:
    """{type: its row in docs/capture.md}."""
    return {line.split("`")[1]: line for line in page_tables().splitlines() if line.startswith("| `")}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="which decoders of transformers can be captured, found out by capturing one of each type"
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="only these")
    parser.add_argument("--write", action="store_true", help="put the tables of all types into docs/capture.md")
    asked = parser.parse_args(words)
    quiet()
    known, found, wrong = page_rows(), [], 0
    for name in types() if asked.write else asked.types or types():
        found.append(examine(name))
        as_said = known.get(name) == found[-1].row
        wrong += not as_said
        print(found[-1].row + ("" if as_said else f"  <- the page: {known.get(name, 'nothing')}"), flush=True)
    print(f"{len(found)} model types, {wrong} not as docs/capture.md says")
    if asked.write:
        PAGE.write_text(PAGE.read_text().replace("\n".join((MARKS[0], page_tables())), "\n".join((MARKS[0], tables(found)))))
    return 1 if wrong and not asked.write else 0


def quiet() -> None:
    """No network, no word from transformers about sizes that no checkpoint has, one thread."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
