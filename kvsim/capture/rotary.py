"""Keys before RoPE: the rotary function of the model's own file is wrapped, because nothing else has them in every model."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from types import ModuleType
from typing import Any

import torch

NAME = "apply_rotary"
RECENT = 8  # rotated tensors among which are the keys of an attention call

Take = Callable[[int, torch.Tensor], "Turned | None"]


@dataclass(frozen=True, eq=False)
class Turned:
    """What a rotary function made of keys: [1, Hkv, S, d] before and after it, cos and sin [1, S, w] as given, None where it is
    given neither by name."""

    before: torch.Tensor
    after: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None


@contextmanager
def turning(files: Iterable[ModuleType]) -> Iterator[Take]:
    """While inside, the rotary functions of these modeling files are watched -> take(layer, its new keys as attended [1, Hkv, S, d]):
    how they were made since something was last taken; the last thing rotated where no rotation made them; None where nothing was."""
    last: deque[Turned] = deque(maxlen=RECENT)  # other models and layers of linear attention rotate too, and take nothing
    places: dict[
        int, tuple[int, bool] | None
    ] = {}  # of a layer's keys: found by comparing at its first call, then only looked up

    def watched(rotate: Callable[..., Any]) -> Callable[..., Any]:
        takes = inspect.signature(rotate)

        @wraps(rotate)
        def turn(*args: Any, **options: Any) -> Any:
            result = rotate(*args, **options)
            given = takes.bind(*args, **options).arguments
            tensors = list(given.values())
            pair = isinstance(result, tuple)  # queries and keys; else either
            if len(tensors) > pair and (not pair or len(result) == 2):
                after = result[1] if pair else result
                last.append(Turned(tensors[int(pair)], after, given.get("cos"), given.get("sin")))
            return result

        return turn

    def take(layer: int, new: torch.Tensor) -> Turned | None:
        found = list(last)
        last.clear()
        if layer not in places:
            places[layer] = _place(found, new)
        place = places[layer]
        if place is None:
            return found[-1] if found else None
        if -place[0] > len(found):
            return None
        return _whole(_swapped(found[place[0]]) if place[1] else found[place[0]], new)

    known = [(file, name, f) for file in files for name, f in vars(file).items() if name.startswith(NAME) and callable(f)]
    for file, name, rotate in known:
        setattr(file, name, watched(rotate))
    try:
        yield take
    finally:
        for file, name, rotate in known:
            setattr(file, name, rotate)


def _place(found: list[Turned], new: torch.Tensor) -> tuple[int, bool] | None:
    """(which of the rotated tensors the keys are, from the last, -1, backwards; whether it has tokens before heads). A part of every
    key may pass by unrotated."""
    for i, turned in enumerate(found, -len(found)):
        for swap in (False, True):
            after = (_swapped(turned) if swap else turned).after
            if after.ndim == 4 and after.shape[:3] == new.shape[:3] and torch.equal(after, new[..., : after.shape[3]]):
                return i, swap
    return None


def _swapped(turned: Turned) -> Turned:
    if turned.after.ndim != 4:
        return turned
    return replace(turned, before=turned.before.transpose(1, 2), after=turned.after.transpose(1, 2))


def _whole(turned: Turned, new: torch.Tensor) -> Turned:
    """With the part of every key that is not rotated, which models put behind the one that is."""
    rest = new[..., turned.after.shape[3] :]
    if not rest.shape[3]:
        return turned
    return replace(turned, before=torch.cat([turned.before, rest], -1), after=torch.cat([turned.after, rest], -1))
