"""Which requests of many are captured."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from kvsim.errors import WrongUse


def drawn(requests: Iterable[int], rate: float, seed: int = 0) -> list[int]:
    """The requests that a sample of `rate` (above 0, up to 1) holds: each is drawn by itself, from its number and the seed, so that
    more requests never change which of the earlier ones are in it. Raises WrongUse."""
    if not 0 < rate <= 1:
        raise WrongUse(f"sample {rate}: expected a part of the requests, above 0 and up to 1 (--sample)")
    return [i for i in requests if int.from_bytes(sha256(f"{seed} {i}".encode()).digest()[:8], "big") < rate * 2**64]
