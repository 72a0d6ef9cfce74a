"""Triton proton (hatchet JSON): a tree of frames, then the devices. Metrics are missing on inner nodes; a frame's name may be a path."""

from __future__ import annotations

from typing import Any

from kvsim.cost.classes import symbol
from kvsim.cost.readers.found import Found, Told
from kvsim.errors import BadProfile

TIME = "time (ns)"
LARGEST = 2.0**53  # of a metric: 104 days in nanoseconds, 9 PB


def knows(trace: Any) -> bool:
    """Whether parsed JSON is this format's."""
    return isinstance(trace, list) and bool(trace) and isinstance(trace[0], dict) and "frame" in trace[0]


def read(trace: Any, told: Told) -> Found:
    """One row a leaf with a time. Raises BadProfile when a node has no frame or a time that is no number."""
    if not knows(trace):
        raise BadProfile(f"{told.label}: not a tree of frames; expected the JSON that Triton's proton writes")
    found = Found(facts=_facts(trace[1]) if len(trace) > 1 and isinstance(trace[1], dict) else {})
    nodes = [trace[0]]
    while nodes:
        node = nodes.pop()
        try:
            name, metrics, children = str(node["frame"]["name"]), node.get("metrics", {}), node.get("children", [])
            time, count, size = float(metrics.get(TIME, 0)), int(metrics.get("count", 0)), float(metrics.get("bytes", 0))
            if not all(abs(x) < LARGEST for x in (time, count, size)):
                raise ValueError("a metric that is no finite number")
            nodes += reversed(children)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
            raise BadProfile(f"{told.label}: a node of the tree is not one of proton's ({type(e).__name__}: {e})") from None
        if time <= 0 or not count:
            found.left_out["frame without a time"] += 1
        elif cls := found.add(name, time / 1e3, told.rules):
            row = told.shape() | {"class": cls, "variant": symbol(name), "t_us": time / 1e3, "n": count, "source": told.label}
            found.rows.append(row | {"bytes": round(size) if size else None})
    return found


def _facts(devices: dict[str, Any]) -> dict[str, Any]:
    """The first CUDA device: memory is clocked at both edges, over bus_width bits, memory_clock_rate in kHz."""
    cuda = devices.get("CUDA")
    first: Any = next(iter(cuda.values()), None) if isinstance(cuda, dict) else None
    try:
        return {"bandwidth_bytes_s": 2e3 * first["memory_clock_rate"] * first["bus_width"] / 8, "processors": first["num_sms"]}
    except (TypeError, KeyError):  # facts are extra: without them the rows are as good
        return {}
