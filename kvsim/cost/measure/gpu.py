"""A GPU through torch (`pip install 'kvsim[capture]'`), CUDA or ROCm: torch's own kernels, eager, timed by events.

Without a GPU torch's CPU runs the same code, which is how the tests run every kernel of this file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from kvsim.cost.heads import Geometry
from kvsim.cost.measure.device import Launch
from kvsim.cost.measure.shapes import CODE_BITS, GROUP, KEPT, Shape
from kvsim.cost.probe import READ
from kvsim.errors import WrongUse

try:
    import torch
    from torch.nn.functional import scaled_dot_product_attention
except ModuleNotFoundError as e:
    raise WrongUse("cost measure --device cuda needs torch: pip install 'kvsim[capture]'; --device cpu needs nothing") from e

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LARGEST = 2 << 30  # bytes
FLUSH = 512 << 20  # bytes written before a launch: more than any L2, and long enough for the launches to queue up behind it


class Gpu:
    """See Device. where: "cuda", which is what torch calls ROCm too, or "cpu". About three times `largest` is allocated."""

    def __init__(self, dtype: str = "bfloat16", where: str = "cuda", largest: int | None = None) -> None:
        if dtype not in DTYPES:
            raise WrongUse(f"no kernels of {dtype} to measure through torch: one of {', '.join(DTYPES)}")
        if where == "cuda" and not torch.cuda.is_available():
            raise WrongUse(
                f"torch {torch.__version__} sees no GPU: say --device cpu, or see kvsim cost recipe for a profile made elsewhere"
            )
        self.dtype, self.where, self.on_gpu = dtype, where, where == "cuda"
        self.largest = largest or min(LARGEST, torch.cuda.mem_get_info()[0] // 4 if self.on_gpu else LARGEST)
        self.name = torch.cuda.get_device_name() if self.on_gpu else "torch on a CPU"
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        self.software = f"torch {torch.__version__}; {runtime}; events, {FLUSH >> 20} MiB written before each launch"
        paged = self.on_gpu and find_spec("triton") is not None
        self.kernels = {key: f for key, f in KERNELS.items() if paged or key[1] != PAGED}
        self.chain = {"dense_attn": f"{TORCH} sdpa", "page_scan": TORCH, "topk": TORCH, "gather_attn": PAGED if paged else COPIED}
        self.selective = selective
        room = self.largest // DTYPES[dtype].itemsize * 9 // 8
        self.random = torch.Generator().manual_seed(0)
        drawn = torch.randn(1 << 20, generator=self.random).to(where, DTYPES[dtype])
        self._numbers = drawn.repeat(-(-room // len(drawn)))
        self._codes = (
            torch.randint(256, (1 << 20,), generator=self.random, dtype=torch.uint8)
            .to(where)
            .repeat(-(-room * CODE_BITS // 8 // (1 << 20)))
        )
        self._flush = torch.zeros(FLUSH if self.on_gpu else 1, dtype=torch.int8, device=where)

    def prepare(self, kernel: Any, g: Geometry, s: Shape) -> Launch:
        return kernel(self, g, s)

    def time(self, launch: Launch) -> float:
        self._flush.zero_()
        if not self.on_gpu:
            start = time.thread_time()
            launch()
            return (time.thread_time() - start) * 1e6
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        launch()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after) * 1e3)

    def numbers(self, *shapes: tuple[int, ...]) -> list[Any]:
        """Tensors of small random numbers, one after the other in the buffer that all launches share."""
        sizes = [math.prod(shape) for shape in shapes]
        parts = self._numbers[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def codes(self, count: int) -> Any:
        """Bytes of two codes each."""
        return self._codes[:count]

    @cached_property
    def link(self) -> tuple[Any, Any]:
        """The numbers in pinned memory of the host, and room for them on the device."""
        there = self._numbers.cpu()
        return there.pin_memory() if self.on_gpu else there, torch.empty_like(self._numbers)

    def cache(self, g: Geometry, s: Shape) -> tuple[Any, Any, Any, Any]:
        """(q [B, H, G, d], k and v [B, H, P, S, d], summaries [B, H, P, 2 d], smallest keys before largest) of all pages of a shape."""
        there = (s.batch, g.kv_heads, s.all)
        q, k, v, summary = self.numbers(
            (s.batch, g.kv_heads, g.q_heads // g.kv_heads, g.head_dim), (*there, s.page, g.head_dim), (*there, s.page, g.value_dim),
            (*there, 2 * g.head_dim),
        )  # fmt: skip
        return q, k, v, summary

    def table(self, g: Geometry, s: Shape) -> Any:
        """Pages to read i64[B, H, K], of each request and kv head its own, in no order."""
        rows = [torch.randperm(s.all, generator=self.random)[: s.each] for _ in range(s.batch * g.kv_heads)]
        return torch.stack(rows).view(s.batch, g.kv_heads, s.each).to(self.where)


# ------------------------------------------------------------------------------------------------ one kernel class each
def read(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    [x] = gpu.numbers((s.batch * s.context * g.kv_heads * (g.head_dim + g.value_dim),))
    return lambda: x.max()


def dense(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    q, k, v, _ = gpu.cache(g, s)
    q, k, v = q.view(s.batch, g.q_heads, 1, -1), k.flatten(2, 3), v.flatten(2, 3)
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=g.q_heads > g.kv_heads)


def scan(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    q, _, _, summary = gpu.cache(g, s)
    return lambda: bounds(q, summary)


def topk(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    found = gpu.numbers((s.batch, g.kv_heads, g.q_heads // g.kv_heads, s.all))[0].float()
    return lambda: best(found, min(KEPT, s.all))


def gather(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    table, attend = gpu.table(g, s), in_place(*gpu.cache(g, s)[:3])
    return lambda: attend(table)


def gather_by_copy(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    table, attend = gpu.table(g, s), by_copy(*gpu.cache(g, s)[:3])
    return lambda: attend(table)


def update(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    key, summary = gpu.numbers((s.batch, g.kv_heads, g.head_dim), (s.batch, g.kv_heads, s.all, 2, g.head_dim))
    low, high = summary[:, :, -1].clone().unbind(2)  # what it writes must not become the input of others

    def launch() -> None:
        torch.minimum(low, key, out=low)
        torch.maximum(high, key, out=high)

    return launch


def unpack(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    groups = s.batch * s.context * g.kv_heads * (g.head_dim + g.value_dim) // GROUP
    codes = gpu.codes(groups * GROUP // 2).view(groups, GROUP // 2)
    step, zero = gpu.numbers((groups, 1), (groups, 1))
    return lambda: torch.cat((codes & 15, codes >> 4), 1).to(step.dtype).mul_(step).add_(zero)


def probabilities(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    q, k = gpu.numbers((s.batch, g.kv_heads, g.q_heads // g.kv_heads, g.head_dim), (s.batch, g.kv_heads, s.context, g.head_dim))
    turned, unit = k.transpose(2, 3), g.head_dim**-0.5
    return lambda: (q * unit @ turned).softmax(-1)


def fetch(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    """From pinned memory, in one piece."""
    count = s.batch * s.context * g.kv_heads * (g.head_dim + g.value_dim)
    there, here = (x[:count] for x in gpu.link)
    return lambda: here.copy_(there, non_blocking=True)


# ------------------------------------------------------------------------------------------------ what they are made of
def bounds(q: Any, summary: Any) -> Any:
    """max(q lo, q hi) is q's negative part times lo plus its positive part times hi: one product of twice the width -> f32[B, H, G, P]."""
    return (torch.cat((q.clamp(max=0), q.clamp(min=0)), 3) @ summary.transpose(2, 3)).float()


