"""Orthogonal bases: q·k is the same in all of them, the boxes around keys are not.

Products are plain sums of float64 in a fixed order, so a row has the same bits whatever is turned beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCK = 4096  # keys taken to float64 at once


@cache
def hadamard(dim: int) -> Floats:
    """[d, d], every entry +-1/sqrt(d); d a power of two (Sylvester)."""
    out = np.ones((1, 1))
    while len(out) < dim:
        out = np.block([[out, out], [out, -out]])
    return out / np.sqrt(dim)


@cache
def drawn(dim: int, seed: int = 0) -> Floats:
    """[d, d], always the same for a dim and seed, uniform over rotations and reflections."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    return np.ascontiguousarray(q * np.sign(np.diag(r)))


def principal(keys: NDArray[Any]) -> Floats:
    """keys [n, d] -> [d, d], the directions of their spread as columns, least first."""
    mean, spread = keys.mean(axis=0, dtype=np.float64), np.zeros((keys.shape[1], keys.shape[1]))
    for at in range(0, len(keys), BLOCK):
        centred = keys[at : at + BLOCK] - mean
        spread += centred.T @ centred
    return np.ascontiguousarray(np.linalg.eigh(spread)[1])


def turned(x: Floats, basis: Floats) -> Floats:
    """x [..., d] -> its coordinates in the columns of basis [d, d], same shape."""
    out = np.empty(x.shape)
    _turn(np.ascontiguousarray(x, np.float64).reshape(-1, x.shape[-1]), basis, out.reshape(-1, x.shape[-1]))
    return out


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _turn(x: Floats, basis: Floats, out: Floats) -> None:
    d = x.shape[1]
    for i in range(len(x)):
        out[i, :] = 0.0
        for j in range(d):
            a = x[i, j]
            for e in range(d):
                out[i, e] += a * basis[j, e]
