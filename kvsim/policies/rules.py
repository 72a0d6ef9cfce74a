"""Stopping rules: how many pages a query reads when the query itself decides. Values only; engine.stop applies them.

All work on pages in the order of their scores, forced pages first. u is a page's score as a logit (scaled, soft-capped): for a rule
that certifies, an upper bound of the page's true logits."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import ClassVar

from kvsim.policies.parameters import Checked, expect, written
from kvsim.units import Budget


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
    """The smallest budget from `floor` to `cap` after which the score falls by at least `min` (scaled logits), else `cap`."""

    min: float
    floor: Budget
    cap: Budget

    def __post_init__(self) -> None:
        expect(self, "min", self.min >= 0, "a fall in scaled logits, 0 or more")
        (floor, *of), (cap, *over) = astuple(self.floor), astuple(self.cap)
        comparable = type(self.floor) is type(self.cap) and of == over
        expect(self, "floor", not comparable or floor <= cap, f"at most cap={written(self.cap)}")


RULES: dict[str, type[Rule]] = {"exact": exact, "mass": mass, "top_p": top_p, "gap": gap}
