"""Quest: every query reads the pages whose summaries promise the largest logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kvsim import units
from kvsim.policies.index.boxes import boxes
from kvsim.policies.protocol import Chain, Floats, Read, View, expect
from kvsim.policies.rules import Rule, gap
from kvsim.units import Budget, tokens


@dataclass(frozen=True, kw_only=True)
class quest(Read):
    act = "reads the pages with the highest bound on q·k"
    paper = "Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774"
    presets: ClassVar = {
        "mit-kernel": {
            "source": "mit-han-lab/Quest 01c1623, quest/utils/controller.py: the last page inside the budget, two dense layers",
            "read": tokens(512), "page": 16, "tail": "forced", "dense_layers": 2,
        },
        "mit-eval": {
            "source": "mit-han-lab/Quest 01c1623, evaluation/quest_attention.py, without its floor of three pages",
            "page": 16, "tail": "free", "dense_layers": 2,
        },
    }  # fmt: skip

    read: Budget | Rule  # type: ignore[assignment]  # wider than its base: a bound lets a rule stop
    index: Any = field(default=boxes())
    heads: Literal["each", "share", "max", "mean", "softmax_mean", "split"] = "each"
    private: int = 1  # pages of its own that heads="split" gives every query head
    tail: Literal["forced", "free"] = "forced"
    dense_layers: int = 0
    tile: int | None = None  # type: ignore[assignment]  # rows that memory holds and loads at once; a page has tiles of its own
    shards: units.shards | None = None  # type: ignore[assignment]
    summaries: Literal["tight", "stale"] = field(
        default="tight", repr=False
    )  # of a page that lost rows: made again, or as they were

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "index", hasattr(self.index, "summarise"), "an index, for example boxes()")
        expect(self, "index", getattr(self.index, "n", 1) <= self.page, f"at most one box per token of page={self.page}")
        expect(self, "private", self.private >= 0, "0 pages or more")
        expect(self, "dense_layers", self.dense_layers >= 0, "0 layers or more")
        expect(self, "tile", self.tile is None or self.tile >= 1, "1 row or more")
        if isinstance(self.read, Rule):
            rule = type(self.read).__name__
            alone = self.heads in ("each", "share")
            expect(self, "heads", alone, "each or share with a stopping rule: every head stops by itself")
            expect(self, "shards", self.shards is None, f"none with {rule}(), which stops on one order of all pages")
            proof = self.index.bound or not self.read.certifies
            if isinstance(self.read, gap) and self.read.file is not None:
                made_for = self.read.fits(self.page, self.index)
                expect(
                    self, "read", made_for is None, f"a file made for page={self.page} and this index, it was made for {made_for}"
                )
            expect(self, "index", proof, f"an index that is a bound, because {rule}() proves by it what it may leave out")
        as_written = self.summaries == "tight" or getattr(self.index, "keys", "exact") == "exact"
        expect(self, "summaries", as_written, '"tight" with keys="recon" or "expanded", which change as rows are coded')
        whole = self.shards is None or self.heads != "split"
        expect(self, "heads", whole, "each, share, max, mean or softmax_mean with shards=")

    def beside(self, chain: Chain) -> None:
        """Behind a store that codes keys a proof needs bounds of the keys as stored, and widening needs to know how far those may lie."""
        codecs = next((c for p in chain.parts if (c := getattr(p, "codecs", None)) is not None), None)
        if codecs is None or codecs.k is None:
            return
        keys = getattr(self.index, "keys", "exact")
        if isinstance(self.read, Rule) and self.read.certifies:
            proof = f'keys="recon" or "expanded", because {type(self.read).__name__}() proves by bounds of the keys that are read'
            expect(self, "index", keys != "exact", f"{proof}, and they are coded")
        known = getattr(codecs.k, "error", None) is not None and codecs.keys == "post"
        expect(
            self,
            "index",
            keys != "expanded" or known,
            'keys="recon": how far these codes can move a key as attention sees it is not known',
        )

    def score(self, view: View) -> Floats:
        scores: Floats = self.index.score(view.q, view.summary)
        return scores
