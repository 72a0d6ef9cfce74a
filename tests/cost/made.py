"""Made-up samples whose truth is known."""

from __future__ import annotations

import numpy as np

from kvsim.cost.samples import frame

SHAPES = [(batch, context) for batch in (1, 4, 16, 64) for context in (512, 2048, 8192, 32768)]


def size(batch, context, kv_heads=8, bits=16):
    return batch * context * kv_heads * 256 * bits // 8


def samples(
    launch=12.0, gbps=1500.0, sequence=0.0, longest=0.0, noise=0.0, outliers=0.0, repeats=1, seed=0, shapes=SHAPES, **columns
):
    """Decode attention of launch + bytes/gbps + sequence·batch + longest·(MB of a request's head), log-normal noise, outliers times 2 to 5."""
    rng = np.random.default_rng(seed)
    rows = []
    for batch, context in shapes:
        for _ in range(repeats):
            moved = size(batch, context)
            t = launch + moved / gbps * 1e-3 + sequence * batch + longest * moved / 1e6 / (batch * 8)
            t *= np.exp(rng.normal(0, noise)) * (rng.uniform(2, 5) if rng.random() < outliers else 1.0)
            row = {
                "class": "dense_attn",
                "variant": "made",
                "batch": batch,
                "context": context,
                "bytes": moved,
                "t_us": t,
                "source": "made",
            }
            rows.append(row | {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "kv_bits": 16, "cache": "cold"} | columns)
    return frame(rows)
