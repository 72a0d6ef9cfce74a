"""What the adapter sees of vLLM 0.32, by hand: its objects with the attributes that are read, around the engine of random numbers.

The names and shapes are those of vllm/v1 (SchedulerOutput, CommonAttentionMetadata, WorkerWrapperBase, an attention backend)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvsim.capture.serving import Part
from kvsim.capture.vllm.backend import watched
from kvsim.capture.vllm.watch import wrap
from tests.capture.serving_engine import DIM, LAYERS, ids, rows, tokens


class Attention:
    """An attention module of a layer, as vLLM's of this name."""

    def __init__(self, layer: int) -> None:
        spec = LAYERS[layer]
        self.layer_name = f"model.layers.{layer}.self_attn.attn"
        self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v = spec.q_heads, spec.kv_heads, DIM, DIM
        self.sliding_window = spec.window
        self.attn_type, self.kv_sharing_target_layer_name, self.query_quant = "decoder", None, None
        sinks = None if spec.sinks is None else torch.tensor(spec.sinks)
        self.impl: Any = SimpleNamespace(scale=spec.scale, logits_soft_cap=spec.softcap or 0, sinks=sinks, alibi_slopes=None)
        self.backend = SimpleNamespace(name="CPU_ATTN")


class RotaryEmbedding:
    base, rotary_dim, is_neox_style = 10000, DIM, True


class Impl:
    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any) -> Any:
        if attn_metadata is not None:
            output.copy_(attn_metadata.out[layer.layer_name].reshape(output.shape))
        return output


class Builder:
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return SimpleNamespace(out={})


class Backend:
    @staticmethod
    def get_impl_cls() -> Any:
        return Impl

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder


def config(**changes: Any) -> Any:
    """A VllmConfig; changes: "part.name" -> value."""
    text = SimpleNamespace(num_hidden_layers=len(LAYERS), rope_parameters={"rope_theta": 10000.0})
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, use_ubatching=False
        ),
        model_config=SimpleNamespace(use_mla=False, runner_type="generate", dtype=torch.float32, seed=0, hf_text_config=text),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=None, static_forward_context={}),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
        speculative_config=None,
    )
    hf = SimpleNamespace(to_dict=lambda: {"model_type": "random"}, _name_or_path="/somewhere/random")
    made.model_config.hf_config = hf
    for name, value in changes.items():
        *path, last = name.split(".")
        part = made
        for step in path:
            part = getattr(part, step)
        setattr(part, last, value)
    return made


def metadata(*parts: Part, padding: int = 0, **changes: Any) -> Any:
    """The common attention metadata of a forward; requests beyond num_reqs and tokens behind the last are padding."""
    ends = np.cumsum([0, *(p.count for p in parts)])
    positions = [t for p in parts for t in range(p.start, p.start + p.count)]
    made = SimpleNamespace(
        num_reqs=len(parts),
        query_start_loc_cpu=torch.tensor([*ends, *[ends[-1]] * padding]),
        seq_lens=torch.tensor([*(p.start + p.count for p in parts), *[0] * padding]),
        positions=torch.tensor([*positions, *[0] * padding]),
        req_idx=None,
    )
    vars(made).update(changes)
    return made


def new(request: str, prompt: int, **changes: Any) -> Any:
    """A request as the scheduler first sends it."""
    made = SimpleNamespace(
        req_id=request,
        prompt_token_ids=tokens(request)[:prompt],
        num_computed_tokens=0,
        mm_features=[],
        sampling_params=SimpleNamespace(temperature=0.0, max_tokens=8),
    )
    vars(made).update(changes)
    return made


def scheduled(*parts: Part, begins: Any = (), ends: Any = (), **changes: Any) -> Any:
    """What the scheduler sends for a step."""
    made = SimpleNamespace(
        scheduled_new_reqs=list(begins),
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        num_scheduled_tokens={p.request: p.count for p in parts},
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(ends),
    )
    vars(made).update(changes)
    return made


class Wrapper:
    """The class that all executors run workers by, with a worker whose model is the engine of random numbers."""

    def __init__(self, vllm_config: Any, backend: Any, silent: tuple[int, ...] = ()) -> None:
        self.vllm_config, self.silent = vllm_config, silent
        self.layers = [Attention(x.id) for x in LAYERS]
        vllm_config.compilation_config.static_forward_context = {m.layer_name: m for m in self.layers}
        self.impl, self.builder = backend.get_impl_cls()(), backend.get_builder_cls()()
        model = torch.nn.Module()
        model.model = torch.nn.Module()
        model.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in LAYERS)
        for layer in model.model.layers:
            layer.self_attn = torch.nn.Module()
            layer.self_attn.rotary_emb = RotaryEmbedding()
        self.runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[]), input_ids=SimpleNamespace(gpu=None))
        self.worker = SimpleNamespace(
            vllm_config=vllm_config, get_model=lambda: model, model_runner=self.runner, device=torch.device("cpu")
        )
        self.parts: list[Part] = []  # of the next step, in the order of its rows

    def init_device(self) -> None: ...

    def shutdown(self) -> None: ...

    def execute_model(self, scheduler_output: Any) -> str:
        if not scheduler_output.num_scheduled_tokens:
            return "nothing to run"
        self.runner.input_batch.req_ids = [p.request for p in self.parts] + ["left over from an earlier step"]
        self.runner.input_ids.gpu = torch.tensor([*ids(self.parts), 0, 0])
        given = [
            self.builder.build(0, metadata(*self.parts, padding=2)) for _ in LAYERS
        ]  # layers with a window are a group of their own
        self.forward(given[0], self.parts)
        return "ran"

    def forward(self, given: Any, parts: list[Part]) -> None:
        for m, spec in zip(self.layers, LAYERS, strict=True):
            q, k, v, out = rows(parts, spec.id, padding=2)
            if spec.id not in self.silent:
                if given is not None:
                    given.out[m.layer_name] = out
                flat = torch.empty(len(q), spec.q_heads * DIM)
                self.impl.forward(m, q, k, v, None, given, flat)

    def step(self, *parts: Part, **options: Any) -> str:
        self.parts = list(parts)
        return self.execute_model(scheduled(*parts, **options))


def backend() -> Any:
    """The watched subclass of the backend above."""
    from kvsim.capture.vllm import backend as home

    return getattr(home, watched(Backend).rpartition(".")[2])


def wrapper(vllm_config: Any = None, silent: tuple[int, ...] = ()) -> Any:
    """A worker that is watched."""
    kind = type("Wrapper", (Wrapper,), {})
    assert wrap(kind)
    return kind(vllm_config or config(), backend(), silent)
