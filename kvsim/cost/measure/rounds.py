"""Every kernel of a device on every shape, in rounds: a disturbance hits one timing of each, not all timings of one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from importlib.metadata import version
from typing import Any

import polars as pl

from kvsim.cost.gate import marked
from kvsim.cost.heads import Geometry
from kvsim.cost.measure.device import Device, Launch
from kvsim.cost.measure.shapes import BY_PAGE, CLASSES, Shape, shapes, traffic
from kvsim.cost.probe import READ, device_of
from kvsim.cost.samples import frame
from kvsim.errors import WrongUse

LEAST = 5  # rounds


def measure(
    device: Device,
    g: Geometry,
    classes: Collection[str] | None = None,
    seconds: float = 60,
    *,
    between: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> pl.DataFrame:
    """Samples of every class (default: all that the device has), the median of as many rounds as `seconds` allow, five at least.

    between: shapes inside the box of the usual ones, to check a fit with. Plain reads (class rest) hold their fastest round: they are
    the limit of everything else. Raises WrongUse for a class that the device has no kernel of, or a dtype."""
    wanted = _wanted(device, g, classes)
    plan = [(cls, variant, s) for cls, variant in wanted for s in shapes(cls, g, device.largest, between)]
    launches = [device.prepare(device.kernels[cls, variant], g, s) for cls, variant, s in plan]
    progress(f"{device.name}: {len(launches)} shapes of {len(wanted)} kernels")
    times = timed(device, launches, seconds)
    progress(f"{len(times[0])} rounds")
    source = f"kvsim cost measure {version('kvsim')}; {device.software}; {len(times[0])} rounds"
    rows = [
        row(cls, g, s) | {"variant": variant, "t_us": _one(variant, t), "gpu": device.name, "source": source}
        for (cls, variant, s), t in zip(plan, times, strict=True)
    ]
    samples = frame(rows)
    return marked(samples, device_of(device.name, samples))


def timed(device: Device, launches: list[Launch], seconds: float) -> list[list[float]]:
    """Microseconds of each launch in every round, after one round that is not counted."""
    for launch in launches:
        device.time(launch)
    rounds: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(rounds) < LEAST or time.monotonic() < end:
        rounds.append([device.time(launch) for launch in launches])
    return [list(t) for t in zip(*rounds, strict=True)]


def _wanted(device: Device, g: Geometry, classes: Collection[str] | None) -> list[tuple[str, str]]:
    there = {cls for cls, _ in device.kernels}
    for cls in classes or ():
        if cls not in there:
            raise WrongUse(
                f"no kernel of class {cls!r} to measure on {device.name}: one of {', '.join(c for c in CLASSES if c in there)}"
            )
    if device.dtype != g.dtype:
        raise WrongUse(
            f"the kernels on {device.name} are of {device.dtype}, the geometry of {g.dtype}: say {device.dtype} in --geometry"
        )
    return [(cls, variant) for cls, variant in device.kernels if not classes or cls in classes or cls == "rest"]


def row(cls: str, g: Geometry, s: Shape) -> dict[str, Any]:
    paged = {"context": s.each * s.page, "pages": s.pages, "page": s.page} if cls in BY_PAGE else {"context": s.context}
    heads = {
        "q_heads": g.q_heads,
        "kv_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "kv_bits": g.kv_bits,
    }
    return heads | paged | {"class": cls, "batch": s.batch, "bytes": traffic(cls, g, s), "cache": "cold"}


def _one(variant: str, times: list[float]) -> float:
    return round(min(times) if variant == READ else statistics.median(times), 3)
