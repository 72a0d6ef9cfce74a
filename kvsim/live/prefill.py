"""The prompt, once for all rows: what every layer's attention was given, and the side tables that policies ask for."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvsim.capture.hooks import attending
from kvsim.capture.layers import Anatomy, cached
from kvsim.capture.prompt import Prompt
from kvsim.capture.recorder import Keep, Recorder
from kvsim.geometry import K_PRE, PREFILL_MASS, Q_STATS, WO_NORM, Layer, Need, QueryStats
from kvsim.live.growing import Prefix
from kvsim.trace.bits import widen


def recorded(needs: frozenset[Need], prompt: int) -> Keep:
    """What a prefill has to keep for policies of these needs."""
    rows = max((n.rows for n in needs if n.name == "window"), default=0)
    return Keep(min(rows, prompt), PREFILL_MASS in needs, K_PRE in needs, WO_NORM in needs, q_stats=Q_STATS in needs)


@dataclass(eq=False)
class Prefilled:
    """A prompt that went through the model. logits [vocabulary]: of its last token; cache: for as many rows as one asks (`cache_of`)."""

    prompt: Prompt
    layers: dict[int, Prefix]
    logits: torch.Tensor
    cache: Any

    def cache_of(self, rows: int) -> Any:
        """A cache for `rows` sequences. Attention layers keep nothing in it, for kvsim holds their rows; others start where the prompt ended."""
        found = copy.copy(self.cache)
        found.layers = [
            Passing(self.prompt.prefill) if i in self.layers else _repeated(layer, rows)
            for i, layer in enumerate(self.cache.layers)
        ]
        return found


class Passing(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A cache layer that hands on what it is given and only counts."""

    def __init__(self, seen: int):
        super().__init__()
        self.count = seen

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any) -> tuple[Any, Any]:
        self.count += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.count + query_length, 0


def _repeated(layer: Any, rows: int) -> Any:
    """A layer that remembers a state of its own (linear attention, convolutions), for `rows` sequences."""
    found = copy.deepcopy(layer)
    if hasattr(found, "reorder_cache"):
        found.reorder_cache(torch.zeros(rows, dtype=torch.long))
    return found


def prefill(
    model: Any, anatomy: Anatomy, layers: Sequence[Layer], prompt: Prompt, keep: Keep, chunk: int | None = None
) -> Prefilled:
    """One forward over the prompt, or `chunk` tokens at a time. layers: bytes as billed. Raises WrongUse, as a capture would."""
    gathered = Gathered()
    recorder = Recorder(layers, anatomy.projections, anatomy.backend, prompt.prefill, keep, gathered.put)
    cache = DynamicCache(config=model.config)
    options = cached(model, cache)
    with attending(model, recorder.see, recorder.before), torch.no_grad():
        for i in range(0, prompt.prefill, chunk or prompt.prefill):
            ids = prompt.tokens[i : min(i + (chunk or prompt.prefill), prompt.prefill)]
            logits = model(input_ids=torch.tensor([ids], device=model.device), **options).logits[0, -1]
    return Prefilled(prompt, {x.id: gathered.prefix(x) for x in layers}, logits, cache)


@dataclass(eq=False)
class Gathered:
    """Rows that a Recorder would have put into a trace, once they have left the device (capture.staging)."""

    parts: dict[tuple[str, int], list[NDArray[np.float32]]] = field(default_factory=dict)
    stats: dict[int, QueryStats] = field(default_factory=dict)

    def put(self, table: str, request: int, layer: int, *rows: Any) -> None:
        if table == "q_stats":
            self.stats[layer] = rows[0]
            return
        if table == "kv":
            _, k, v, k_pre = rows
            named = {"k": k, "v": v, "k_pre": k_pre}
        elif table == "q":
            named = {"q": rows[1]}
        elif table == "values":
            named = {"wo_norm": rows[-1]}
        else:
            named = {"mass": rows[0]}
        for name, x in named.items():
            if x is not None:
                self.parts.setdefault((name, layer), []).append(widen(x()).astype(np.float32))

    def prefix(self, layer: Layer) -> Prefix:
        """All that came of one layer."""

        def joined(name: str, axis: int) -> Any:
            parts = self.parts.pop((name, layer.id), None)
            return None if parts is None else np.ascontiguousarray(np.concatenate(parts, axis=axis))

        window = joined("q", 0)
        return Prefix(
            layer=layer,
            k=joined("k", 1),
            v=joined("v", 1),
            window_q=np.zeros((0, layer.q_heads, layer.key_dim), np.float32) if window is None else window,
            k_pre=joined("k_pre", 1),
            mass=joined("mass", 1),
            wo_norm=joined("wo_norm", 1),
            q_stats=self.stats.get(layer.id),
        )
