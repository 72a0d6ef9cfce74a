"""What cannot be captured truthfully, refused by name before or at the forward that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvsim.capture.hooks import Call, is_flash
from kvsim.errors import WrongUse
from kvsim.geometry import Layer

CACHED = ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer", "LinearAttentionLayer") + (
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
HIDDEN = -1e4  # and below: a logit that no softmax shows
FORWARD = ("input_ids", "attention_mask", "position_ids")  # of every causal model, in this order


def model(model: Any) -> None:
    """Raises WrongUse: compiled, in training mode, spread over devices, or not a decoder."""
    compiled = hasattr(model, "_orig_mod") or hasattr(model.forward, "_torchdynamo_orig_callable")
    if compiled or getattr(model, "_compiled_call_impl", None) is not None:
        raise WrongUse("the model is compiled, and compiled code does not run the hooks; capture the model as it was before")
    if not hasattr(model, "config"):
        raise WrongUse(f"{type(model).__name__} is not a transformers model")
    if getattr(model.config, "is_encoder_decoder", False):
        raise WrongUse(f"{type(model).__name__} is an encoder-decoder; expected a causal decoder")
    if model.training:
        raise WrongUse("the model is in training mode, where dropout changes attention; call model.eval() first")


def length(model: Any, tokens: int) -> None:
    """Raises WrongUse: more tokens than the model has positions."""
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise WrongUse(
            f"prompt and steps make {tokens} tokens, the model has {longest} positions; shorten the prompt or take fewer steps"
        )


def tokens(model: Any, ids: Sequence[int]) -> None:
    """Raises WrongUse: a token that the model has no embedding for."""
    known = model.get_input_embeddings().num_embeddings
    unknown = next((i for i in ids if not 0 <= i < known), None)
    if unknown is not None:
        raise WrongUse(f"token {unknown} in the prompt, the model has {known} of them; take the model's own tokenizer")


def forward(args: tuple[Any, ...], options: dict[str, Any], seen: int, prompt: int) -> None:
    """Looks at the arguments of a forward of the model; `seen` tokens went before. Raises WrongUse."""
    given = dict(zip(FORWARD, args, strict=False)) | options
    ids = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if ids is None:
        return
    batch, new = ids.shape[:2]
    if batch != 1:
        raise WrongUse(f"a forward of batch {batch}; capture takes one sequence: no batches, and no beam search")
    if seen < prompt < seen + new or (seen >= prompt and new > 1):
        raise WrongUse(
            f"a forward of {new} tokens after {seen} of a prompt of {prompt}: assisted, prompt-lookup or other speculative decoding "
            "would record rejected tokens; turn it off, or give the prompt's true length"
        )
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool(mask.all()):
        raise WrongUse("the attention mask hides tokens of the prompt (left padding?); give the prompt without padding")
    cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
    if cache is not None:
        kinds = {type(cache).__name__} - {"DynamicCache"} | {type(x).__name__ for x in cache.layers} - set(CACHED)
        if kinds:
            raise WrongUse(
                f"the cache is {', '.join(sorted(kinds))}; expected a DynamicCache: no static, quantised or other cache"
            )


def call(call: Call, layer: Layer, start: int, backend: str) -> None:
    """Looks at one attention call of new tokens from position `start`. Raises WrongUse: its keys or its mask are not those of
    plain causal attention over all positions so far, in a sliding layer over its window, with an indexer over what it lets through."""
    new, keys = call.q.shape[2], call.k.shape[2]
    total = start + new
    shape = (call.q.shape[1], *call.k.shape[1::2], call.v.shape[3])
    if shape != (layer.q_heads, layer.kv_heads, layer.key_dim, layer.value_dim):
        raise WrongUse(f"layer {layer.id}: the shape of its heads changed during the capture")
    if keys != total and not (layer.window is not None and keys == min(total, layer.window - 1 + new)):
        raise WrongUse(
            f"layer {layer.id} attends to {keys} keys after {total} tokens: a static, cropped or reused cache, which capture cannot read"
        )
    read = None if call.indexed is None else call.indexed.read()
    if read is not None:
        causal = not is_flash(backend) and call.mask is not None and _is_causal(call.mask, layer, start, total - keys, read)
    elif is_flash(backend):
        causal = call.mask is None or bool(call.mask.all())
    elif call.mask is None:
        causal = (new == 1 or (new == keys and backend == "sdpa")) and (layer.window is None or keys <= layer.window)
    else:
        causal = _is_causal(call.mask, layer, start, total - keys)
    if not causal:
        within = "" if layer.window is None else f" within a window of {layer.window}"
        raise WrongUse(
            f"layer {layer.id}: its mask is not causal{within}: padding, chunks, prefixes and sparse attention cannot be captured"
        )


def _is_causal(mask: torch.Tensor, layer: Layer, start: int, first_key: int, read: torch.Tensor | None = None) -> bool:
    """Each query is shown the keys up to its own, in a sliding layer the last `window` of them, and of those what it may read [S, T].
    mask [1, 1 or Hq, S, T]: booleans, or 0 where shown and a large negative number elsewhere."""
    if mask.ndim != 4:
        return False
    t = torch.arange(start, start + mask.shape[2], device=mask.device)[:, None]
    pos = torch.arange(first_key, first_key + mask.shape[3], device=mask.device)
    visible = pos <= t if layer.window is None else (pos <= t) & (pos > t - layer.window)
    visible = visible if read is None else visible & read
    if mask.dtype == torch.bool:
        return bool((mask == visible).all())
    return bool(torch.where(visible, mask == 0, mask <= HIDDEN).all())
