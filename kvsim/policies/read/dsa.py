"""DSA: a learned indexer of its own keys and queries chooses the tokens that all heads of a layer attend to.

The score of token t is the sum over index heads h of w_h · max(0, q_h · k_t), with one index key a token; the best tokens are read, no sink
and no recent token among them unless they score. Keys, queries and weights are the model's own, from the tables index_k and index_q of the
trace; where those say that the score has no max ("dot"), as other learned selectors have it, none is taken.

Billed once for the layer, on its first kv head: with dtype="fp8" a byte a number and a scale of 4 bytes for each key (132 bytes for 128
numbers), with "kv" as the cache is billed. DeepSeek-V3.2-Exp rotates and rounds queries and keys to fp8 before they
meet; here they meet as stored. Behind a keep whose kv heads hold different tokens, each reads the best of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvsim.geometry import Need
from kvsim.kernels.indexer import weighted
from kvsim.policies.protocol import INDEX, Floats, Read, View
from kvsim.units import tokens

SCALE = 4  # bytes of a key's scale in fp8


@dataclass(frozen=True, kw_only=True)
class dsa(Read):
    act = "reads the tokens that the model's own learned indexer scores highest, one set for all heads of a layer"
    paper = "DeepSeek-AI, DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention, 2025"
    presets: ClassVar = {
        "deepseek-v3.2": {
            "source": "deepseek-ai/DeepSeek-V3.2-Exp 6d8cb70, inference: index_topk of the configuration, keys in fp8 with one scale",
            "read": tokens(2048), "dtype": "fp8",
        },
    }  # fmt: skip

    page: int = 1
    dtype: Literal["fp8", "kv"] = "fp8"

    heads = "max"  # of equal scores: the group has one set

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({INDEX})

    def score(self, view: View) -> Floats:
        rows = view.learned
        assert rows is not None
        out = np.empty((len(rows.q), len(rows.k)))
        weighted(rows.q, rows.w, rows.k, rows.score_fn == "relu_weighted", out)
        return np.broadcast_to(out[:, None, None], (*view.q.shape[:3], len(rows.k)))

    def index_row_bytes(self, dim: int, itemsize: int) -> int:
        return dim + SCALE if self.dtype == "fp8" else dim * itemsize
