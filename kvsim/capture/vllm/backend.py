"""Attention backends of vLLM, each under the name it has, with a subclass that shows what its attention was given and gave.

Rows arrive packed over the requests of a forward, after RoPE; keys and values are those of this forward only."""

from __future__ import annotations

import sys
from typing import Any

from kvsim.capture.vllm.watch import WATCH


def watched(base: Any) -> str:
    """Subclasses an attention backend, its metadata builder and its implementation -> where vLLM finds the subclass by name."""

    class Builder(base.get_builder_cls()):  # type: ignore[misc]  # known only where the engine runs
        def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **options: Any) -> Any:
            WATCH.built(common_attn_metadata)  # before super, whose metadata do not all tell which row is whose
            return super().build(common_prefix_len, common_attn_metadata, *args, **options)

    class Impl(base.get_impl_cls()):  # type: ignore[misc]  # known only where the engine runs
        def forward(
            self,
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            *args: Any,
            **options: Any,
        ) -> Any:
            result = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **options)
            if attn_metadata is not None:  # absent in warm-up
                WATCH.attended(layer, query, key, value, output)
            return result

    class Backend(base):  # type: ignore[misc]  # known only where the engine runs
        @staticmethod
        def get_impl_cls() -> Any:
            return Impl

        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

    for made, name in ((Backend, base), (Builder, base.get_builder_cls()), (Impl, base.get_impl_cls())):
        made.__name__ = made.__qualname__ = f"Watched{name.__name__}"
        setattr(sys.modules[__name__], made.__name__, made)
    return f"{__name__}.{Backend.__name__}"
