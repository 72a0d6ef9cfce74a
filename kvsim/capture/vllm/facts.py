"""What a trace tells of an engine of vLLM, read off its attention and rotary modules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvsim.capture.bits import dtype_name
from kvsim.capture.serving import Engine
from kvsim.errors import WrongUse
from kvsim.geometry import ITEMSIZE

Row = dict[str, Any]


def engine(worker: Any, layers: Mapping[str, Any], chosen: Sequence[int] | None) -> Engine:
    """layers: attention modules by name; chosen: ids of those to be captured (None: all). Raises WrongUse."""
    import vllm

    from kvsim.capture.source import machine, source_of

    config, model = worker.vllm_config, worker.get_model()
    dtype = dtype_name(config.model_config.dtype)
    ids = {layer_id(name) for name in layers}
    if unknown := sorted(set(chosen or ()) - ids):
        raise WrongUse(f"layers {unknown}: not among the attention layers of this model, {sorted(ids)}")
    modules = dict(model.named_modules())
    text = config.model_config.hf_text_config
    rows = [
        layer_row(name, m, dtype, rope_of(modules.get(name.rpartition(".")[0]), text))
        | {"captured": chosen is None or layer_id(name) in chosen}
        for name, m in layers.items()
    ]
    told = machine(SimpleNamespace(device=worker.device))
    told["versions"]["vllm"] = vllm.__version__
    told |= {
        "tool": "kvsim.capture.vllm",
        "attention_backend": ", ".join(sorted({m.backend.name for m in layers.values()})),
        "seed": config.model_config.seed,
        "options": {"max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens, "steps": None},
    }
    like = SimpleNamespace(config=config.model_config.hf_config, dtype=config.model_config.dtype)
    return Engine(sorted(rows, key=lambda row: int(row["layer"])), dtype, source_of(like), told)


def layer_id(name: str) -> int:
    """The one number in a module's name: model.layers.7.self_attn.attn -> 7. Raises WrongUse."""
    found = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(found) != 1:
        raise WrongUse(f"layer {name}: expected one number in its name, the layer's; this model cannot be captured")
    return int(found[0])


def layer_row(name: str, module: Any, dtype: str, rope: str | None) -> Row:
    """A row of the table `layers` from an attention module."""
    impl = module.impl
    window, softcap, sinks = module.sliding_window, getattr(impl, "logits_soft_cap", None), getattr(impl, "sinks", None)
    key_dim, value_dim = module.head_size, getattr(module, "head_size_v", module.head_size)
    return {
        "layer": layer_id(name),
        "kind": "full" if window is None else "sliding",
        "q_heads": module.num_heads,
        "kv_heads": module.num_kv_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "scale": float(impl.scale),
        "softcap": softcap or None,  # vLLM writes 0 for none
        "window": window,
        "sinks": None if sinks is None else sinks.detach().double().flatten().tolist(),
        "rope": rope,
        "row_bytes": (key_dim + value_dim) * ITEMSIZE[dtype],
        "kv_source_layer": None,
        "captured": True,
    }


def rope_of(attention: Any, config: Any) -> str | None:
    """What the rotary module beside a layer's attention does, as JSON; None in a model without RoPE. Anything but the plain kind is
    named as a scaling, so that nobody applies it again as if it were plain; so is one that is not where it is looked for."""
    rotary = getattr(attention, "rotary_emb", None)
    if rotary is None and not getattr(config, "rope_parameters", None):
        return None
    kind = "unknown" if rotary is None else type(rotary).__name__
    plain = kind == "RotaryEmbedding"
    return json.dumps(
        {
            "kind": "default" if plain else kind,
            "theta": float(getattr(rotary, "base", 0.0)),
            "rotary_dim": int(getattr(rotary, "rotary_dim", 0)),
            "layout": "half" if getattr(rotary, "is_neox_style", False) else "interleaved",
            "scaling": None if plain else {"kind": kind},
            "magnitude": 1.0,
        }
    )


def mode(sampling: Any) -> str:
    """How the tokens of a request are chosen, as the table `requests` names it."""
    return "greedy" if sampling.temperature == 0 else "sampled"
