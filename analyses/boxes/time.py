"""What a step takes by page size, batch and where the cache lies: measured bytes over the bandwidths of a GPU, as kvsim.cost prices them."""

from __future__ import annotations

from typing import Any

import polars as pl

from kvsim.cost.hardware import Gpu, named_gpu
from kvsim.cost.heads import Geometry
from kvsim.cost.launches import Launch, table
from kvsim.cost.model import CostModel
from kvsim.cost.price import parts, steps
from kvsim.cost.prices import Prices
from kvsim.trace.open import Trace

GPU = "h100"
BATCHES = (1, 8, 32)  # requests alike
DEVICE, HOST, BEHIND = "on the device", "on the host, fetched first", "on the host, fetched behind the rest"
FULL = "full attention, on the device"


def gpu() -> Gpu:
    return named_gpu(GPU)


def times(trace: Trace, needed: pl.DataFrame) -> pl.DataFrame:
    """Bytes of a layer's kv head (measures.bytes_for) -> role, policy, batch, where, us: a step of the whole model, with the mean of the layers
    measured as every layer. Bandwidths and bytes alone: no start of a kernel, no price of a small transfer, so a floor."""
    every = pl.col("whole")
    mean = needed.group_by("role", "policy", maintain_order=True).agg(
        rows=(pl.col("rows") * every).mean(), index=(pl.col("index") * every).mean(), whole=every.mean()
    )
    asked = [(r, n) for r in mean.to_dicts() for n in BATCHES]
    heads = _heads(trace)
    work = [launches for r, n in asked for launches in _steps(r, n, heads)]
    prices = Prices(CostModel(gpu(), [], {}), (heads.q_heads, heads.kv_heads, heads.head_dim), weights_bytes=weights(trace))
    told = steps(parts(prices, table(work, heads))).select("step_us", "overlap_us").rows()
    found = []
    for i, (r, n) in enumerate(asked):
        device, host, full = told[3 * i : 3 * i + 3]
        us = {DEVICE: device[0], HOST: host[0], BEHIND: host[1], FULL: full[0]}
        found += [(r["role"], r["policy"], n, where, x) for where, x in us.items()]
    return pl.DataFrame(found, schema=["role", "policy", "batch", "where", "us"], orient="row")


def _steps(one: dict[str, Any], batch: int, heads: Geometry) -> list[list[Launch]]:
    """With the cache on the device, on the host, and with full attention on the device."""

    def launch(cls: str, part: str) -> Launch:
        return Launch(cls, round(one[part] * heads.kv_heads * heads.layers * batch), heads.layers, heads.layers, batch)

    scan, gather, fetch = launch("page_scan", "index"), launch("gather_attn", "rows"), launch("host_fetch", "rows")
    return [[scan, gather], [scan, fetch, gather], [launch("dense_attn", "whole")]]


def _heads(trace: Trace) -> Geometry:
    one = trace.captured_layers[0]
    return Geometry(len(trace.layers), one.q_heads, one.kv_heads, one.key_dim, one.value_dim, one.dtype)


def weights(trace: Trace) -> int | None:
    """Bytes in 16 bits that a step reads of a model with gated MLPs, from its configuration; None where that has other numbers.

    Embeddings count once: as the matrix that gives the next token's logits."""
    config, one = trace.manifest["source"].get("config", {}), trace.captured_layers[0]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    if not all(isinstance(config.get(n), int) for n in names):
        return None
    vocabulary, hidden, inner, layers = (config[n] for n in names)
    attention = hidden * (2 * one.q_heads + one.kv_heads) * one.key_dim + hidden * one.kv_heads * one.value_dim
    return 2 * (vocabulary * hidden + layers * (attention + 3 * hidden * inner))
