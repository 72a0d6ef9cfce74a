"""What cannot be captured from vLLM truthfully, refused by name as the engine starts or at the step that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.capture.vllm.facts import layer_id
from kvsim.errors import WrongUse

ALONE = {
    "tensor_parallel_size": "tensor parallelism: each process sees its own heads only",
    "pipeline_parallel_size": "pipeline parallelism: each process sees its own layers only",
    "data_parallel_size": "data parallelism: each process would write to the same folder",
    "decode_context_parallel_size": "context parallelism: each process sees its own tokens only",
    "prefill_context_parallel_size": "context parallelism: each process sees its own tokens only",
}


def configuration(config: Any) -> None:
    """Looks at a VllmConfig before the model is loaded. Raises WrongUse."""
    for name, why in ALONE.items():
        if getattr(config.parallel_config, name, 1) > 1:
            raise WrongUse(f"{name} {getattr(config.parallel_config, name)}: {why}; run vLLM with {name}=1")
    model, cache = config.model_config, config.cache_config
    for wrong, line in (
        (
            model.use_mla,
            "the model has MLA, whose latents vLLM attends to by another path; capture it with kvsim capture (transformers)",
        ),
        (getattr(model, "is_encoder_decoder", False), "the model is an encoder-decoder; expected a causal decoder"),
        (model.runner_type != "generate", f"the engine runs {model.runner_type}; expected generation"),
        (
            config.speculative_config is not None,
            "speculative decoding would record rejected tokens; run vLLM without speculative_config",
        ),
        (
            getattr(config.parallel_config, "use_ubatching", False),
            "a forward in several micro-batches (DBO) cannot be followed; run vLLM with enable_dbo=False",
        ),
        (
            cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
            f"the KV cache is {cache.cache_dtype} and attention reads what was rounded to it; run vLLM with kv_cache_dtype='auto'",
        ),
        (
            getattr(cache, "kv_sharing_fast_prefill", False),
            "kv_sharing_fast_prefill leaves out tokens of the prompt; run vLLM without it",
        ),
        (
            full_graphs(config),
            "full CUDA graphs are replayed without Python; run vLLM with enforce_eager=True, or cudagraph_mode PIECEWISE",
        ),
    ):
        if wrong:
            raise WrongUse(line)


def full_graphs(config: Any) -> bool:
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and bool(mode.has_full_cudagraphs())


def layers(found: Mapping[str, Any], config: Any) -> None:
    """Looks at the attention modules of a model by name. Raises WrongUse: one that is not plain causal self-attention, or layers
    of the model among which some do not attend."""
    for name, m in found.items():
        kind = type(m).__name__
        for wrong, what in (
            (kind != "Attention", f"{kind} is not plain attention"),
            (getattr(m, "attn_type", "decoder") != "decoder", f"{getattr(m, 'attn_type', '')} attention"),
            (getattr(m, "kv_sharing_target_layer_name", None) is not None, "it attends to the cache of another layer"),
            (getattr(getattr(m, "impl", None), "alibi_slopes", None) is not None, "ALiBi adds a position bias"),
            (getattr(m, "query_quant", None) is not None, "its queries are quantised"),
        ):
            if wrong:
                raise WrongUse(f"layer {name}: {what}; only full and sliding attention can be captured")
    count = config.model_config.hf_text_config.num_hidden_layers
    ids = sorted(layer_id(name) for name in found)
    if ids != list(range(count)):
        raise WrongUse(f"attention in layers {ids} of {count}: hybrid models are captured with kvsim capture (transformers)")


def step(scheduled: Any) -> None:
    """Looks at what is to be run next. Raises WrongUse."""
    if scheduled.scheduled_spec_decode_tokens:
        raise WrongUse("speculative decoding would record rejected tokens; run vLLM without speculative_config")
    if again := sorted(scheduled.scheduled_cached_reqs.resumed_req_ids):
        raise WrongUse(
            f"request {again[0]} was preempted and is computed again; give vLLM more KV cache, or fewer requests at a time"
        )


def request(new: Any) -> None:
    """Looks at a request before its first token. Raises WrongUse."""
    if new.num_computed_tokens:
        raise WrongUse(
            f"request {new.req_id}: its first {new.num_computed_tokens} tokens come from the prefix cache and pass no layer; run vLLM with "
            "enable_prefix_caching=False"
        )
    if new.prompt_token_ids is None or new.mm_features:
        raise WrongUse(f"request {new.req_id} has images, sound or embeddings; only prompts of tokens can be captured")
    if new.sampling_params is None:
        raise WrongUse(f"request {new.req_id} generates nothing; expected sampling parameters")
