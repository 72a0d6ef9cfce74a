"""A device that no file describes, a CPU say: its bandwidth is that of the plain reads which `kvsim cost measure` put among the samples."""

from __future__ import annotations

import polars as pl

from kvsim.cost.hardware import Gpu, named_gpu
from kvsim.errors import WrongUse

READ = "read"  # variant of the rows of class `rest` that only read
PROBE = (pl.col("class") == "rest") & (pl.col("variant") == READ)


def is_device(name: str, gpu: Gpu) -> bool:
    """Whether samples of this name are of this GPU."""
    try:
        return named_gpu(name).key == gpu.key
    except WrongUse:
        return name == gpu.key


def device_of(name: str, samples: pl.DataFrame) -> Gpu:
    """The GPU of this name from its file; without one, a device that reads as fast as the fastest of its own plain reads.

    No cache of it is modelled (measure with cold ones) and no link to a host. Raises WrongUse when there are no such reads either."""
    try:
        return named_gpu(name)
    except WrongUse:
        reads = samples.filter((pl.col("gpu") == name) & PROBE)
        if reads.is_empty():
            raise
    best = float((reads["bytes"] / reads["t_us"]).max()) * 1e-3  # type: ignore[arg-type]  # numbers, at least one
    return Gpu(
        key=name, name=name, match=(), bandwidth_gbps=best, memory_gb=0.0, l2_bytes=0, pcie_gbps=0.0, processors=0,
        sources={"bandwidth_gbps": f"fastest of {reads.height} plain reads among the samples"},
    )  # fmt: skip
