"""Orthogonal bases before any grid: norms and q·k stay what they are, the numbers of a row become more alike.

Queries are turned by the same basis on their way to the codes, so that nothing of the past is turned back; a decoded row stands here in the
coordinates of the model. A basis learned from data (OSCAR, arXiv 2605.17757) is stored once per layer, the kv heads sharing its bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.calibration import MAKE, Calibration
from kvsim.errors import WrongUse
from kvsim.geometry import Layer
from kvsim.kernels import rotate

Floats = NDArray[np.float64]
NUMBER_BYTES = 4  # a basis is stored in float32


@dataclass(frozen=True)
class hadamard:
    """Sylvester's Hadamard matrix over sqrt(d), known without data: nothing is stored. Raises WrongUse unless d is a power of two."""

    def check(self, layer: Layer, dim: int) -> None:
        power_of_two(dim, f"layer {layer.id}")

    def turn(self, x: Floats) -> Floats:
        return rotate.turned(x, rotate.hadamard(x.shape[-1]))

    def back(self, y: Floats) -> Floats:
        return self.turn(y)  # it is its own inverse


def power_of_two(dim: int, where: str) -> None:
    """Raises WrongUse for rows of another number of numbers, which have no Hadamard matrix here."""
    if dim & (dim - 1):
        raise WrongUse(
            f"{where}: rows of {dim} numbers have no Hadamard matrix, expected a power of two; take a store that does not rotate"
        )


@dataclass(frozen=True, eq=False)
class basis:
    """A given orthogonal matrix f64[d, d], directions as columns; sharers: kv heads that it is stored once for."""

    matrix: Floats
    sharers: int = 1

    def turn(self, x: Floats) -> Floats:
        return rotate.turned(x, self.matrix)

    def back(self, y: Floats) -> Floats:
        return rotate.turned(y, np.ascontiguousarray(self.matrix.T))

    def once(self, dim: int) -> int:
        return -(-NUMBER_BYTES * dim * dim // self.sharers)


@dataclass(frozen=True)
class calibrated:
    """The basis that a calibration file has for each layer under the name of a side, "k" or "v"."""

    side: str
    calibration: Calibration

    def at(self, layer: Layer, head: int) -> basis:
        return basis(self._of(layer), layer.kv_heads)

    def check(self, layer: Layer, dim: int) -> None:
        """Raises WrongUse for a layer that it does not cover or of another width, and for a matrix that is no rotation."""
        found = self._of(layer)
        where = f"calibration {self.calibration.path}: the {self.side} rotation of layer {layer.id}"
        if found.shape != (dim, dim):
            raise WrongUse(f"{where} is {' x '.join(map(str, found.shape))}, here rows have {dim} numbers; {MAKE}")
        if not np.allclose(found @ found.T, np.eye(dim), atol=1e-4):
            raise WrongUse(f"{where} is not orthogonal, so it would change what is attended to; {MAKE}")

    def _of(self, layer: Layer) -> Floats:
        return self.calibration.array(f"{layer.id}.{self.side}.rotation", layer.id)
