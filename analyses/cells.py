"""Which layers, steps and roles an analysis looks at. A cell is the decode steps of one role (question, forced text, answer) on the
contexts of one task; roles are never averaged together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WHOLE, EVERY = 64, 7  # a role of more than 64 steps is replayed at every seventh; refresh intervals are no multiples of seven
FEWEST = 16  # replayed steps of a role in a context: fewer are no cell
LAYERS = 4  # at most, evenly spread over those captured
ROLES = {0: "context", 1: "question", 2: "forced text", 3: "answer"}


def spread(layers: Sequence[int], most: int = LAYERS) -> list[int]:
    """At most `most` of them, evenly spread, the first and the last among them."""
    at = np.linspace(0, len(layers) - 1, min(most, len(layers))).round().astype(int)
    return [layers[i] for i in at]


def chosen(roles: np.ndarray) -> list[int]:
    """The role of every decode step -> the steps to replay: all of a role with few, every seventh of one with many."""
    steps: list[int] = []
    for role in np.unique(roles):
        mine = np.flatnonzero(roles == role)
        steps += mine[:: 1 if len(mine) <= WHOLE else EVERY].tolist()
    return sorted(steps)
