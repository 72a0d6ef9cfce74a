"""OSCAR: rows in a basis learned from the queries of other data, their largest numbers clipped, two bits a number.

Three segments: the first `sinks` positions and the newest `recent` tokens are exact, all between is coded, each row once, when it leaves the
newest. Not OScaR, which is oscar_ots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.calibration import Sample
from kvsim.codecs.clip import quantile
from kvsim.codecs.minmax import zero_point
from kvsim.codecs.pipeline import grouped, pipeline
from kvsim.codecs.rotate import calibrated, hadamard, power_of_two
from kvsim.kernels import rotate
from kvsim.policies.calibrated import Calibrated
from kvsim.policies.protocol import CODED, Codecs, Mask, Seen, expect, older

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class oscar_cov(Calibrated):
    """Everything acts on keys after RoPE, as they are captured and as the authors dump them.

    Deviations: codes are made in float64 with scales as they are stored, the authors' in float32; queries of a calibration are those that a
    trace has (its decode steps and the last of its prompt), theirs are of some 30 000 prompt tokens. The permutation that ends their default
    basis is made, though it changes nothing where one group is the whole row (head_dim up to `group`)."""

    computed = "per layer k.rotation and v.rotation [d, d]: eigenvectors of the covariance of queries, of weighted values, times Hadamard"
    act = "codes all but sinks and recent rows in two bits, in a learned basis and clipped"
    paper = (
        "Zhou et al., OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization, arXiv 2605.17757, known from its"
        " authors' code (FutureMLS-Lab/OSCAR 473ff3f); the paper was not read"
    )
    presets: ClassVar = {
        "readme": {
            "source": "FutureMLS-Lab/OSCAR 473ff3f, README: bits a number that hold with 16-bit scales", "claim": "2.28 bits",
            "bits": 2, "clip_k": 0.96, "clip_v": 0.92, "group": 128, "scales": 16, "sinks": 64, "recent": 256,
        },
        "shipped": {
            "source": "FutureMLS-Lab/OSCAR 473ff3f, its launch line: scales and zeros in float32", "claim": "2.28 bits",
            "bits": 2, "clip_k": 0.96, "clip_v": 0.92, "group": 128, "scales": 32, "sinks": 64, "recent": 256,
        },
    }  # fmt: skip

    bits: int = 2
    clip_k: float = 0.96  # which size of a row the larger ones are moved to; 0: no clipping
    clip_v: float = 0.92
    group: int = 128  # channels that share a scale and a zero
    scales: int = 32  # bits of each
    sinks: int = 64
    recent: int = 256
    rotate: Literal["file", "hadamard", "none"] = "file"
    calibration: str | None = None  # FILE, shown as FILE@ and the first digits of its sha256
    in_sample: bool = field(default=False, repr=False)  # whether it may be of the trace that is replayed

    def __post_init__(self) -> None:
        expect(self, "bits", 1 <= self.bits <= 8, "1 to 8 bits")
        for name in ("clip_k", "clip_v"):
            expect(self, name, 0 <= getattr(self, name) <= 1, "a part of the numbers of a row, 0 to 1")
        expect(self, "group", self.group >= 1, "1 channel or more")
        expect(self, "scales", self.scales in (16, 32), "16 or 32 bits")
        expect(self, "sinks", self.sinks >= 0, "0 tokens or more")
        expect(self, "recent", self.recent >= 0, "0 tokens or more")
        expect(self, "calibration", self.calibration is None or self.rotate == "file", f'None with rotate="{self.rotate}"')
        self.pinned()

    @property
    def codecs(self) -> Codecs:
        return Codecs(self._codec("k", self.clip_k), self._codec("v", self.clip_v))

    def _codec(self, side: str, clip: float) -> pipeline:
        turn = hadamard() if self.rotate == "hadamard" else None
        return pipeline(
            rotate=calibrated(side, self.loaded()) if self.rotate == "file" else turn,
            clip=quantile(clip) if clip > 0 else None,
            group=grouped("channels", self.group),
            grid=zero_point(self.bits, "float32" if self.scales == 32 else "float16"),
        )

    @property
    def calibration_options(self) -> dict[str, Any]:
        """None: bits, clips and segments do not change the basis."""
        return {}

    def calibrate(self, sample: Sample) -> dict[str, Floats]:
        """One basis of keys and one of values for all kv heads of a layer."""
        return {"k.rotation": mixed(query_covariance(sample)), "v.rotation": mixed(value_covariance(sample))}

    def place(self, seen: Seen) -> tuple[Mask, Mask]:
        middle = older(seen, self.recent) & (seen.pos >= self.sinks)
        return middle | (seen.valid & (seen.k == CODED)), middle | (seen.valid & (seen.v == CODED))


# ------------------------------------------------------------------------------------------------ the basis
def query_covariance(sample: Sample) -> Floats:
    """f64[d, d]: the mean over kv heads of the mean outer product of the queries of the head's group."""
    return np.mean([q.T @ q / len(q) for q in sample.queries], axis=0)


def value_covariance(sample: Sample) -> Floats:
    """f64[dv, dv]: the mean over kv heads of the mean outer product of values, each weighted by its key's mean squared logit, k^T C k with C the
    covariance of the head's own queries; weights have mean 1. No softmax is in it, for all that the authors call it score-weighted."""
    found = []
    for q, k, v in zip(sample.queries, sample.keys, sample.values, strict=True):
        weight = ((k @ (q.T @ q / len(q))) * k).sum(axis=1)
        weight = weight / max(weight.sum(), 1e-12) * len(k)
        found.append((v * weight[:, None]).T @ v / len(v))
    return np.mean(found, axis=0)


def mixed(covariance: Floats) -> Floats:
    """f64[d, d]: its eigenvectors times Hadamard, the columns in an order that spreads large eigenvalues over the groups of a row: place
    reversed(i) has the column of the i-th largest. An eigenvector's sign is free; here its largest number is positive, on any machine."""
    spread, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    dim = len(spread)
    vectors *= np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(dim)])
    power_of_two(dim, "oscar_cov")
    order = np.empty(dim, np.int64)
    order[reversed_bits(dim)] = np.argsort(-spread, kind="stable")
    return np.ascontiguousarray((vectors @ rotate.hadamard(dim))[:, order])


def reversed_bits(dim: int) -> NDArray[np.int64]:
    """i64[dim]: every number below a power of two with its binary digits in the other order."""
    width = dim.bit_length() - 1
    return np.array([int(f"{i:0{width}b}"[::-1], 2) if width else 0 for i in range(dim)])
