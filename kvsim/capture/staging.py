"""The way of rows from a model's device to the thread that writes them, without the model waiting for the bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from kvsim.capture.bits import bits, raw

Later = Callable[[], NDArray[Any]]  # the numbers on the host, once they are there


class Copies:
    """Copies of tensors to the host: at once from a CPU; from a GPU on a stream of their own into pinned memory, so that attention goes
    on meanwhile. The next copy waits for nothing but the numbers it takes."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, x: torch.Tensor) -> Later:
        """What waits for the copy; call it in the thread that needs the numbers. `x` may be freed or written over after this."""
        if x.device.type != "cuda":
            numbers = raw(x)
            return lambda: numbers
        x, stream = bits(x), self._stream(x.device)
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)  # a block of a pool, not reused before its copy is over
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
            there = stream.record_event()
        x.record_stream(stream)  # or its memory would be given away while it is read

        def wait() -> NDArray[Any]:
            there.synchronize()
            return host.numpy()

        return wait

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        return self._streams.setdefault(device, torch.cuda.Stream(device))


class Block:
    """Rows of up to `steps` decode steps of one layer, gathered where they were computed: one copy leaves the device, not one a step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.n = steps, 0
        self.rows: list[torch.Tensor] = []  # [heads, steps, d] each

    @property
    def full(self) -> bool:
        return self.n == self.steps

    def add(self, *rows: torch.Tensor) -> None:
        """[heads, d] each, of one step; they may be views of a cache, of which nothing is kept."""
        if not self.rows:
            self.rows = [x.new_empty(len(x), self.steps, x.shape[1]) for x in rows]
        for gathered, x in zip(self.rows, rows, strict=True):
            gathered[:, self.n] = x
        self.n += 1

    def taken(self) -> list[torch.Tensor]:
        """[heads, n, d] each; the block is empty afterwards, and its memory another's."""
        out = [x[:, : self.n] for x in self.rows]
        self.rows, self.n = [], 0
        return out
