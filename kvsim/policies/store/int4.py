"""int4: every row coded in four bits at the end of its step, keys and values alike per token in groups of channels."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from kvsim.codecs.minmax import uniform
from kvsim.codecs.pipeline import grouped, pipeline
from kvsim.policies.protocol import Codecs, Mask, Seen, Store, expect, older
from kvsim.policies.store.kivi import EXACT


@dataclass(frozen=True, kw_only=True)
class int4(Store):
    """Asymmetric min-max with an fp16 zero and step per group; the plain scheme that others are measured against, of no one paper."""

    act = "codes all rows per token in four bits"
    paper = "no paper: per-token groups as in Sheng et al., FlexGen, arXiv 2303.06865, known from its abstract"
    presets: ClassVar = {}

    bits: InitVar[int] = 4  # both sides, where k_bits or v_bits does not say otherwise
    k_bits: int | None = None
    v_bits: int | None = None
    group: int | None = 32  # channels that share a zero and a step; None: the whole row
    residual: int = 0  # newest tokens that stay exact

    def __post_init__(self, bits: int) -> None:
        for side in ("k_bits", "v_bits"):
            if getattr(self, side) is None:
                object.__setattr__(self, side, bits)
            expect(self, side, getattr(self, side) in (4, EXACT), f"4, or {EXACT} for exact; kivi() has other widths")
        expect(self, "group", self.group is None or self.group >= 1, "1 channel or more, or None for the whole row")
        expect(self, "residual", self.residual >= 0, "0 tokens or more")

    @property
    def codecs(self) -> Codecs:
        codec = pipeline(group=grouped("channels", self.group), grid=uniform(4))
        return Codecs(None if self.k_bits == EXACT else codec, None if self.v_bits == EXACT else codec)

    def place(self, seen: Seen) -> tuple[Mask, Mask]:
        old = older(seen, self.residual)
        return old & (self.k_bits != EXACT), old & (self.v_bits != EXACT)
