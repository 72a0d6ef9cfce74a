"""A small run that the tests of pricing share."""

from __future__ import annotations

from kvsim.cost.heads import Geometry

GQA = Geometry(2, 4, 2, 16, 16, "float16")
POLICIES = [
    "full()",
    'quest(read=tokens(64), heads="max")',
    'quest(read=tokens(64), heads="mean", page=10, tile=16, dense_layers=1)',
    'quest(read=share(0.25), heads="max", index=boxes(n=2))',
    "h2o(hold=tokens(64))",
    "h2o(hold=share(0.3))",
    "streaming_llm(hold=tokens(40))",
    "kivi(bits=2, group=32, residual=64)",
    "fp8()",
]
CHAIN = 'streaming_llm(hold=tokens(100)) >> quest(read=tokens(32), heads="max")'
