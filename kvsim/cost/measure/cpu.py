"""The CPU as a device: kernels of kvsim.kernels.decode in float32, one thread, CPU time.

Cold caches by turns: launches are laid out one behind the other in a buffer, and when it is used up more than the last cache holds is read
and the next lap begins. So no launch finds what another has read, and it takes far fewer flushes than launches."""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.cost.heads import Geometry
from kvsim.cost.measure.device import Launch
from kvsim.cost.measure.shapes import CODE_BITS, GROUP, KEPT, Shape
from kvsim.cost.probe import READ
from kvsim.kernels import decode

Floats = npt.NDArray[np.float32]
Table = npt.NDArray[np.int64]

LARGEST = 256 << 20  # bytes
ROOM = 512 << 20  # bytes of a lap, at least
UNKNOWN_CACHE = 64 << 20  # bytes of the last cache, where the system does not say
FLUSH = 1.25  # last caches that are read between two laps


@dataclass(frozen=True)
class Prepared:
    """A launch, the lap that its data is in, and its number in the order of all."""

    launch: Launch
    lap: int
    number: int

    def __call__(self) -> object:
        return self.launch()


class Cpu:
    """See Device. largest: bytes of K and V that a launch may read."""

    dtype = "float32"

    def __init__(self, largest: int = LARGEST) -> None:
        self.name, self.largest = f"cpu: {_model()}", largest
        self.kernels, self.chain, self.selective = KERNELS, CHAIN, selective
        cache, room = _last_cache(), max(ROOM, largest * 9 // 8) // 4
        self.software = f"one thread, CPU time, {FLUSH:g} x {cache >> 20} MiB read between laps"
        self.rng = np.random.default_rng(0)
        self._inputs = np.resize(self.rng.standard_normal(1 << 20, np.float32), room)
        self._outputs = np.zeros(room, np.float32)
        self._flush = np.ones(int(FLUSH * cache) // 4, np.float32)
        self._lap = self._prepared = self._read = self._written = 0
        self._last = (0, 0)

    def prepare(self, kernel: Any, g: Geometry, s: Shape) -> Launch:
        before, self._prepared = self._lap, self._prepared + 1
        launch = kernel(self, g, s)
        if self._lap != before:  # some of it may lie in the lap before
            self._read = self._written = 0
            launch = kernel(self, g, s)
        return Prepared(launch, self._lap, self._prepared)

    def time(self, launch: Any) -> float:
        if launch.lap != self._last[0] or launch.number <= self._last[1]:
            decode.read(self._flush)
        self._last = (launch.lap, launch.number)
        start = time.thread_time()
        launch()
        return (time.thread_time() - start) * 1e6

    def floats(self, *shapes: tuple[int, ...]) -> list[Floats]:
        """Arrays of small random numbers, to be read."""
        need = sum(math.prod(shape) for shape in shapes)
        self._lap_if(self._read + need > len(self._inputs))
        self._read += need
        return _cut(self._inputs[self._read - need : self._read], shapes)

    def room(self, *shapes: tuple[int, ...]) -> list[Floats]:
        """Arrays to be written."""
        need = sum(math.prod(shape) for shape in shapes)
        self._lap_if(self._written + need > len(self._outputs))
        self._written += need
        return _cut(self._outputs[self._written - need : self._written], shapes)

    def _lap_if(self, full: bool) -> None:
        if full:
            self._lap, self._read, self._written = self._lap + 1, 0, 0

    def cache(self, g: Geometry, s: Shape) -> list[Floats]:
        """[q, k, v, summaries] of all pages of a shape, as kvsim.kernels.decode has them."""
        there = (s.batch, g.kv_heads, s.all)
        q = (s.batch, g.kv_heads, g.q_heads // g.kv_heads, g.head_dim)
        return self.floats(q, (*there, s.page, g.head_dim), (*there, s.page, g.value_dim), (*there, 2, g.head_dim))

    def table(self, g: Geometry, s: Shape) -> Table:
        """Pages to read, of each request and kv head its own, ascending as decode.best leaves them."""
        rows = [np.sort(self.rng.permutation(s.all)[: s.each]) for _ in range(s.batch * g.kv_heads)]
        return np.array(rows, np.int64).reshape(s.batch, g.kv_heads, s.each)


# ------------------------------------------------------------------------------------------------ one kernel class each
def read(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    [x] = cpu.floats((s.batch * s.context * g.kv_heads * (g.head_dim + g.value_dim),))
    return lambda: decode.read(x)


def dense(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    every = np.tile(np.arange(s.all, dtype=np.int64), (s.batch, g.kv_heads, 1))
    q, k, v, _ = cpu.cache(g, s)
    [out] = cpu.room((*q.shape[:3], g.value_dim))
    return lambda: decode.attend(q, k, v, every, out)


def scan(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    q, _, _, summary = cpu.cache(g, s)
    [out] = cpu.room((*q.shape[:3], s.all))
    return lambda: decode.scan(q, summary, out)


def topk(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    [bounds] = cpu.floats((s.batch, g.kv_heads, g.q_heads // g.kv_heads, s.all))
    out = np.empty((s.batch, g.kv_heads, min(KEPT, s.all)), np.int64)
    return lambda: decode.best(bounds, out)


def gather(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    table = cpu.table(g, s)
    q, k, v, _ = cpu.cache(g, s)
    [out] = cpu.room((*q.shape[:3], g.value_dim))
    return lambda: decode.attend(q, k, v, table, out)


def gather_by_copy(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    table = cpu.table(g, s)
    q, k, v, _ = cpu.cache(g, s)
    [out] = cpu.room((*q.shape[:3], g.value_dim))
    every = np.tile(np.arange(s.each, dtype=np.int64), (s.batch, g.kv_heads, 1))
    k_copy, v_copy = cpu.room((*table.shape, s.page, g.head_dim), (*table.shape, s.page, g.value_dim))

    def launch() -> None:
        decode.copy_pages(k, v, table, k_copy, v_copy)
        decode.attend(q, k_copy, v_copy, every, out)

    return launch


def selective(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    """See Device."""
    q, k, v, summary = cpu.cache(g, s)
    bounds, out = cpu.room((*q.shape[:3], s.all), (*q.shape[:3], g.value_dim))
    table = np.empty((s.batch, g.kv_heads, s.each), np.int64)

    def launch() -> None:
        decode.scan(q, summary, bounds)
        decode.best(bounds, table)
        decode.attend(q, k, v, table, out)

    return launch


def update(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    [key] = cpu.floats((s.batch, g.kv_heads, g.head_dim))
    [summary] = cpu.room((s.batch, g.kv_heads, s.all, 2, g.head_dim))
    return lambda: decode.update(summary, key, s.all - 1)


def unpack(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    groups = s.batch * s.context * g.kv_heads * (g.head_dim + g.value_dim) // GROUP
    codes, step, zero = cpu.floats((groups, GROUP * CODE_BITS // 32), (groups,), (groups,))
    [out] = cpu.room((groups, GROUP))
    return lambda: decode.unpack(codes.view(np.uint8), step, zero, out)


def probabilities(cpu: Cpu, g: Geometry, s: Shape) -> Launch:
    q, k = cpu.floats((s.batch, g.kv_heads, g.q_heads // g.kv_heads, g.head_dim), (s.batch, g.kv_heads, s.context, g.head_dim))
    [out] = cpu.room((*q.shape[:3], s.context))
    return lambda: decode.probabilities(q, k, out)


def _cut(flat: Floats, shapes: tuple[tuple[int, ...], ...]) -> list[Floats]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True)]


NUMBA = f"numba {version('numba')}"
IN_PLACE = f"{NUMBA} in place"
CHAIN = {"dense_attn": NUMBA, "page_scan": NUMBA, "topk": NUMBA, "gather_attn": IN_PLACE}
KERNELS: dict[tuple[str, str], Any] = {
    ("rest", READ): read,
    ("dense_attn", NUMBA): dense,
    ("page_scan", NUMBA): scan,
    ("topk", NUMBA): topk,
    ("gather_attn", f"{NUMBA} copied first"): gather_by_copy,
    ("gather_attn", IN_PLACE): gather,
    ("summary_update", NUMBA): update,
    ("dequant", f"{NUMBA} {CODE_BITS} bits"): unpack,
    ("scores", NUMBA): probabilities,
}


# ------------------------------------------------------------------------------------------------ the machine
def _model() -> str:
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _last_cache() -> int:
    """Bytes of the last cache, on Linux; elsewhere a guess that few desktop processors exceed."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    unit = {"K": 1 << 10, "M": 1 << 20}
    return max((int(x[:-1]) * unit[x[-1]] for x in sizes if x[-1:] in unit), default=UNKNOWN_CACHE)
