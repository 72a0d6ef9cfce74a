"""What a device offers to those who measure: kernels of each class, and a stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvsim.cost.heads import Geometry
from kvsim.cost.measure.shapes import Shape

Launch = Callable[[], object]


class Device(Protocol):
    """`name` and `software` become columns of the samples; `dtype` is that of its caches; `largest`: bytes of K and V it has room for.

    kernels: (class, variant) -> a function of (device, Geometry, Shape) that lays out inputs and returns the launch. selective, such a
    function too: scan, top-k and gather of the pages with the highest bounds in one launch; `chain`: the variants it consists of, by
    class, and that of dense attention."""

    name: str
    software: str
    dtype: str
    largest: int
    kernels: dict[tuple[str, str], Any]
    chain: dict[str, str]
    selective: Any

    def prepare(self, kernel: Any, g: Geometry, s: Shape) -> Launch:
        """Lays out a kernel of `kernels`, or `selective`, for a shape. Launches are timed in the order in which they are prepared."""
        ...

    def time(self, launch: Launch) -> float:
        """Microseconds of one launch whose data is in no cache."""
        ...
