"""OScaR: keys rotated, brought to norm 1 token by token, and then coded as KIVI codes them; values rotated.

A channel's group spans tokens, and a token with a norm unlike the others' widens the range of all of them. Not OSCAR, which is oscar_cov."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.codecs.minmax import uniform
from kvsim.codecs.pipeline import grouped, pipeline
from kvsim.codecs.rotate import hadamard
from kvsim.codecs.scale import token_norm
from kvsim.policies.protocol import Codecs
from kvsim.policies.store.kivi import EXACT, kivi


@dataclass(frozen=True, kw_only=True)
class oscar_ots(kivi):
    """Keys become H k / |H k|, the norm kept in fp16, and are coded per channel in groups of tokens; values become H v and are coded per
    token. Which row is coded when is KIVI's. The zero of a group is its lowest number, as in kivi(); the notes have a whole zero point."""

    act = "rotates rows, divides keys by their norm, and codes them as kivi does"
    paper = (
        "Su et al., OScaR: The Occam's Razor for Extreme KV Cache Quantization in LLMs and Beyond, arXiv 2605.19660, known from its abstract and"
        " notes of others on it"
    )
    presets: ClassVar = {
        "notes": {
            "source": "notes of others on arXiv 2605.19660: INT2, groups of 32, the newest 128 exact",
            "bits": 2, "group": 32, "residual": 128,
        },
    }  # fmt: skip

    rotate: Literal["hadamard", "none"] = "hadamard"
    norm: Literal["token", "none"] = "token"

    @property
    def codecs(self) -> Codecs:
        turn = hadamard() if self.rotate == "hadamard" else None
        scale = token_norm() if self.norm == "token" else None
        k = pipeline(
            rotate=turn, scale=scale, group=grouped("tokens", self.group), grid=uniform(self.k_bits or 2), pack=self.pack
        )
        v = pipeline(rotate=turn, group=grouped("channels", self.group), grid=uniform(self.v_bits or 2), pack=self.pack)
        return Codecs(None if self.k_bits == EXACT else k, None if self.v_bits == EXACT else v)
