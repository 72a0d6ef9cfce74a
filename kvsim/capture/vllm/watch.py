"""One engine's worker, step by step: which requests the scheduler sends, which rows are theirs, what each layer attends to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any

import torch

from kvsim.capture.serving import Part, Serving
from kvsim.capture.vllm import FOLDER, LAYERS, facts, refuse
from kvsim.errors import WrongUse


class Watch:
    """Of one process. A step is one call of a worker's execute_model; attention outside of it is warm-up."""

    def __init__(self) -> None:
        self.serving: Serving | None = None
        self.ids: dict[str, int] = {}  # layers by their names
        self._scheduled: Mapping[str, int] | None = None  # request -> tokens, inside a step
        self._runner: Any = None
        self._parts: Sequence[Part] | None = None

    def step(self, worker: Any, scheduled: Any, execute: Callable[[], Any]) -> Any:
        """Carries out one step. Raises WrongUse: something in it cannot be captured; what was written stays partial."""
        try:
            self._begin(worker, scheduled)
            result = execute()
            if self._scheduled and self._parts is None:
                raise WrongUse(
                    "a forward showed no attention (a full CUDA graph, or another backend?); run vLLM with enforce_eager=True"
                )
            return result
        except BaseException:
            self.abandon()
            raise
        finally:
            self._scheduled = self._parts = self._runner = None

    def built(self, common: Any) -> None:
        """At the metadata of a group of layers, before any of them attends."""
        if not self._scheduled or self._parts is not None or self.serving is None:
            return
        self._parts = parts_of(common, order_of(self._runner, common), self._scheduled)
        self.serving.forward(self._parts, _tokens(self._runner, sum(p.count for p in self._parts)))

    def attended(self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """One layer. q [n, Hq, dk], k [n, Hkv, dk], v [n, Hkv, dv], out [n, Hq, dv] or [n, Hq · dv]; rows beyond the parts are padding."""
        if self._parts is None or self.serving is None:
            return
        self.serving.attention(self.ids[layer.layer_name], q, k, v, out.reshape(out.shape[0], q.shape[1], -1))

    def close(self) -> None:
        """Every request ends."""
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.close()

    def abandon(self) -> None:
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.abandon()

    def _begin(self, worker: Any, scheduled: Any) -> None:
        if self.serving is None and not (os.environ.get(FOLDER) and scheduled.num_scheduled_tokens):
            return  # no longer asked for, or nothing to capture
        serving = self.serving or self._open(worker.worker)
        refuse.step(scheduled)
        for request in sorted(scheduled.finished_req_ids):
            serving.end(request)
        for new in scheduled.scheduled_new_reqs:
            refuse.request(new)
            serving.begin(new.req_id, new.prompt_token_ids, facts.mode(new.sampling_params), new.sampling_params.max_tokens or 1)
        self._scheduled, self._runner = scheduled.num_scheduled_tokens, worker.worker.model_runner

    def _open(self, worker: Any) -> Serving:
        config = worker.vllm_config
        refuse.configuration(config)
        modules = config.compilation_config.static_forward_context
        layers = {name: m for name, m in modules.items() if hasattr(m, "impl") or "Attention" in type(m).__name__}
        refuse.layers(layers, config)
        self.ids = {name: facts.layer_id(name) for name in layers}
        chosen = os.environ.get(LAYERS)
        engine = facts.engine(worker, layers, [int(i) for i in chosen.split(",")] if chosen else None)
        self.serving = Serving(os.environ[FOLDER], engine)
        return self.serving


WATCH = Watch()


def wrap(wrapper: Any) -> bool:
    """Has the class that all executors run workers by tell WATCH of devices, steps and the end -> whether it did not before."""
    if hasattr(wrapper, "kvsim_watched"):
        return False
    execute_model, init_device, shutdown = wrapper.execute_model, wrapper.init_device, wrapper.shutdown

    @wraps(init_device)
    def init(self: Any) -> Any:
        if os.environ.get(FOLDER):
            refuse.configuration(self.vllm_config)
        return init_device(self)

    @wraps(execute_model)
    def execute(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        return WATCH.step(self, scheduler_output, lambda: execute_model(self, scheduler_output, *args, **options))

    @wraps(shutdown)
    def stop(self: Any) -> Any:
        WATCH.close()
        return shutdown(self)

    wrapper.init_device, wrapper.execute_model, wrapper.shutdown, wrapper.kvsim_watched = init, execute, stop, True
    return True


def order_of(runner: Any, common: Any) -> list[str]:
    """The ids of the requests in the order of their rows."""
    count = int(common.num_reqs)
    if getattr(common, "req_idx", None) is not None:  # the second model runner numbers them in a table of its own
        return [runner.req_states.index_to_req_id[int(i)] for i in common.req_idx[:count]]
    return list(runner.input_batch.req_ids[:count])


def parts_of(common: Any, order: Sequence[str], scheduled: Mapping[str, int]) -> list[Part]:
    """What each request has in a forward, by vLLM's common attention metadata. Raises WrongUse: it does not agree with what was
    scheduled, or positions are not those that follow one another."""
    count = len(order)
    ends = [int(i) for i in common.query_start_loc_cpu[: count + 1]]
    totals = [int(i) for i in common.seq_lens[:count]]
    positions = common.positions
    if positions is None or positions.ndim != 1:
        raise WrongUse("positions are not one number a token (M-RoPE?); only text models can be captured")
    parts = []
    for request, (first, end), total in zip(order, pairwise(ends), totals, strict=True):
        if request not in scheduled or end == first:  # padding
            continue
        part = Part(request, total - (end - first), end - first)
        if scheduled[request] != part.count or positions[first:end].tolist() != list(range(part.start, total)):
            raise WrongUse(
                f"request {request}: rows {first} to {end - 1} have positions {positions[first:end].tolist()}; expected "
                f"{scheduled[request]} that end at {total - 1}"
            )
        parts.append(part)
    if {p.request for p in parts} != {name for name, n in scheduled.items() if n}:
        raise WrongUse(f"a forward of {[p.request for p in parts]}; scheduled were {sorted(scheduled)}")
    return parts


def _tokens(runner: Any, count: int) -> list[int]:
    """The ids that this forward embeds."""
    if hasattr(runner, "input_buffers"):
        return list(runner.input_buffers.input_ids[:count].tolist())
    return list(runner.input_ids.gpu[:count].tolist())
