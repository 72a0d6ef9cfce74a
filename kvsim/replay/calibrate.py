"""`kvsim calibrate`: the numbers that a codec needs beforehand, learned from the rows of a trace that it will not be replayed on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim import __version__
from kvsim.errors import WrongUse
from kvsim.geometry import K_PRE, Layer, Request
from kvsim.policies.language import parse
from kvsim.policies.protocol import save_calibration
from kvsim.replay.asked import chosen
from kvsim.trace.bits import widen
from kvsim.trace.open import Trace, open_trace

Floats = NDArray[np.float64]


def calibrate(
    trace: Trace | str | Path,
    policy: str,
    out: str | Path,
    *,
    layers: Iterable[int] | None = None,
    requests: Iterable[int] | None = None,
) -> Path:
    """Writes the calibration file `out` for a policy such as "kvquant(bits=3)", from all rows of the layers and requests named.

    Raises WrongUse for a policy that needs none, a trace without what it is made from, and a file that exists."""
    opened, target = trace if isinstance(trace, Trace) else open_trace(trace), Path(out)
    if target.exists():
        raise WrongUse(f"{target}: exists already, and a calibration is never overwritten; choose another -o, or remove it")
    store = parse(policy).part("store")
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
    save_calibration(target, about, arrays)
    return target


def _rows(trace: Trace, request: Request, layer: Layer, name: str) -> tuple[Floats, Floats]:
    """Keys before RoPE and values of one request, f64[Hkv, n, d]."""
    lane = trace.lane(request, layer)
    if lane.k_pre is None:
        where = f"trace {trace.id}, request {request.id}, layer {layer.id}"
        raise WrongUse(f"{name} is calibrated on keys before RoPE, which {where} does not have; capture with {K_PRE.option}")
    return widen(lane.k_pre).astype(np.float64), widen(lane.v).astype(np.float64)
