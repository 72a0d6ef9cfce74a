"""Stopping rules: how many pages a query reads when the query itself decides. Values only; engine.stop applies them.

All work on pages in the order of their scores, forced pages first. u is a page's score as a logit (scaled, soft-capped): for a rule
that certifies, an upper bound of the page's true logits."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.calibration import MAKE, Calibration, load
from kvsim.errors import WrongUse
from kvsim.policies.parameters import Checked, expect, written
from kvsim.units import Budget

FEATURES = ("gap", "top1", "entropy", "age")  # of a query's page scores, as engine.stop.features has them


@dataclass(frozen=True, kw_only=True)
class Rule(metaclass=Checked):
    """certifies: its result is proved by bounds, so the ranking must be one."""

    certifies: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class exact(Rule):
    """Stop when the next page's bound is below the r-th largest true logit read so far (card A2): the r best tokens are proved found.

    batch: pages opened per round; cap: an upper budget, and then `certified` tells whether the proof was reached."""

    certifies = True
    r: int
    batch: int = 1
    cap: Budget | None = None

    def __post_init__(self) -> None:
        expect(self, "r", self.r >= 1, "1 token or more")
        expect(self, "batch", self.batch >= 1, "1 page or more")


@dataclass(frozen=True, kw_only=True)
class mass(Rule):
    """Stop when the bounds prove that at most `eps` of the softmax mass is unread (card A3)."""

    certifies = True
    eps: float
    batch: int = 1
    cap: Budget | None = None

    def __post_init__(self) -> None:
        expect(self, "eps", 0 < self.eps < 1, "a part of the softmax mass, above 0 and below 1")
        expect(self, "batch", self.batch >= 1, "1 page or more")


@dataclass(frozen=True, kw_only=True)
class top_p(Rule):
    """The shortest prefix whose estimated mass, the softmax over pages of u + ln(rows), reaches p (card A13); proves nothing."""

    p: float
    cap: Budget | None = None

    def __post_init__(self) -> None:
        expect(self, "p", 0 < self.p <= 1, "a part of the estimated mass, above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class gap(Rule):
    """The smallest budget from `floor` to `cap` after which the score falls by at least `min` (scaled logits), else `cap`.

    file: instead of these, the first of the file's levels at which its regression puts the probability of covering too little at `risk`
    or less, else the last level; made by kvsim calibrate from other contexts than it is replayed on."""

    min: float | None = field(default=None, repr=False)
    floor: Budget | None = field(default=None, repr=False)
    cap: Budget | None = field(default=None, repr=False)
    file: str | None = field(default=None, repr=False)  # FILE, shown as FILE@ and the first digits of its sha256
    risk: float = field(default=0.1, repr=False)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("min", "floor", "cap")}
        if self.file is not None:
            for name, value in given.items():
                expect(self, name, value is None, "none beside file=, which has levels of its own")
            expect(self, "risk", 0 < self.risk < 1, "a probability, above 0 and below 1")
            file = self.calibration
            object.__setattr__(self, "file", f"{file.path}@{file.digest}")
            return
        for name, value in given.items():
            if value is None:
                raise WrongUse(f"gap: {name}= is missing; give min=, floor= and cap=, or file=")
        assert self.min is not None
        expect(self, "risk", self.risk == 0.1, "none without file=")
        expect(self, "min", self.min >= 0, "a fall in scaled logits, 0 or more")
        (floor, *of), (cap, *over) = astuple(self.floor), astuple(self.cap)  # type: ignore[arg-type]  # budgets, as was just seen
        comparable = type(self.floor) is type(self.cap) and of == over
        expect(self, "floor", not comparable or floor <= cap, f"at most cap={written(self.cap)}")

    @property
    def calibration(self) -> Calibration:
        assert self.file is not None
        file = load(self.file)
        if file.about.get("kind") != "gap":
            raise WrongUse(f"calibration {file.path} was made for {file.about.get('kind')}, and this is gap(); {MAKE}")
        if not file.about["contexts"]:
            raise WrongUse(f"calibration {file.path}: it does not say of which contexts it was made; {MAKE}")
        levels = file.about["options"].get("levels")
        if not _ascending(levels):
            raise WrongUse(f"calibration {file.path}: its levels are {levels!r}, expected ascending numbers of pages; {MAKE}")
        return file

    @property
    def levels(self) -> list[int]:
        """The file's budgets, in pages."""
        return list(self.calibration.about["options"]["levels"])

    def weights(self, layer: int, head: int) -> NDArray[np.float64]:
        """f64[levels, features + 1] of a kv head. Raises WrongUse for one that the file does not cover."""
        found, shape = self.calibration.array(f"{layer}.gap", layer, head), (len(self.levels), len(FEATURES) + 1)
        if found.shape != shape:
            raise WrongUse(f"calibration {self.file}: layer {layer} has numbers of shape {found.shape}, expected {shape}; {MAKE}")
        return found

    def fits(self, page: int, index: object) -> str | None:
        """What the file was made for, where that is something else than these pages and this index."""
        options = self.calibration.about["options"]
        mine = ranking(page, index)
        theirs = {name: options.get(name) for name in mine}
        return None if theirs == mine else ", ".join(f"{name}={x}" for name, x in theirs.items())


def _ascending(levels: Any) -> bool:
    whole = isinstance(levels, list) and bool(levels) and all(type(n) is int for n in levels)
    return whole and levels[0] > 0 and all(a < b for a, b in pairwise(levels)) and levels[-1] < 2**31


def ranking(page: int, index: Any) -> dict[str, Any]:
    """What the scores of pages depend on, in a calibration file; the dtype of summaries apart, which is the billed one."""
    return {"page": page, "index": written(replace(index, dtype="kv") if hasattr(index, "dtype") else index)}


RULES: dict[str, type[Rule]] = {"exact": exact, "mass": mass, "top_p": top_p, "gap": gap}
