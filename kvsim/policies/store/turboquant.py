"""TurboQuant as vLLM has it: keys of norm 1, rotated, on the best levels for normal numbers; values per token in even steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.codecs.floats import e4m3
from kvsim.codecs.lloyd_max import lloyd_max
from kvsim.codecs.minmax import uniform
from kvsim.codecs.pipeline import pipeline
from kvsim.codecs.rotate import hadamard
from kvsim.codecs.scale import token_norm
from kvsim.policies.protocol import Codecs, Mask, Seen, Store, expect, older
from kvsim.policies.store.kivi import EXACT

VLLM = "vllm-project/vllm 1471680, quantization/turboquant/config.py: "


@dataclass(frozen=True, kw_only=True)
class turboquant(Store):
    """Keys in 8 bits are e4m3 as they are, without norm, rotation or scale. The paper's QJL residual is left out, as in vLLM.

    Deviations: levels are those of the exact integral, vLLM's of a sum of 200 points; values are coded by their zero and step as fp16 holds
    them, halves to even, vLLM's by float32 ones and halves up; a slot of an odd number of bytes is not rounded up, which rows of a multiple
    of 16 numbers never are; for hybrid models, where vLLM leaves no layer exact, say exact_layers=0."""

    act = "codes keys by norm, rotation and normal levels, and values per token, in 3 to 8 bits"
    paper = "Zandieh et al., TurboQuant, arXiv 2504.19874, known from vLLM's code, which does not follow the paper in all"
    presets: ClassVar = {
        "vllm": {"source": VLLM + "its defaults, with norm correction as in turboquant_k3v4_nc", "k_bits": 3, "v_bits": 4},
        "k8v4": {"source": VLLM + "turboquant_k8v4", "claim": "2.6x", "k_bits": 8, "v_bits": 4, "renormalise": False},
        "4bit_nc": {"source": VLLM + "turboquant_4bit_nc", "claim": "3.8x", "k_bits": 4, "v_bits": 4, "renormalise": True},
        "k3v4_nc": {"source": VLLM + "turboquant_k3v4_nc", "claim": "~3.5x", "k_bits": 3, "v_bits": 4, "renormalise": True},
        "3bit_nc": {"source": VLLM + "turboquant_3bit_nc", "claim": "4.9x", "k_bits": 3, "v_bits": 3, "renormalise": True},
    }

    k_bits: int = 3
    v_bits: int = 4
    renormalise: bool = True  # decoded keys are brought to norm 1 before they get their own ("nc")
    residual: int = 0  # newest tokens that stay exact
    exact_layers: int = 2  # first and last attention layers that stay exact, as many at each end

    def __post_init__(self) -> None:
        expect(self, "k_bits", self.k_bits in (*range(1, 9), EXACT), f"1 to 7 bits, 8 for e4m3, or {EXACT} for exact")
        expect(self, "v_bits", self.v_bits in (*range(1, 9), EXACT), f"1 to 8 bits, or {EXACT} for exact")
        expect(self, "residual", self.residual >= 0, "0 tokens or more")
        expect(self, "exact_layers", self.exact_layers >= 0, "0 layers or more at each end")

    @property
    def codecs(self) -> Codecs:
        k = pipeline(rotate=hadamard(), scale=token_norm(self.renormalise), grid=lloyd_max(self.k_bits), pack=8)
        if self.k_bits == 8:
            k = pipeline(grid=e4m3(scaled=False))
        v = pipeline(grid=uniform(self.v_bits), pack=8)
        return Codecs(None if self.k_bits == EXACT else k, None if self.v_bits == EXACT else v)

    def place(self, seen: Seen) -> tuple[Mask, Mask]:
        old = older(seen, self.residual)
        return old & (self.k_bits != EXACT), old & (self.v_bits != EXACT)
