"""fp8: every row coded as 8-bit floats at the end of the step that brought it."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar, Literal

from kvsim.codecs.floats import e4m3
from kvsim.codecs.pipeline import pipeline
from kvsim.policies.protocol import Codecs, Mask, Seen, Store, expect, older
from kvsim.policies.store.kivi import EXACT


@dataclass(frozen=True, kw_only=True)
class fp8(Store):
    act = "codes all rows as 8-bit floats (e4m3)"
    paper = "Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433"
    presets: ClassVar = {
        "vllm": {
            "source": "vLLM documentation, quantized KV cache: fp8_e4m3 with scales of 1 where none are calibrated",
            "scale": "none",
        },
    }

    bits: InitVar[int] = 8  # both sides, where k_bits or v_bits does not say otherwise
    k_bits: int | None = None
    v_bits: int | None = None
    scale: Literal["token", "none"] = "token"
    residual: int = 0  # newest tokens that stay exact

    def __post_init__(self, bits: int) -> None:
        for side in ("k_bits", "v_bits"):
            if getattr(self, side) is None:
                object.__setattr__(self, side, bits)
            expect(self, side, getattr(self, side) in (8, EXACT), f"8, or {EXACT} for exact: there is one format, e4m3")
        expect(self, "residual", self.residual >= 0, "0 tokens or more")

    @property
    def codecs(self) -> Codecs:
        codec = pipeline(grid=e4m3(self.scale == "token"))
        return Codecs(None if self.k_bits == EXACT else codec, None if self.v_bits == EXACT else codec)

    def place(self, seen: Seen) -> tuple[Mask, Mask]:
        old = older(seen, self.residual)
        return old & (self.k_bits != EXACT), old & (self.v_bits != EXACT)
