"""What `kvsim trace info` tells: what is in a trace, its bytes, and which needs of a policy it can supply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsim.geometry import ALL_LAYERS, ATTENTION, INDEX, K_PRE, PREFILL_MASS, Q_STATS, WO_NORM, Layer, Need, Window
from kvsim.tables import RARE
from kvsim.trace.open import Supply, Trace, open_trace


def describe(path: str | Path, allow_partial: bool = False) -> dict[str, Any]:
    """Plain data that JSON can hold; bytes as stored, counts in tokens, steps and heads. Raises BadTrace."""
    trace = open_trace(path, allow_partial)
    source, capture = trace.manifest.get("source") or {}, trace.manifest.get("capture") or {}
    supplies = {(r.id, layer.id): trace.supplies(r, layer) for r in trace.requests for layer in trace.captured_layers}
    sizes = bytes_by_table(trace)
    return {
        "trace": trace.id,
        "schema": trace.manifest["schema"],
        "status": trace.manifest["status"],
        "sha256": trace.sha256,
        "created": trace.manifest.get("created"),
        "model": source.get("model"),
        "weight_format": source.get("weight_format"),
        "device": capture.get("gpu_name") or capture.get("device"),
        "dtype": trace.dtype,
        "kv_dtype": trace.kv_dtype(),
        "bytes": sum(sizes.values()),
        "bytes_by_table": sizes,
        "requests": [
            {
                "request": r.id,
                "mode": r.mode,
                "prompt_tokens": r.prompt,
                "total_tokens": r.total,
                "decode_steps": len(supplies[r.id, trace.captured_layers[0].id].steps),
                "evidence": [{"label": s.label, "start": s.start, "stop": s.stop} for s in r.evidence],
            }
            for r in trace.requests
        ],
        "layers": [_layer(layer) for layer in trace.layers],
        "needs": {str(need): {"supplied": supplied, "option": need.option} for need, supplied in needs(trace, supplies).items()},
    }


def bytes_by_table(trace: Trace) -> dict[str, int]:
    """Bytes on disk of the files listed, by the folder they are in."""
    sizes: dict[str, int] = {}
    for name, entry in trace.manifest["files"].items():
        table = name.split("/")[0]
        sizes[table] = sizes.get(table, 0) + entry["bytes"]
    return sizes


def needs(trace: Trace, supplies: dict[tuple[int, int], Supply]) -> dict[Need, bool]:
    """Each need that a capture option records -> whether every captured (request, layer) has it."""
    all_ = list(supplies.values())
    rows = min(s.window_rows for s in all_)
    return {
        ATTENTION: all(s.contiguous for s in all_),
        Window(max(rows, 1)): rows > 0,
        PREFILL_MASS: all(s.prefill_mass for s in all_),
        K_PRE: all(s.k_pre for s in all_),
        WO_NORM: all(s.wo_norm for s in all_),
        Q_STATS: all(s.q_stats for s in all_),
        INDEX: all(s.index_steps is not None and not {*s.steps.tolist()} - {*s.index_steps.tolist()} for s in all_),
        ALL_LAYERS: {layer.id for layer in trace.captured_layers} == set(trace.layers[0].among),
    }


def _layer(layer: Layer) -> dict[str, Any]:
    names = ("id", "kind", "q_heads", "kv_heads", "key_dim", "value_dim", "row_bytes", "window", "softcap", "captured")
    rare = {name: x for name in RARE if (x := getattr(layer, name)) is not None}
    return {name: getattr(layer, name) for name in names} | {
        "learned_sinks": layer.sinks is not None,
        "rope": layer.rope is not None,
        **rare,
    }
