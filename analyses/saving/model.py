"""The GPU that questions of time are answered for: one that published times describe, a step of Llama-2-7B on an RTX 6000 Ada."""

from __future__ import annotations

from functools import cache
from typing import Any

from analyses.contexts import ROOT
from kvsim.cost.heads import Geometry, geometry
from kvsim.cost.launches import Kernels
from kvsim.cost.model import CostModel, calibrate
from kvsim.cost.serve import Asked as Serving
from kvsim.cost.serve import serve
from kvsim.cost.whatif import Asked, whatif

SAMPLES = "kvsim/cost/published/quest-figure-10.csv"
WEIGHTS = 13_476_831_232  # bytes of Llama-2-7B in 16 bits
QUEST, STREAM, HEAVY = "quest(read=tokens(2048), dense_layers=2)", "streaming_llm(hold=tokens(2048))", "h2o(hold=tokens(2048))"
KIVI = "kivi(bits=2, group=32, residual=128)"


@cache
def ada() -> CostModel:
    """Fitted to the six steps with a full cache in figure 10 of Quest (arXiv:2406.10774)."""
    return calibrate([ROOT / SAMPLES])


@cache
def heads() -> Geometry:
    return geometry("meta-llama/Llama-2-7b-hf")


def step(policy: str, context: int, weights: str = "FP16", **how: Any) -> dict[str, Any]:
    """One row of `kvsim cost whatif`: step_us, parts and speedup over full attention with its interval."""
    asked = Asked((policy,), contexts=(context,), variants=(weights,), how=Kernels(**how))
    return whatif(ada(), heads(), asked)[0]


@cache
def served(contexts: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768), **how: Any) -> dict[str, Any]:
    """`kvsim cost serve` with 16-bit weights, requests of each length alike, and a mix of three."""
    asked = Serving(
        (QUEST, STREAM, KIVI), contexts, lengths=(4000, 9000, 30000), variant="FP16", weights=WEIGHTS, how=Kernels(**how)
    )
    return serve(ada(), heads(), asked)
