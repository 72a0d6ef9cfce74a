"""Offload: all rows live on the host, and the device has a cache of pages that reads are served from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsim.policies.protocol import Budget, Chain, Store, expect


@dataclass(frozen=True, kw_only=True)
class offload(Store):
    act = "keeps rows on the host and a cache of pages on the device"
    paper = "as in Xiao et al., InfLLM, arXiv 2402.04617 (least recently used pages), and Chen et al., ArkVale, NeurIPS 2024 (by score)"
    codecs = None

    device: Budget  # of the cache, per kv head
    evict: Literal["lru", "score"] = "lru"
    summaries: Literal["device", "host"] = "device"
    prefetch: Literal["last", "neighbour"] | None = None

    def beside(self, chain: Chain) -> None:
        super().beside(chain)
        read = chain.part("read")
        if read is None:
            return
        expect(self, "device", read.page is not None, f"a read part that reads pages, which {type(read).__name__}() does not")
        expect(
            self, "evict", self.evict == "lru" or read.read is not None, f'"lru": {type(read).__name__}() gives pages no score'
        )
