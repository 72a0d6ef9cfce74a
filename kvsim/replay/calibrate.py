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
from kvsim.policies.protocol import Sample, save_calibration
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
        rows = [_rows(opened, r, layer, store) for r in opened.requests if r.id in whose]
        arrays |= {f"{layer.id}.{name}": x for name, x in store.calibrate(_together(rows)).items()}
    about: dict[str, Any] = {
        "kind": type(store).__name__,
        "kvsim": __version__,
        "computed": type(store).computed,
        "options": store.calibration_options,
        "model": (opened.manifest.get("source") or {}).get("model"),
        "trace": {"id": opened.id, "sha256": opened.sha256},
        "contexts": sorted(r.digest for r in opened.requests if r.id in whose),
        "layers": mine,
        "requests": whose,
    }
    return about, arrays


def _rows(trace: Trace, request: Request, layer: Layer, store: Any) -> Sample:
    """What one request has of a layer."""
    lane = trace.lane(request, layer)
    if lane.k_pre is None and K_PRE in store.needs:
        where = f"trace {trace.id}, request {request.id}, layer {layer.id}"
        name = type(store).__name__
        raise WrongUse(f"{name} is calibrated on keys before RoPE, which {where} does not have; capture with {K_PRE.option}")
    k, v, pre = (None if x is None else widen(x).astype(np.float64) for x in (lane.k, lane.v, lane.k_pre))
    assert k is not None
    assert v is not None
    q = np.concatenate([widen(lane.window_q), widen(lane.q)]).astype(np.float64)
    by_head = q.reshape(len(q), layer.kv_heads, layer.group, -1).swapaxes(0, 1).reshape(layer.kv_heads, len(q) * layer.group, -1)
    return Sample(k, v, by_head, pre)


def _together(rows: Sequence[Sample]) -> Sample:
    """The rows of several requests as those of one."""
    k, v, q = (np.concatenate([getattr(x, name) for x in rows], axis=1) for name in ("keys", "values", "queries"))
    pre = [x.keys_pre for x in rows if x.keys_pre is not None]
    return Sample(k, v, q, np.concatenate(pre, axis=1) if len(pre) == len(rows) else None)
