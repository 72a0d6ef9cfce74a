"""KIVI: keys coded per channel in groups of tokens, values per token in groups of channels; the newest tokens stay exact.

Keys wait until `residual` of them are there and are coded as one block; values slide: all but the newest `residual` are coded.
Both are counted over the tokens still held."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import ClassVar, Literal

from kvsim.codecs.minmax import uniform
from kvsim.codecs.pipeline import grouped, pipeline
from kvsim.policies.protocol import CODED, FULL, Codecs, Mask, Seen, Store, expect

EXACT = 16


@dataclass(frozen=True, kw_only=True)
class kivi(Store):
    act = "codes old keys per channel and old values per token in a few bits"
    paper = "Liu et al., KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, arXiv 2402.02750"
    presets: ClassVar = {
        "arguments": {"source": "jy-yuan/KIVI 876b4d2, defaults of its arguments", "bits": 2, "group": 128, "residual": 128},
        "examples": {"source": "jy-yuan/KIVI 876b4d2, example scripts", "bits": 2, "group": 32, "residual": 32},
    }

    bits: InitVar[int] = 2  # both sides, where k_bits or v_bits does not say otherwise
    k_bits: int | None = None
    v_bits: int | None = None
    group: int = 32
    residual: int = 128
    pack: int = field(default=1, repr=False)  # bits of the words that hold the codes of a group

    def __post_init__(self, bits: int) -> None:
        for side in ("k_bits", "v_bits"):
            if getattr(self, side) is None:
                object.__setattr__(self, side, bits)
            expect(self, side, getattr(self, side) in (*range(1, 9), EXACT), f"1 to 8 bits, or {EXACT} for exact")
        expect(self, "group", self.group >= 1, "1 or more")
        expect(self, "pack", self.pack >= 1, "1 bit or more, for example 32")
        whole = self.residual >= self.group and self.residual % self.group == 0
        expect(self, "residual", whole, f"a multiple of group={self.group}, because keys are coded in whole groups")

    @property
    def codecs(self) -> Codecs:
        return Codecs(self._codec(self.k_bits, "tokens"), self._codec(self.v_bits, "channels"))

    def _codec(self, bits: int | None, axis: Literal["tokens", "channels"]) -> pipeline | None:
        if bits is None or bits == EXACT:
            return None
        return pipeline(group=grouped(axis, self.group), grid=uniform(bits), pack=self.pack)

    def place(self, seen: Seen) -> tuple[Mask, Mask]:
        waiting = seen.valid & (seen.k == FULL)
        block = waiting.sum(axis=1, keepdims=True) // self.residual * self.residual
        keys = (seen.k == CODED) | (waiting & (waiting.cumsum(axis=1) <= block))
        newer = seen.valid.sum(axis=1, keepdims=True) - seen.valid.cumsum(axis=1)
        values = (seen.v == CODED) | (newer >= self.residual)
        return (keys & seen.valid & (self.k_bits != EXACT), values & seen.valid & (self.v_bits != EXACT))
