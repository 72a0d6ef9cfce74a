"""SparDA's one-layer-ahead selection, by proxy: a layer's pages are ranked by the queries of the attention layer before.

SparDA trains, in every layer, a projection that forecasts what the next layer will ask, so that the blocks of a layer are known, and fetched,
while the layer before computes. A trace of another model has no forecast. Its queries of the layer before stand in for it, head by head: they
were never trained to meet this layer's keys, so what this policy loses is what the selection loses without a forecast, not what SparDA
loses. Pages are ranked by the mean of their keys, the coarse form of SparDA's windows of 32 keys every 16, one set for the heads of a group.
The first layer has none before it and is read whole (dense_layers).

How long a step takes when fetches hide behind the layer before: kvsim cost predict --overlap next_layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvsim.geometry import Need
from kvsim.policies.index.block_mean import block_mean
from kvsim.policies.protocol import BEFORE, Floats, Read, View, expect


@dataclass(frozen=True, kw_only=True)
class sparda_proxy(Read):
    act = "reads the pages that the queries of the layer before rank highest: known a layer ahead, so that they can be fetched meanwhile"
    paper = "Fu et al., SparDA: Sparse Decoupled Attention for Efficient Long-Context LLM Inference, arXiv 2606.04511"

    page: int = 64
    index: Any = field(default=block_mean())
    heads: Literal["each", "share", "max", "mean", "softmax_mean"] = "mean"
    tail: Literal["forced", "free"] = "forced"
    dense_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "index", hasattr(self.index, "summarise"), "an index, for example block_mean()")
        expect(self, "index", getattr(self.index, "n", 1) <= self.page, f"at most one box per token of page={self.page}")
        expect(self, "dense_layers", self.dense_layers >= 1, "1 layer or more: before the first there is none")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({BEFORE})

    def score(self, view: View) -> Floats:
        assert view.before is not None
        scores: Floats = self.index.score(view.before, view.summary)
        return scores
