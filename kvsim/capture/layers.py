"""What a model's attention layers are, read off one forward of a few tokens and not off its configuration.

Every fact is what the attention function was given; what was given is then proved by attending again in float64."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvsim.capture import refuse
from kvsim.capture.bits import dtype_name
from kvsim.capture.hooks import Call, attending, backend_of, files_of
from kvsim.capture.indexer import Form, form_of
from kvsim.capture.proof import distance
from kvsim.capture.rotary import NAME as ROTARY
from kvsim.errors import WrongUse
from kvsim.geometry import Layer
from kvsim.trace.check import OUT, ROTATED
from kvsim.trace.shapes import layers_of

TOKENS = 8  # of the probe
ROUNDING = 20  # OUT is so many times what rounding alone does
PLAIN = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")  # layer types of transformers
INDEXED = "indexed_attention"
LINEAR = ("linear_attention", "conv", "moe", "mlp")
FIXED = ("scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal")
PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The layers of a model. `layers` are all of them; modules and projections (W_O [Hq, dv, hidden]) only of those that attend."""

    rows: tuple[Row, ...]  # of the table `layers`
    layers: tuple[Layer, ...]
    modules: dict[int, torch.nn.Module]
    options: dict[int, dict[str, Any]]  # what their attention function is called with, beside tensors of the tokens
    projections: dict[int, torch.Tensor]  # absent where W_O does not read the attention output as it is
    turned: frozenset[int]  # layers whose keys before RoPE can be had
    indexers: dict[int, Form]  # of layers that attend to what a learned indexer chooses
    dtype: str
    backend: str


def probe(model: Any) -> Anatomy:
    """One forward of a few tokens. Raises WrongUse: a layer whose attention cannot be watched, or is not what it seems."""
    calls: dict[int, Call] = {}
    config = model.config.get_text_config(decoder=True)
    ids = (torch.arange(TOKENS, device=model.device) % (config.vocab_size - 1) + 1)[None]
    cache = DynamicCache(config=model.config)
    with attending(model, lambda call: _first(calls, call)), _projected(model) as inputs, torch.no_grad():
        _forward(model, ids, cache)
    if not calls:
        raise WrongUse(
            f"{type(model).__name__}: no layer calls the attention interface of transformers; capture needs a decoder that does"
        )
    dtypes = {dtype_name(t.dtype) for call in calls.values() for t in (call.q, call.k, call.v)}
    if len(dtypes) != 1:
        raise WrongUse(f"queries, keys and values come in {', '.join(sorted(dtypes))}; expected one dtype in all layers")
    dtype = dtypes.pop()
    count = range(config.num_hidden_layers)
    if beyond := sorted(set(calls) - set(count)):
        raise WrongUse(
            f"{type(calls[beyond[0]].module).__name__} attends as layer {beyond[0]}; expected one of the model's {len(count)} layers"
        )
    unseen = _rotates_unseen(model, config)
    rows = [_attending(calls, i, config, cache, unseen) if i in calls else _linear(i, config, model) for i in count]
    layers = layers_of(rows, dtype, "layers")
    backend = backend_of(model)
    for layer in layers:
        if layer.id in calls:
            _prove(calls[layer.id], layer, backend)
    return Anatomy(
        rows=tuple(rows),
        layers=layers,
        modules={i: call.module for i, call in calls.items()},
        options={i: {k: call.options[k] for k in FIXED if k in call.options} for i, call in calls.items()},
        projections={i: w for i, call in calls.items() if (w := _projection(call, inputs.get(i))) is not None},
        turned=frozenset(i for i, call in calls.items() if turns(call)),
        indexers={i: form_of(call.indexed, dtype, i) for i, call in calls.items() if call.indexed is not None},
        dtype=dtype,
        backend=backend,
    )


