"""One synthetic lane of the size that the races use: smooth keys with outlier channels, RoPE, and queries that follow them."""

from __future__ import annotations

import numpy as np
from scipy.signal import lfilter

from kvsim.geometry import Layer, Request
from kvsim.trace.open import Lane


def lane(tokens: int = 32768, dim: int = 128, steps: int = 256, group: int = 4, kv_heads: int = 1, seed: int = 0) -> Lane:
    """float16 K, V and Q of one layer; the last `steps` tokens are decoded, the 64 before them observed."""
    rng = np.random.default_rng(seed)
    half, prompt = dim // 2, tokens - steps
    angle = np.arange(tokens)[:, None] * 500000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    window, first = min(64, prompt), prompt - min(64, prompt)
    k, v = np.empty((2, kv_heads, tokens, dim), np.float16)
    q = np.empty((window + steps, kv_heads * group, dim), np.float16)
    for h in range(kv_heads):
        scale = np.exp(0.5 * rng.standard_normal(dim))
        mean = 1.5 * rng.standard_normal(dim) * scale
        x = lfilter([np.sqrt(1 - 0.81)], [1, -0.9], rng.standard_normal((tokens, dim)), axis=0) * scale + mean
        k[h] = _turn(x, cos, sin)
        v[h] = rng.standard_normal((tokens, dim))
        y = 1.2 * (0.8 * rng.standard_normal((window + steps, group, dim)) + 0.3 * mean / scale)
        q[:, h * group : (h + 1) * group] = _turn(y, cos[first:, None], sin[first:, None])
    layer = Layer(0, "full", kv_heads * group, kv_heads, dim, dim, dim**-0.5, 4 * dim, "float16", among=(0,))
    request = Request(0, prompt, tokens, "synthetic", np.zeros(tokens, np.int8))
    t = np.arange(prompt, tokens)
    mass = np.exp(2 * rng.standard_normal((kv_heads * group, prompt))).astype(np.float32)
    return Lane(
        request,
        layer,
        "float16",
        k,
        v,
        None,
        t - prompt,
        t,
        q[window:],
        np.arange(first, prompt),
        q[:window],
        mass,
        None,
        None,
        None,
        None,
        None,
    )


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
