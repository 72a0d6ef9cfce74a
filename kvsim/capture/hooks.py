"""The one place that touches a running model: its attention function is overridden in place, and put back whatever happens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from kvsim.capture.indexer import Indexed, indexing
from kvsim.capture.indexer import Take as TakeIndexed
from kvsim.capture.rotary import Take, Turned, turning
from kvsim.errors import WrongUse

BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")


@dataclass(frozen=True, eq=False)
class Given:
    """What a layer's attention is called with: S new tokens, T keys as attended, the last S of them new.

    q [B, Hq, S, dk], k [B, Hkv, T, dk] and v [B, Hkv, T, dv] after RoPE and the cache."""

    module: torch.nn.Module
    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]  # scaling, sliding_window, softcap, s_aux ... as this model passes them
    turned: Turned | None
    indexed: Indexed | None


@dataclass(frozen=True, eq=False)
class Call(Given):
    """One call of a layer's attention, of one sequence, and its answer: out [1, S, Hq, dv] before W_O."""

    out: torch.Tensor


Attend = Callable[[Given, Callable[[], Any]], Any]  # what was given, the model's own function over it -> what that returns


@contextmanager
def attending(model: torch.nn.Module, see: Callable[[Call], None], before: Callable[..., None] | None = None) -> Iterator[None]:
    """While inside, every attention call of `model` is shown to `see`, and `before(args, options)` is called at each forward.

    Raises WrongUse: an attention backend that cannot be watched."""

    def watched(given: Given, own: Callable[[], Any]) -> Any:
        result = own()
        see(Call(**vars(given), out=result[0]))
        return result

    with replacing(model, watched, before):
        yield


@contextmanager
def replacing(model: torch.nn.Module, attend: Attend, before: Callable[..., None] | None = None) -> Iterator[None]:
    """While inside, `attend` answers every attention call of `model`, and `before(args, options)` is called at each forward.

    The active name is overridden in place: under a name of our own the model would be given other masks, or none. Calls of
    other models in the process pass by. Raises WrongUse: an attention backend that cannot be watched."""
    backend = backend_of(model)
    mine = {id(m) for m in model.modules()}
    files = files_of(model)
    interfaces = {id(i): i for i in (getattr(file, "ALL_ATTENTION_FUNCTIONS", None) for file in files) if i is not None}
    with ExitStack() as stack:
        take, said = stack.enter_context(turning(files)), stack.enter_context(indexing(model))
        for interface in interfaces.values():
            answer = _answered(backend, interface.get(backend), mine, take, said, attend)
            stack.enter_context(_overridden(interface, backend, answer))
        if before is not None:
            hook = model.register_forward_pre_hook(lambda _, args, options: before(args, options), with_kwargs=True)
            stack.callback(hook.remove)
        yield


def backend_of(model: Any) -> str:
    """The name of the attention implementation the model runs with. Raises WrongUse."""
    name = str(model.config.get_text_config(decoder=True)._attn_implementation)
    if name not in BACKENDS:
        raise WrongUse(
            f"attention backend {name!r}: expected {', '.join(BACKENDS)}; load the model with attn_implementation='sdpa' or 'eager'"
        )
    return name


def is_flash(backend: str) -> bool:
    """Flash attention masks causally and within a window by itself, and is given no mask."""
    return backend.startswith("flash")


def files_of(model: torch.nn.Module) -> list[ModuleType]:
    """The modeling files that the model's classes come from."""
    names = {type(m).__module__ for m in model.modules()}
    return [sys.modules[name] for name in sorted(names) if not name.startswith("torch.")]


def function_of(module: torch.nn.Module, backend: str) -> Callable[..., Any]:
    """The function this module attends with."""
    return _either(module, sys.modules[type(module).__module__].ALL_ATTENTION_FUNCTIONS.get(backend))


def _either(module: torch.nn.Module, registered: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function registered under the backend's name, else the eager one of the module's file. Raises WrongUse: neither."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] | None = registered or eager
    if found is None:
        raise WrongUse(
            f"{type(module).__name__} has no eager attention function of its own: load with attn_implementation='sdpa'"
        )
    return found


def _answered(
    backend: str,
    registered: Callable[..., Any] | None,
    mine: set[int],
    take: Take,
    said: TakeIndexed,
    attend: Attend,
) -> Callable[..., Any]:
    def answer(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        def own() -> Any:
            return _either(module, registered)(module, query, key, value, attention_mask, **options)

        if id(module) not in mine or not hasattr(module, "layer_idx"):
            return own()
        if backend == "sdpa" and (options.get("softcap") is not None or options.get("s_aux") is not None):
            raise WrongUse(
                f"layer {module.layer_idx}: sdpa leaves out soft caps and learned sinks; load the model with attn_implementation='eager'"
            )
        turned = take(module.layer_idx, key[:, :, -query.shape[2] :])
        indexed = said(module.layer_idx)
        return attend(Given(module, module.layer_idx, query, key, value, attention_mask, options, turned, indexed), own)

    return answer


@contextmanager
def _overridden(interface: Any, name: str, attend: Callable[..., Any]) -> Iterator[None]:
    """`name` means `attend` in this interface, and whatever it meant before afterwards."""
    local = interface._local_mapping
    was = local.get(name)
    local[name] = attend
    try:
        yield
    finally:
        if was is None:
            del local[name]
        else:
            local[name] = was
