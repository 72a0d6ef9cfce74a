"""Published times that bytes and bandwidths contradict, worked out from a geometry and the figures of the GPUs."""

from __future__ import annotations

from typing import Any

from kvsim.cost.hardware import named_gpu
from kvsim.cost.heads import Geometry, geometry
from kvsim.cost.plain import row_bytes

LLAMA2_7B_WEIGHTS = 6_738_415_616 * 2  # parameters of the model card, 16 bits each
QUEST: dict[str, Any] = {
    "tokens": 32768,
    "told_ms": 11.0,
    "source": "Quest, arXiv:2406.10774: reading 32K tokens of cache takes at least 11 ms on an RTX 4090",
}
QEVICT: dict[str, Any] = {
    "batch": 32, "prompt": 256, "new": 1024, "share": 0.2, "tpot_ms": (59.7, 146.4), "saved_gb": 8.76, "gpu": "a100-80",
    "source": "QEvict, arXiv:2608.05326, table 4: time per output token and peak memory with 20 % of the cache",
}  # fmt: skip


def cache_bytes(heads: Geometry, tokens: int) -> int:
    """K and V of all layers."""
    return tokens * row_bytes(heads) * heads.kv_heads * heads.layers


def quest() -> dict[str, Any]:
    """Time at the peak of the card, the bandwidth that the claim needs, and whether cache and weights fit."""
    card, like = named_gpu("rtx4090"), named_gpu("a100-40")
    size = cache_bytes(geometry("meta-llama/Llama-2-7b-hf"), QUEST["tokens"])
    return {
        "claim": QUEST["source"],
        "bytes": size,
        "told_ms": QUEST["told_ms"],
        "floor_ms": size / card.bandwidth_gbps / 1e6,
        "needs_gbps": size / QUEST["told_ms"] / 1e6,
        "card_gbps": card.bandwidth_gbps,
        "like": like.name,
        "like_ms": size / like.bandwidth_gbps / 1e6,
        "with_weights_gb": (size + LLAMA2_7B_WEIGHTS) / 1e9,
        "card_gb": card.memory_gb,
    }


def qevict() -> dict[str, Any]:
    """What a fifth of the cache can save of a step at the peak of a fast card, and the whole cache against the memory said to be saved."""
    card, heads = named_gpu(QEVICT["gpu"]), geometry("meta-llama/Llama-3.1-8B")
    sizes = {
        "mean": QEVICT["batch"] * cache_bytes(heads, QEVICT["prompt"] + QEVICT["new"] // 2),
        "end": QEVICT["batch"] * cache_bytes(heads, QEVICT["prompt"] + QEVICT["new"]),
    }
    dropped = 1 - QEVICT["share"]
    return {
        "claim": QEVICT["source"],
        "card": card.name,
        "saves_ms": {when: dropped * size / card.bandwidth_gbps / 1e6 for when, size in sizes.items()},
        "tpot_ms": QEVICT["tpot_ms"],
        "cache_gb": sizes["end"] / 1e9,
        "saved_gb": QEVICT["saved_gb"],
    }


def lines() -> list[str]:
    """What `kvsim cost explain --claims` says."""
    a, b = quest(), qevict()
    (low, high), saves = b["tpot_ms"], b["saves_ms"]
    return [
        a["claim"],
        f"  not possible: {a['bytes'] / 2**30:.0f} GiB at the card's {a['card_gbps']:.0f} GB/s take {a['floor_ms']:.1f} ms",
        f"  {a['told_ms']:.0f} ms need {a['needs_gbps']:.0f} GB/s; at the peak of an {a['like']} it is {a['like_ms']:.2f} ms",
        f"  and the cache with 16-bit weights is {a['with_weights_gb']:.1f} GB, which do not fit into {a['card_gb']:g} GB",
        b["claim"],
        f"  not about bytes of the cache: a fifth of it read saves {saves['mean']:.1f} ms at the mean length, {saves['end']:.1f} at the end,",
        f"  at the peak of an {b['card']}, of steps of {low:.0f} to {high:.0f} ms",
        f"  and {b['saved_gb']:.2f} GB of memory saved is more than the whole cache, {b['cache_gb']:.2f} GB: other memory is counted in",
    ]