def cached(model: Any, cache: Any) -> dict[str, Any]:
    """The options of a forward with a cache that needs logits of its last token only; names differ between 5.x releases."""
    takes = inspect.signature(model.forward).parameters
    options = {"cache" if "cache" in takes else "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" not in takes:
        return options
    # Told as a number, some models skip the prompt's other queries in the layers that attend to another layer's cache.
    shared = getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    return options | {"logits_to_keep": torch.tensor([-1], device=model.device) if shared else 1}


def placed(model: Any, start: int, stop: int) -> dict[str, Any]:
    """The option of a forward that says where its tokens are, for models with RoPE: some would take them for the first ones. Those
    with learned positions may count from another number than 0, which only they know."""
    rotates = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
    if not rotates or "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.arange(start, stop, device=model.device)[None]}


def turns(call: Call) -> bool:
    """The rotary call before this attention call made its new keys, whole."""
    t, new = call.turned, call.k[:, :, -call.q.shape[2] :]
    return t is not None and t.before.shape == t.after.shape == new.shape and torch.equal(t.after, new)


def _forward(model: Any, ids: torch.Tensor, cache: Any) -> None:
    """Raises WrongUse: what else the model raises over a DynamicCache, a kernel, or a dtype that it does not take."""
    try:
        model(input_ids=ids, **cached(model, cache))
    except WrongUse:
        raise
    except Exception as e:
        said = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise WrongUse(
            f"{type(model).__name__}: a forward with a DynamicCache fails ({said}); this model cannot be captured"
        ) from e


def _first(calls: dict[int, Call], call: Call) -> None:
    if call.layer in calls:
        raise WrongUse(f"layer {call.layer} attends twice in one forward; expected once")
    calls[call.layer] = call


# ------------------------------------------------------------------------------------------------ rows of the layers table
def _attending(calls: dict[int, Call], i: int, config: Any, cache: Any, unseen: bool) -> Row:
    call = calls[i]
    given, kind = call.options, _type(config, i)
    stored = cache.layers[i] if i < len(cache.layers) else None
    window, sinks, softcap = given.get("sliding_window"), given.get("s_aux"), given.get("softcap")
    if window is None:  # some tell it to their mask and their cache only
        window = getattr(stored, "sliding_window", None)
    indexed = call.indexed
    if (kind not in PLAIN and indexed is None) or given.get("position_bias") is not None:
        what = f"{kind} attention" if kind not in PLAIN and indexed is None else "a position bias"
        more = " and no indexer of its own that scores single tokens" if kind == INDEXED else ""
        raise WrongUse(
            f"layer {i}: {type(call.module).__name__} has {what}{more}; only full and sliding attention, and what an indexer chooses, can be "
            "captured"
        )
    q_heads, key_dim = call.q.shape[1], call.q.shape[3]
    kv_heads, value_dim = call.v.shape[1], call.v.shape[3]
    row_bytes, shared = _row_bytes(call, stored)
    scale = given.get("scaling")
    source = next((j for j in sorted(calls) if j < i and calls[j].k.data_ptr() == call.k.data_ptr()), None)
    return {
        "layer": i,
        "kind": "mla_expanded" if shared else "full" if window is None else "sliding",
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "scale": float(key_dim**-0.5 if scale is None else scale),
        "softcap": softcap,
        "window": window,
        "sinks": None if sinks is None else sinks.detach().double().flatten().tolist(),
        "rope": _rope(call if source is None else calls[source], i, config, unseen),
        "row_bytes": row_bytes,
        "kv_source_layer": source,
        "captured": False,
        "shared_row_bytes": shared,
        "index_topk": None if indexed is None else indexed.most,
    }


def _linear(i: int, config: Any, model: Any) -> Row:
    """A layer that did not attend: nothing of it is captured, if it keeps no keys."""
    attention = [m for m in model.modules() if getattr(m, "layer_idx", None) == i and "Attention" in type(m).__name__]
    if _type(config, i) not in LINEAR and attention:
        raise WrongUse(
            f"layer {i}: {type(attention[0]).__name__} does not call the attention interface of transformers, so it cannot be captured"
        )
    sizes = dict.fromkeys(("q_heads", "kv_heads", "key_dim", "value_dim", "row_bytes"), 0)
    nothing = dict.fromkeys(("softcap", "window", "sinks", "rope", "kv_source_layer"))
    return {"layer": i, "kind": "linear", **sizes, "scale": 0.0, **nothing, "captured": False}


def _type(config: Any, i: int) -> str:
    types = getattr(config, "layer_types", None)
    return "full_attention" if types is None else str(types[i])


def _row_bytes(call: Call, stored: Any) -> tuple[int, int | None]:
    """(bytes of one cached token per kv head, rounded down; of all together, where the cache holds less than what is attended: latents)."""
    plain = (call.k.shape[3] + call.v.shape[3]) * call.k.element_size()
    if stored is None or getattr(stored, "keys", None) is None:
        return plain, None
    real = sum(x.shape[1] * x.shape[3] * x.element_size() for x in (stored.keys, stored.values))
    return max(1, real // call.k.shape[1]), real if real < plain * call.k.shape[1] else None


# ------------------------------------------------------------------------------------------------ RoPE
def _rotates_unseen(model: Any, config: Any) -> bool:
    """The model's configuration or its files speak of rotated keys, and no function in them is one that is watched."""
    names = [name.lower() for file in files_of(model) for name in vars(file)]
    if any(name.startswith(ROTARY) for name in names):
        return False
    return bool(getattr(config, "rope_parameters", None)) or any("rotary" in name for name in names)


def _rope(call: Call, i: int, config: Any, unseen: bool) -> str | None:
    """What a layer's rotary function does, as JSON; None where keys are not rotated. The layout is the one that gives the keys
    this layer was seen to attend to, "unknown" if none does, or where the model rotates in a way that is not seen."""
    if call.turned is None and not unseen:
        return None
    given = getattr(config, "rope_parameters", None) or {}
    given = given.get(_type(config, i), given)
    rest = {k: v for k, v in given.items() if k not in ("rope_type", "rope_theta", "partial_rotary_factor") and v is not None}
    rope = {"kind": given.get("rope_type", "default"), "theta": given.get("rope_theta", 0.0), "rotary_dim": call.k.shape[3]}
    rope |= {"layout": "unknown", "scaling": rest or None, "magnitude": 1.0}
    if call.turned is not None and turns(call) and call.turned.cos is not None and call.turned.sin is not None:
        cos, sin = call.turned.cos.double(), call.turned.sin.double()
        size = float((cos**2 + sin**2).mean().sqrt())
        layout, dim = _layout(
            call.turned.before.double(), call.turned.after.double(), cos, sin, ROTATED[dtype_name(call.k.dtype)]
        )
        rope |= {"rotary_dim": dim, "layout": layout, "magnitude": float(f"{size:.4g}")}
    return json.dumps(rope)


def _layout(before: torch.Tensor, after: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, near: float) -> tuple[str, int]:
    """(how pairs of numbers that turn together are laid out, how many numbers of a key turn), by trying."""
    width, full = cos.shape[-1], before.shape[-1]
    for dim in (d for d in (width, 2 * width) if d <= full):
        for layout, angles in (("half", slice(dim // 2)), ("interleaved", slice(dim // 2)), ("interleaved", slice(0, dim, 2))):
            c, s = (x.reshape(1, 1, -1, width)[..., angles] for x in (cos, sin))
            if c.shape[3] != dim // 2:
                continue
            a, b = _pairs(before, dim, layout)
            x, y = _pairs(after, dim, layout)
            error = float(((a * c - b * s - x) ** 2 + (b * c + a * s - y) ** 2).sum().sqrt())
            if error <= near * float(after.norm()) and torch.equal(before[..., dim:], after[..., dim:]):
                return layout, dim
    return "unknown", width


def _pairs(x: torch.Tensor, dim: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of each pair among the first `dim`."""
    return (x[..., : dim // 2], x[..., dim // 2 : dim]) if layout == "half" else (x[..., 0:dim:2], x[..., 1:dim:2])


# ------------------------------------------------------------------------------------------------ proofs
def _prove(call: Call, layer: Layer, backend: str) -> None:
    """The model's own output is plain attention over what it was seen to attend to. Raises WrongUse."""
    refuse.call(call, layer, start=0, backend=backend)
    error, bare = _error(call, layer), replace(layer, softcap=None, sinks=None)
    if bare != layer and error > OUT[layer.dtype] / ROUNDING and error > 2 * _error(call, bare):
        raise WrongUse(
            f"layer {layer.id}: {backend} leaves out soft caps or learned sinks; load the model with attn_implementation='eager'"
        )
    if not error <= OUT[layer.dtype]:
        raise WrongUse(
            f"layer {layer.id}: {type(call.module).__name__} is not plain attention: its output is {error:.2g} away from "
            "softmax(scale q k) v over its own keys; this model cannot be captured"
        )


def _error(call: Call, layer: Layer) -> float:
    """How far the output is from softmax(scale q k) v as the layer is described, over what its indexer chose (proof.distance)."""
    read = None if call.indexed is None else call.indexed.read()
    return distance(layer, call.q[0], call.k[0], call.v[0], call.out[0].transpose(0, 1), read)


def _projection(call: Call, read: torch.Tensor | None) -> torch.Tensor | None:
    """W_O as [Hq, dv, hidden], if it read this call's output as it was."""
    found = _output(call.module)
    if found is None or read is None or not torch.equal(read.flatten(), call.out.flatten()):
        return None
    weight = found.weight.detach()
    weight = weight if type(found).__name__ == "Conv1D" else weight.T
    return weight.reshape(call.out.shape[2], call.out.shape[3], -1)


@contextmanager
def _projected(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, what the output projection of each layer's attention last read."""
    inputs: dict[int, torch.Tensor] = {}
    hooks = []
    for m in model.modules():
        projection = _output(m) if hasattr(m, "layer_idx") else None
        if projection is not None:
            hooks.append(
                projection.register_forward_pre_hook(lambda _, args, i=m.layer_idx: inputs.__setitem__(i, args[0].detach()))
            )
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _output(module: Any) -> Any:
    """The linear map a module's output goes through, or None: quantised weights have no norm of ours."""
    for name in PROJECTIONS:
        found = getattr(module, name, None)
        weight = getattr(found, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
            return found
    return None
