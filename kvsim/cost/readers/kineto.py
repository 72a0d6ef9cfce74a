"""PyTorch's profiler (Kineto): trace JSON, also gzipped.

`ts` and `dur` are microseconds whatever displayTimeUnit says. Kernels of a replayed graph have no grid and no link to an operator, so shapes
come from the annotation that vLLM and SGLang put around a step, reached through the launch's correlation. Kernels overlap on one stream: the
time of a group is the union of its kernels. Paths and the file's own name for itself are never read."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from typing import Any

from kvsim.cost.classes import classify, symbol
from kvsim.cost.readers.found import Found, Told
from kvsim.cost.readers.nsys import union
from kvsim.errors import BadProfile

# execute_32_context_0(sq0sk0…)_generation_32(sq32sk32785…): 32 requests decode, which hold 32 785 tokens in all
STEP = re.compile(r"execute_\d+_context_(\d{1,9})\(.*?\)_generation_(\d{1,9})\(sq\d+sk(\d{1,12})(?!\d)")
DECODE = re.compile(r"step\[DECODE bs=(\d{1,9})\]")
LARGEST = 1e300  # of a number: JSON has whole ones that no float holds
Event = dict[str, Any]


def knows(head: str) -> bool:
    """Whether the beginning of a file is this format's."""
    return '"traceEvents"' in head or (head.lstrip().startswith("[") and '"ph"' in head)


def read(trace: Any, told: Told) -> Found:
    """One row a step and class of kernels. Raises BadProfile when the JSON is no trace."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise BadProfile(f"{told.label}: no list of traceEvents; expected a trace of torch.profiler")
    found = Found(facts=_facts(trace))
    spans = [e for e in events if e.get("ph") == "X" and _finite(e.get("ts")) and _finite(e.get("dur")) and e["dur"] >= 0]
    kernels = [e for e in events if str(e.get("cat", "")).lower() == "kernel"]
    steps, launched = _steps(spans), _launches(spans)
    wall = _wall(spans)
    groups: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for e in kernels:
        cls = classify(str(e.get("name", "")), told.rules)
        possible = _finite(e.get("ts")) and _finite(e.get("dur")) and 0 < e["dur"] <= wall
        if not possible:
            found.left_out["kernel of an impossible duration (kept as a row of its own)"] += 1
            if cls != "unclassed" and _finite(e.get("dur")):
                found.rows.append(_row(cls, [e], abs(float(e["dur"])) or 1e-3, None, told) | {"status": "impossible"})
            continue
        if found.add(str(e.get("name", "")), float(e["dur"]), told.rules):
            groups[_step_of(e, steps, launched), cls].append(e)
    for (step, cls), group in groups.items():
        group.sort(key=lambda e: e["ts"])
        t_us = union([(e["ts"], e["ts"] + e["dur"]) for e in group])
        found.rows.append(_row(cls, group, t_us, steps[step] if step >= 0 else None, told))
    _say(found, kernels, groups, steps)
    return found


def _row(cls: str, group: list[Event], t_us: float, step: Event | None, told: Told) -> dict[str, Any]:
    """The kernels of one class in one step, over all layers."""
    names = Counter(symbol(str(e.get("name", ""))) for e in group)
    replayed = sum("grid" not in _args(e) for e in group)
    row = told.shape() | {
        "class": cls,
        "variant": min(names, key=lambda n: (-names[n], n)),
        "t_us": t_us,
        "n": len(group),
        "source": told.label,
    }
    row |= {"graph": "eager" if not replayed else "full" if replayed == len(group) else "piecewise"}
    if step:
        row |= {"batch": step["batch"], "context": round(step["tokens"] / step["batch"]) if step["tokens"] else told.context}
        if told.geometry and step["tokens"] and cls == "dense_attn":
            layers = told.geometry.layers
            row |= {"layers": layers, "bytes": layers * told.geometry.decode_bytes(step["batch"], step["tokens"])}
    return row


def _steps(spans: list[Event]) -> list[Event]:
    """Annotated decode steps: start, end, batch, tokens (None where only the batch is told); the more telling annotation of two nested ones."""
    steps = []
    for e in spans:
        if "annotation" not in str(e.get("cat", "")):
            continue
        name = str(e.get("name", ""))
        if (m := STEP.search(name)) and int(m[1]) == 0 and int(m[2]):
            steps.append({"start": e["ts"], "end": e["ts"] + e["dur"], "batch": int(m[2]), "tokens": int(m[3])})
        elif m := DECODE.search(name):
            steps.append({"start": e["ts"], "end": e["ts"] + e["dur"], "batch": int(m[1]), "tokens": None})
    return sorted(steps, key=lambda s: (s["tokens"] is None, s["start"]))


def _launches(spans: list[Event]) -> dict[str, float]:
    """When each correlation id was launched: all kernels of a replayed graph share that of its launch."""
    host = [e for e in spans if str(e.get("cat", "")) in ("cuda_runtime", "cuda_driver", "hip_runtime")]
    return {str(_args(e)["correlation"]): e["ts"] for e in host if "correlation" in _args(e)}


def _step_of(kernel: Event, steps: list[Event], launched: dict[str, float]) -> int:
    when = launched.get(str(_args(kernel).get("correlation")))
    return -1 if when is None else next((i for i, s in enumerate(steps) if s["start"] <= when <= s["end"]), -1)


def _wall(spans: list[Event]) -> float:
    return max((e["ts"] + e["dur"] for e in spans if str(e.get("cat")) != "kernel"), default=math.inf) - min(
        (e["ts"] for e in spans), default=0.0
    )


def _facts(trace: Any) -> dict[str, Any]:
    devices = trace.get("deviceProperties") if isinstance(trace, dict) else None
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    wanted = {"name": "name", "totalGlobalMem": "memory_bytes", "numSms": "processors"}
    return {to: first[name] for name, to in wanted.items() if first.get(name)}


def _args(e: Event) -> dict[str, Any]:
    args = e.get("args")
    return args if isinstance(args, dict) else {}


def _finite(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < LARGEST


def _say(found: Found, kernels: list[Event], groups: dict[tuple[int, str], list[Event]], steps: list[Event]) -> None:
    ran = sorted((e["ts"], e["ts"] + e["dur"]) for group in groups.values() for e in group)
    total = sum(end - start for start, end in ran)
    found.notes.append(f"{len(kernels)} kernels, {sum('grid' not in _args(e) for e in kernels)} without a grid (replayed graphs)")
    found.notes.append(f"classed kernels: {total:.1f} µs in sum, {union(ran):.1f} µs with overlaps counted once")
    if lost := sum(len(g) for (step, _), g in groups.items() if step < 0):
        found.notes.append(
            f"{lost} of them in no annotated decode step: batch and context as told"
            + ("" if steps else " (no annotation at all)")
        )


def parse(text: str, label: str) -> Any:
    """Raises BadProfile for what is no JSON (a trace cut short, for example)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadProfile(f"{label}: not JSON ({e}); was the trace cut short?") from None
