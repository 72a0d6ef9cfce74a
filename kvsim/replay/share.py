"""The pass before a replay, for keeps whose layers share one budget: every layer's prompt is ranked, and each kv head learns its limit.

What it finds is kept beside the parts, so that a replay that goes on does not rank again; workers are handed it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

from kvsim.engine import model_scope
from kvsim.geometry import ALL_LAYERS, Layer, Request
from kvsim.places import write_once
from kvsim.policies.protocol import Keep
from kvsim.replay.asked import Asked
from kvsim.replay.lanes import source_of
from kvsim.trace.open import Trace

if TYPE_CHECKING:
    from kvsim.s3 import S3Path

Limits = dict[tuple[str, int, int], tuple[int, ...]]  # policy id, request, layer -> rows that each kv head may hold after prefill


def shared_limits(trace: Trace, asked: Asked, file: Path | S3Path) -> Limits:
    """The limits of every policy that shares one budget over layers; read from `file` where they stand there, else written to it."""
    if not any(sharing(asked)):
        return {}
    if not file.is_file():
        found = [[*at, *map(int, limits)] for r in asked.requests for at, limits in _of_request(trace, asked, r).items()]
        write_once(file, json.dumps({"limits": found}).encode())
    rows = json.loads(file.read_bytes())["limits"]
    return {(policy, request, layer): tuple(limits) for policy, request, layer, *limits in rows}


def sharing(asked: Asked) -> list[tuple[str, Keep, tuple[Layer, ...]]]:
    """(policy id, keep, the layers that share its budget) ...: layers with the same keep, where a policy has one for each."""
    found: dict[tuple[str, Keep], list[Layer]] = {}
    for entry in asked.entries:
        for layer in asked.layers:
            keep = entry.policy.at(layer.id)[-1][0].part("keep")
            if ALL_LAYERS in keep.needs:
                found.setdefault((entry.policy.id, keep), []).append(layer)
    return [(policy, keep, tuple(layers)) for (policy, keep), layers in found.items()]


def _of_request(trace: Trace, asked: Asked, request: Request) -> Limits:
    """One layer after the other is read once, for all policies."""
    groups, seen = sharing(asked), {}
    for layer in asked.layers:
        mine = [(policy, keep) for policy, keep, layers in groups if layer in layers]
        if mine:
            with threadpool_limits(1, user_api="blas"):
                source = source_of(trace.lane(request, layer))
                seen.update({(policy, keep, layer.id): model_scope.preview(source, keep) for policy, keep in mine})
    found: Limits = {}
    for policy, keep, layers in groups:
        shares = model_scope.share([seen[policy, keep, layer.id] for layer in layers])
        found |= {(policy, request.id, layer.id): tuple(limits) for layer, limits in zip(layers, shares, strict=True)}
    return found
