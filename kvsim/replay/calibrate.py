"""`kvsim calibrate`: the numbers that a codec needs beforehand, learned from the rows of a trace that it will not be replayed on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim import __version__
from kvsim.errors import WrongUse
from kvsim.geometry import K_PRE, Layer, Request
from kvsim.policies.language import parse
from kvsim.policies.protocol import save_calibration
from kvsim.policies.read.quest import quest
from kvsim.policies.rules import gap
from kvsim.replay import difficulty
from kvsim.replay.asked import chosen
from kvsim.trace.bits import widen
from kvsim.trace.open import Trace, open_trace

Floats = NDArray[np.float64]


def calibrate(
    trace: Trace | str | Path | Sequence[Trace | str | Path],
    policy: str,
    out: str | Path,
    *,
    layers: Iterable[int] | None = None,
    requests: Iterable[int] | None = None,
    target: float | None = None,
) -> Path:
    """Writes the calibration file `out` for a policy such as "kvquant(bits=3)", from all rows of the layers and requests named, or for
    "quest(read=gap(min=0, floor=pages(2), cap=pages(32)))" and a target coverage, from several traces if need be.

    Raises WrongUse for a policy that needs none, a trace without what it is made from, and a file that exists."""
    many = [trace] if isinstance(trace, (Trace, str, Path)) else list(trace)
    traces, path = [x if isinstance(x, Trace) else open_trace(x) for x in many], Path(out)
    if path.exists():
        raise WrongUse(f"{path}: exists already, and a calibration is never overwritten; choose another -o, or remove it")
    chain = parse(policy)
    read = chain.part("read")
    if isinstance(read.read, gap) and isinstance(read, quest):
        save_calibration(path, *difficulty.learned(traces, chain, target, layers, requests))
        return path
    if target is not None:
        raise WrongUse(f"{policy}: a target coverage is for gap() alone; leave --target out")
    if len(traces) != 1:
        raise WrongUse(f"{policy}: {len(traces)} traces; expected one, several are for gap() alone")
    save_calibration(path, *_codec_of(traces[0], policy, chain.part("store"), layers, requests))
    return path


def _codec_of(
    opened: Trace, policy: str, store: Any, layers: Iterable[int] | None, requests: Iterable[int] | None
) -> tuple[dict[str, Any], dict[str, Floats]]:
    if not hasattr(store, "calibrate"):
        raise WrongUse(f"{policy}: nothing in it is calibrated; one that is: kvquant(bits=3)")
    mine = chosen("layers", layers, [x.id for x in opened.captured_layers], opened)
    whose = chosen("requests", requests, [r.id for r in opened.requests], opened)
    arrays: dict[str, Floats] = {}
    for layer in (x for x in opened.captured_layers if x.id in mine):
        rows = [_rows(opened, r, layer, type(store).__name__) for r in opened.requests if r.id in whose]
        keys, values = (np.concatenate(x, axis=1) for x in zip(*rows, strict=True))
        arrays |= {f"{layer.id}.{name}": x for name, x in store.calibrate(keys, values).items()}
    about: dict[str, Any] = {
        "kind": type(store).__name__,
        "kvsim": __version__,
        "options": store.calibration_options,
        "trace": {"id": opened.id, "sha256": opened.sha256},
        "layers": mine,
        "requests": whose,
    }
    return about, arrays


def _rows(trace: Trace, request: Request, layer: Layer, name: str) -> tuple[Floats, Floats]:
    """Keys before RoPE and values of one request, f64[Hkv, n, d]."""
    lane = trace.lane(request, layer)
    if lane.k_pre is None:
        where = f"trace {trace.id}, request {request.id}, layer {layer.id}"
        raise WrongUse(f"{name} is calibrated on keys before RoPE, which {where} does not have; capture with {K_PRE.option}")
    return widen(lane.k_pre).astype(np.float64), widen(lane.v).astype(np.float64)
