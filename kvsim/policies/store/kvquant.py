"""KVQuant: keys before RoPE per channel in ranges known beforehand, values per token, both on learned levels; outliers stay exact."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.calibration import Sample
from kvsim.codecs.nuq import nuq, of_keys, of_values
from kvsim.codecs.pipeline import pipeline
from kvsim.geometry import Need
from kvsim.policies.calibrated import Calibrated
from kvsim.policies.protocol import K_PRE, Codecs, Mask, Seen, expect
from kvsim.policies.store.kivi import EXACT


@dataclass(frozen=True, kw_only=True)
class kvquant(Calibrated):
    """Deviations: levels by k-means without Fisher weights, which a trace has not; values in ranges per kv head, where the authors' span all
    heads of a token, so that more of a short row are outliers; no Q-Norm and no cap on outliers."""

    computed = "per layer k.edges [Hkv, 4, d] (thresholds, offset, range of each channel before RoPE), k.level and v.level (learned levels)"
    act = "codes keys before RoPE per channel in calibrated ranges and values per token, outliers exact"
    paper = "Hooper et al., KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization, arXiv 2401.18079"
    presets: ClassVar = {
        "nuq3-1p": {"source": "SqueezeAILab/KVQuant 57a2383, README: nuq3-1%", "bits": 3, "outliers": 0.01},
        "nuq3-1p-first": {
            "source": "SqueezeAILab/KVQuant 57a2383, README: --first_few_fp16 1",
            "bits": 3,
            "outliers": 0.01,
            "first": 1,
        },
    }

    bits: InitVar[int] = 3  # both sides, where k_bits or v_bits does not say otherwise
    k_bits: int | None = None
    v_bits: int | None = None
    outliers: float = 0.01
    first: int = 0  # first positions that stay exact
    calibration: str | None = None  # FILE, shown as FILE@ and the first digits of its sha256
    in_sample: bool = field(default=False, repr=False)  # whether it may be of the trace that is replayed

    def __post_init__(self, bits: int) -> None:
        for side in ("k_bits", "v_bits"):
            if getattr(self, side) is None:
                object.__setattr__(self, side, bits)
            expect(self, side, getattr(self, side) in (*range(1, 9), EXACT), f"1 to 8 bits, or {EXACT} for exact")
        expect(self, "outliers", 0 <= self.outliers < 0.5, "a part of the numbers, 0 to below 0.5")
        expect(self, "first", self.first >= 0, "0 tokens or more")
        self.pinned()

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({K_PRE})

    @property
    def codecs(self) -> Codecs:
        file = self.loaded()
        k, v = (
            None if b in (None, EXACT) else pipeline(grid=nuq(b, self.outliers, side, file))
            for side, b in (("k", self.k_bits), ("v", self.v_bits))
        )
        return Codecs(k, v, keys="pre")

    @property
    def calibration_options(self) -> dict[str, Any]:
        return {"k_bits": self.k_bits, "v_bits": self.v_bits, "outliers": self.outliers}

    def calibrate(self, sample: Sample) -> dict[str, NDArray[np.float64]]:
        """From keys before RoPE and values."""
        found: dict[str, NDArray[np.float64]] = {}
        for bits, learn, x in ((self.k_bits, of_keys, sample.keys_pre), (self.v_bits, of_values, sample.values)):
            if bits is not None and bits != EXACT and x is not None:
                found |= learn(x, bits, self.outliers)
        return found

    def place(self, seen: Seen) -> tuple[Mask, Mask]:
        later = seen.valid & (seen.pos >= self.first)
        return later & (self.k_bits != EXACT), later & (self.v_bits != EXACT)
