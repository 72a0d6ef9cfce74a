"""Keys to 2 bits and back, per channel over groups of tokens, against numpy; 32 768 keys of 128 numbers, one thread, CPU time."""

from __future__ import annotations

import numpy as np

from benchmarks.race import Entry, gate, race, ratio, show
from kvsim.codecs.minmax import minmax

TOKENS, DIM, GROUP, TOP = 32768, 128, 32, 3
OURS, NUMPY = "kvsim: minmax(bits=2), keys by channel", "numpy: the same in whole arrays"


def naive(x: np.ndarray) -> np.ndarray:
    """x [m, GROUP, d]; zero and step as fp16 holds them."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    zero = low.astype(np.float16).astype(np.float64)
    step = ((high - low) / TOP).astype(np.float16).astype(np.float64)
    code = np.clip(np.rint((x - zero) / np.where(step > 0, step, 1)), 0, TOP)
    return zero + code * step


def main(rounds: int = 5) -> bool:
    x = np.random.default_rng(0).standard_normal((TOKENS // GROUP, GROUP, DIM))
    codec = minmax(2, "tokens", GROUP)
    assert np.array_equal(codec.roundtrip(x), naive(x))
    times = race([Entry(OURS, lambda: codec.roundtrip(x)), Entry(NUMPY, lambda: naive(x))], rounds)
    print(f"2-bit keys, {TOKENS} x {DIM}, groups of {GROUP} tokens; ratios are to the first line")
    show(times, OURS)
    return gate("times numpy", ratio(times, NUMPY, OURS)[0], 5)


if __name__ == "__main__":
    raise SystemExit(not main())