def best(found: Any, count: int) -> Any:
    """Pages of the highest bounds, the best query head of a group decides: [B, H, G, P] -> i64[B, H, count]."""
    return found.amax(2).topk(count, sorted=False).indices


def in_place(q: Any, k: Any, v: Any) -> Callable[[Any], Any]:
    """Attention over the pages of a table i64[B, H, K] -> [B, H, G, dv]."""
    from kvsim.cost.measure.paged import attend

    return lambda table: attend(q, k, v, table)


def by_copy(q: Any, k: Any, v: Any) -> Callable[[Any], Any]:
    """The same, over a copy of the pages that lie one after the other."""
    batch, heads, group, _ = q.shape
    first = torch.arange(batch * heads, device=q.device).view(batch, heads, 1) * k.shape[2]
    one, rows, values = q.view(batch, heads * group, 1, -1), k.flatten(0, 2), v.flatten(0, 2)

    def attend(table: Any) -> Any:
        chosen = (first + table).flatten()
        k_copy, v_copy = (x.index_select(0, chosen).view(batch, heads, -1, x.shape[2]) for x in (rows, values))
        return scaled_dot_product_attention(one, k_copy, v_copy, enable_gqa=group > 1).view(batch, heads, group, -1)

    return attend


def selective(gpu: Gpu, g: Geometry, s: Shape) -> Launch:
    """See Device."""
    q, k, v, summary = gpu.cache(g, s)
    attend = (in_place if gpu.chain["gather_attn"] == PAGED else by_copy)(q, k, v)
    return lambda: attend(best(bounds(q, summary), s.each))


TORCH, PAGED = f"torch {torch.__version__}", "triton in place"
COPIED = f"{TORCH} index_select, sdpa"
KERNELS: dict[tuple[str, str], Any] = {
    ("rest", READ): read,
    ("dense_attn", f"{TORCH} sdpa"): dense,
    ("page_scan", TORCH): scan,
    ("topk", TORCH): topk,
    ("gather_attn", COPIED): gather_by_copy,
    ("gather_attn", PAGED): gather,
    ("summary_update", TORCH): update,
    ("dequant", f"{TORCH} {CODE_BITS} bits"): unpack,
    ("scores", TORCH): probabilities,
    ("host_fetch", f"{TORCH} pinned"): fetch,
}
