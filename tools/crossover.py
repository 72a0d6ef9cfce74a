"""python tools/crossover.py MODEL.json --device cpu|cuda: the context from which reading pages by bounds is cheaper than reading everything.

Measured: dense attention of one layer against scan, top-k and gather of 64 pages in one launch, each on what the one before it found,
cold, interleaved, medians. Predicted: the cost model's times of the same kernels one by one. Neither knows of the other's shapes."""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvsim.cost.heads import Geometry, read_geometry
from kvsim.cost.measure.choose import device_named, usual
from kvsim.cost.measure.device import Device
from kvsim.cost.measure.rounds import row, timed
from kvsim.cost.measure.shapes import KEPT, LONGEST, PAGE, Shape
from kvsim.cost.model import CostModel, predict, read_model
from kvsim.cost.samples import frame
from kvsim.errors import KvsimError

POINTS = 13  # contexts
NEAR = 0.20  # of the measured crossover


def contexts(g: Geometry, batch: int, largest: int) -> list[int]:
    """From as many tokens as are kept to the longest there is room for, equal factors apart."""
    longest = min(largest // (batch * g.kv_heads * (g.head_dim + g.value_dim) * g.kv_bits // 8), LONGEST)
    return [round(c / PAGE) * PAGE for c in np.geomspace(KEPT * PAGE, longest, POINTS)]


def measured(device: Device, g: Geometry, batch: int, lengths: list[int], seconds: float) -> tuple[list[float], list[float]]:
    """Microseconds of (dense, selective) at every context."""
    dense = device.kernels["dense_attn", device.chain["dense_attn"]]
    launches = [device.prepare(dense, g, Shape(batch, n, batch * n // PAGE)) for n in lengths]
    launches += [device.prepare(device.selective, g, Shape(batch, n, batch * KEPT)) for n in lengths]
    times = [statistics.median(t) for t in timed(device, launches, seconds)]
    return times[: len(lengths)], times[len(lengths) :]


def predicted(
    model: CostModel, chain: dict[str, str], g: Geometry, batch: int, lengths: list[int]
) -> tuple[list[float], list[float]]:
    """The same by the model."""
    shapes = [(cls, Shape(batch, n, batch * (KEPT if cls == "gather_attn" else n // PAGE))) for n in lengths for cls in chain]
    rows = [row(cls, g, s) | {"variant": chain[cls], "t_us": 1.0, "source": ""} for cls, s in shapes]
    told = predict(model, frame(rows))
    if (told["grade"] != "calibrated").any():
        worst = told.filter(pl.col("grade") != "calibrated").row(0, named=True)
        print(f"note: not all calibrated, {worst['class']} at {worst['context']} tokens for one is {worst['grade']}")
    times = told["predicted_us"].to_numpy().reshape(len(lengths), len(chain))
    dense = [cls == "dense_attn" for cls in chain]
    return times[:, dense].sum(1).tolist(), times[:, np.logical_not(dense)].sum(1).tolist()


def crossing(lengths: list[int], dense: list[float], other: list[float]) -> float | None:
    """The context from which `other` stays cheaper, between two points by the logarithm of the ratio; None: not within these contexts."""
    ahead = np.log(np.array(dense) / np.array(other))
    for i, (a, b) in reversed(list(enumerate(pairwise(ahead)))):
        if a <= 0 < b:
            return float(np.exp(np.interp(0, [a, b], np.log(lengths[i : i + 2]))))
        if b <= 0:
            return None
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="measured and predicted crossover of dense and selective reading")
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--geometry", type=Path)
    parser.add_argument("--largest", type=int, metavar="MIB")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    g = read_geometry(args.geometry) if args.geometry else usual(args.device)
    device = device_named(args.device, g, args.largest)
    lengths = contexts(g, args.batch, device.largest)
    model = read_model(args.model)
    real, told = measured(device, g, args.batch, lengths, args.seconds), predicted(model, device.chain, g, args.batch, lengths)
    print(
        f"{device.name}: {KEPT} pages of {PAGE} tokens a request and kv head, batch {args.batch}; {device.chain['gather_attn']}"
    )
    print(f"{'':>10} {'dense µs':^22} {'scan, top-k, gather µs':^22}")
    print(f"{'context':>10} {'measured':>11}{'predicted':>11} {'measured':>11}{'predicted':>11}")
    for i, n in enumerate(lengths):
        print(f"{n:10} {real[0][i]:11.1f}{told[0][i]:11.1f} {real[1][i]:11.1f}{told[1][i]:11.1f}")
    found, expected = crossing(lengths, *real), crossing(lengths, *told)
    if found is None or expected is None:
        print(
            f"crossover: measured {found or 'none'}, predicted {expected or 'none'}, within {lengths[0]} to {lengths[-1]} tokens"
        )
        return int(found is not expected)
    off = expected / found - 1
    print(f"crossover: measured {found:.0f} tokens, predicted {expected:.0f} ({off:+.1%}, asked: within {NEAR:.0%})")
    return int(abs(off) > NEAR)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvsimError as e:
        sys.exit(f"crossover: {e}")
