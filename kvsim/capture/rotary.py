"""Keys before RoPE: the rotary function of the model's own file is wrapped, because nothing else has them in every model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import torch

NAME = "apply_rotary"


@dataclass(frozen=True, eq=False)
class Turned:
    """One call of a rotary function: keys [1, Hkv, S, d] before and after it, cos and sin [1, S, w] as given."""

    before: torch.Tensor
    after: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@contextmanager
def turning(files: Iterable[ModuleType]) -> Iterator[Callable[[], Turned | None]]:
    """While inside, the rotary functions of these modeling files are watched -> what takes the last call since it last took one."""
    last: list[Turned] = []

    def watched(rotate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(rotate)
        def turn(*args: Any, **options: Any) -> Any:
            result = rotate(*args, **options)
            if isinstance(result, tuple) and len(result) == 2 and len(args) >= 4:
                last[:] = [Turned(args[1], result[1], args[2], args[3])]
            return result

        return turn

    def take() -> Turned | None:
        return last.pop() if last else None

    found = [(file, name, f) for file in files for name, f in vars(file).items() if name.startswith(NAME) and callable(f)]
    for file, name, rotate in found:
        setattr(file, name, watched(rotate))
    try:
        yield take
    finally:
        for file, name, rotate in found:
            setattr(file, name, rotate)
