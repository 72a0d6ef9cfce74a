"""Typed quantities: budgets that carry their unit. Values only; the allocator turns them into whole tokens and pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvsim.errors import WrongUse


def _positive(unit: str, x: object, whole: bool) -> None:
    if isinstance(x, bool) or not isinstance(x, int if whole else (int, float)) or not 0 < x < 2**53:
        raise WrongUse(
            f"{unit}({x!r}): expected a {'whole number' if whole else 'number'} above 0, for example {unit}({16 if whole else 0.5})"
        )


@dataclass(frozen=True)
class tokens:
    """n whole tokens."""

    n: int

    def __post_init__(self) -> None:
        _positive("tokens", self.n, whole=True)


@dataclass(frozen=True)
class pages:
    """n whole pages; a read budget only, because what is kept has no page size."""

    n: int

    def __post_init__(self) -> None:
        _positive("pages", self.n, whole=True)


@dataclass(frozen=True)
class share:
    """The part x (0 < x <= 1) of the tokens visible at the step, of the prompt, or of the request's total length."""

    x: float
    of: str = "visible"

    def __post_init__(self) -> None:
        _positive("share", self.x, whole=False)
        if self.x > 1:
            raise WrongUse(f"share({self.x!r}): expected at most 1, the whole; a count of tokens is written tokens({self.x!r})")
        if self.of not in ("visible", "prompt", "total"):
            raise WrongUse(f"share(of={self.of!r}): expected 'visible', 'prompt' or 'total'")


@dataclass(frozen=True)
class kib:
    """x KiB (1024 bytes) of K and V rows per kv head."""

    x: float

    def __post_init__(self) -> None:
        _positive("kib", self.x, whole=False)

    @property
    def bytes(self) -> float:
        return self.x * 2**10


@dataclass(frozen=True)
class mib:
    """x MiB (1024 KiB) of K and V rows per kv head."""

    x: float

    def __post_init__(self) -> None:
        _positive("mib", self.x, whole=False)

    @property
    def bytes(self) -> float:
        return self.x * 2**20


@dataclass(frozen=True)
class shards:
    """The pages dealt to n devices; budget "global": the best of all of them, "split": each device its n-th part of the budget,
    "each": each device the whole budget."""

    n: int
    budget: str = "global"

    def __post_init__(self) -> None:
        _positive("shards", self.n, whole=True)
        if self.budget not in ("global", "split", "each"):
            raise WrongUse(f"shards(budget={self.budget!r}): expected 'global', 'split' or 'each'")


Hold = tokens | share | kib | mib
Budget = tokens | pages | share | kib | mib
READ_UNITS = (tokens, pages, share, kib, mib)
WORDS = (*READ_UNITS, shards)


def whole(x: float) -> int:
    """A real number of tokens, pages or windows rounded down; 28.999999999999996 is 29 (0.29 of 100 in float64)."""
    return math.floor(x + 1e-9)
