"""One way from rows to codes and back: rotate -> scale -> clip -> group -> grid -> pack.

Every stage is a small frozen object that knows what it does to numbers, as a pure function, and what of it is stored, in bytes:

    rotate   turn(x), back(y)          an orthogonal basis; a learned one is stored once         codecs.rotate
    scale    split(x), join(y, kept)   a number per row or per channel, divided out              codecs.scale
    clip     apply(x)                  outliers of a row moved to its threshold; stores nothing  codecs.clip
    group    each(what, x)             which numbers share one grid                              here
    grid     code(x, group)            codes, and what they decode to                            codecs.minmax, lloyd_max, floats, nuq
    pack     bits                      words that the codes of a group fill, padding included    here

What is left out does nothing and costs nothing. Keys are those that attention sees, after RoPE, unless a policy says otherwise (Codecs.keys)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.coded import Coded, padded_bits
from kvsim.geometry import Layer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Rotation(Protocol):
    """It may also have check(layer, dim) and once(dim), as a Codec (policies.protocol)."""

    def turn(self, x: Floats) -> Floats: ...  # [m, rows, d] -> its coordinates, same shape
    def back(self, y: Floats) -> Floats: ...


class Scale(Protocol):
    @property
    def whole(self) -> bool: ...  # one for all rows that are coded at once, so that these are one group
    def split(
        self, x: Floats
    ) -> tuple[Floats, Floats]: ...  # [m, rows, d] -> numbers without scale; the scales as they are stored
    def join(self, y: Floats, kept: Floats) -> Floats: ...
    def bytes(self, dim: int) -> tuple[int, int]: ...  # of every row, of every group of rows


class Clip(Protocol):
    def apply(self, x: Floats) -> Floats: ...  # [m, rows, d], each row by itself


class Grid(Protocol):
    """scale_bytes: what is stored per group of numbers. It may also have check and once, as a Rotation; `outliers`, the part of the numbers
    kept exact; reach(x) [a, g, b] -> how far decoding can move each number of the groups x[a, :, b]."""

    @property
    def bits(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...
    def code(self, x: Floats, group: grouped) -> tuple[Floats, Ints | int]: ...  # what is decoded; bits of a row beside its codes


@dataclass(frozen=True)
class grouped:
    """Which numbers share one grid. "channels": `size` neighbours of one row, the last group may be short; "tokens": one channel of `size`
    rows. None: the whole axis, which of tokens is all rows that are coded at once."""

    axis: Literal["tokens", "channels"] = "channels"
    size: int | None = None

    @property
    def tokens(self) -> int:
        """Rows that are encoded together; 0: all that are coded at once."""
        return (self.size or 0) if self.axis == "tokens" else 1

    def sizes(self, dim: int) -> list[int]:
        """Numbers in each group of a row, of groups along channels."""
        size = self.size or dim
        return [min(size, dim - c) for c in range(0, dim, size)]

    def each(self, what: Callable[[Floats], Floats], x: Floats) -> Floats:
        """what() of blocks [a, g, b], every [a, :, b] one group, over x [m, rows, d]; same shape."""
        if self.axis == "tokens":
            return what(x)
        m, rows, dim = x.shape
        flat, size = x.reshape(m * rows, dim, 1), self.size or dim
        if dim % size == 0:
            return what(flat.reshape(-1, size, 1)).reshape(x.shape)
        return np.concatenate([what(flat[:, c : c + size]) for c in range(0, dim, size)], axis=1).reshape(x.shape)


@dataclass(frozen=True, kw_only=True)
class pipeline:
    """A Codec (policies.protocol) made of stages. pack: bits of the words that hold the codes of one group."""

    rotate: Any = None  # a Rotation, or what gives one at(layer, head)
    scale: Scale | None = None
    clip: Clip | None = None
    group: grouped = grouped()
    grid: Any  # a Grid, or what gives one at(layer, head)
    pack: int = 1

    # -------------------------------------------------------------------------------------------- numbers
    def encode(self, x: Floats) -> Coded:
        """[m, rows, d], m groups of rows -> what is stored of it."""
        m, rows, dim = x.shape
        y, kept = x if self.rotate is None else self.rotate.turn(x), None
        if self.scale is not None:
            y, kept = self.scale.split(y)
        if self.clip is not None:
            y = self.clip.apply(y)
        y, more = self.grid.code(y, self.group)
        if self.scale is not None and kept is not None:
            y = self.scale.join(y, kept)
        if self.rotate is not None:
            y = self.rotate.back(y)
        bits, row, group = self.costs(dim)
        group += self._unfilled(rows, dim)
        return Coded(y, np.broadcast_to(bits + more, (m, rows)), np.full((m, rows), row), np.full(m, group))

    def roundtrip(self, x: Floats) -> Floats:
        """[m, rows, d] -> what a reader decodes, same shape."""
        return self.encode(x).values

    @property
    def error(self) -> Callable[[Floats], Floats] | None:
        """[m, rows, d] -> how far decoding can move each number, same shape. None where it is not known: behind a rotation, a scale or a clip,
        and on grids that cannot say."""
        plain = self.rotate is None and self.scale is None and self.clip is None
        reach = getattr(self.grid, "reach", None)
        return partial(self.group.each, reach) if plain and reach else None

    # -------------------------------------------------------------------------------------------- bytes
    def costs(self, dim: int) -> tuple[int, int, int]:
        """-> (bits of a row's codes, bytes of each row beside them, bytes of each group of rows), outliers apart and the words along tokens
        that a group does not fill."""
        row, group = (0, 0) if self.scale is None else self.scale.bytes(dim)
        if self.group.axis == "tokens":
            return dim * self.bits, row, group + dim * self.grid.scale_bytes
        words = [padded_bits(n * self.bits, self.pack) for n in self.group.sizes(dim)]
        return sum(words), row + len(words) * self.grid.scale_bytes, group

    def layout(self, dim: int) -> tuple[int, int]:
        """-> (bits of codes per row, bytes of scales, zeros and norms per group of rows)."""
        bits, row, group = self.costs(dim)
        return bits, max(1, self.tokens) * row + group

    def once(self, dim: int) -> int:
        """Bytes that a kv head stores once for all its coded rows."""
        return sum(stage.once(dim) for stage in (self.rotate, self.grid) if hasattr(stage, "once"))

    def _unfilled(self, rows: int, dim: int) -> int:
        """Bytes of the words along tokens that a group of rows leaves empty, and pays."""
        if self.group.axis == "channels":
            return 0
        return dim * (padded_bits(rows * self.bits, self.pack) - rows * self.bits) // 8

    # -------------------------------------------------------------------------------------------- what the engine asks
    @property
    def bits(self) -> int:
        """Of a number's code."""
        return int(self.grid.bits)

    @property
    def tokens(self) -> int:
        """Rows that are encoded together; 0: all that are coded at once."""
        return 0 if self.scale is not None and self.scale.whole else self.group.tokens

    @property
    def outliers(self) -> float:
        return float(getattr(self.grid, "outliers", 0))

    def at(self, layer: Layer, head: int) -> pipeline:
        """The pipeline of one kv head: calibrated stages have numbers of their own there. Raises WrongUse where they have none."""
        own: dict[str, Any] = {
            name: stage.at(layer, head) for name in ("rotate", "grid") if hasattr(stage := getattr(self, name), "at")
        }
        return replace(self, **own) if own else self

    def check(self, layer: Layer, dim: int) -> None:
        """Raises WrongUse for rows of `dim` numbers, or a layer, that a stage has no form for."""
        for stage in (self.rotate, self.grid):
            if hasattr(stage, "check"):
                stage.check(layer, dim)
