"""oracle(): pages ranked by the dense truth, their attention mass or their best logit; what any ranking could reach at best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsim.geometry import Need
from kvsim.policies.protocol import TRUTH, Floats, Read, View


@dataclass(frozen=True, kw_only=True)
class oracle(Read):
    act = "reads the pages that really have the most attention mass, or the best token"

    by: Literal["mass", "logit"] = "mass"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({TRUTH})

    def score(self, view: View) -> Floats:
        assert view.truth is not None
        return view.truth(self.by)
