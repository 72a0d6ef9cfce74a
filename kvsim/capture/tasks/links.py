"""Answers that no single place in the text gives: facts that lead to each other."""

from __future__ import annotations

from random import Random
from string import ascii_uppercase

from kvsim.capture.tasks.hide import Fact, Story
from kvsim.capture.tasks.keys import NAMES, key

HOPS = 4  # variables of a chain
BOXES = ("amber", "violet", "scarlet", "ivory", "silver", "copper")


def variables(rng: Random) -> Story:
    """Two chains of variables, each handed the value of the one before; which of them hold the value of the first?

    After the variable tracking of RULER (https://arxiv.org/abs/2404.06654)."""
    names = rng.sample([a + b + c for a in ascii_uppercase for b in ascii_uppercase for c in ascii_uppercase], 2 * HOPS)
    values = rng.sample(range(10**4, 10**5), 2)
    mine, other = (_chain(n, str(v)) for n, v in zip((names[:HOPS], names[HOPS:]), values, strict=True))
    facts = [Fact(f"VAR {line}", f"VAR {line}", kind) for pair in zip(mine, other, strict=True) for line, kind in
             zip(pair, ("evidence", "distractor"), strict=True)]  # fmt: skip
    return Story(tuple(facts), f"The variables whose value is {values[0]} are", tuple(names[:HOPS]), "share")


def two_evidence(rng: Random) -> Story:
    """In which box somebody keeps the pass key, and which key is in that box: neither answers alone. Another pair stands by."""
    names, boxes, keys = rng.sample(NAMES, 2), rng.sample(BOXES, 2), [key(rng), key(rng)]
    kinds = ("evidence", "distractor")
    who = [Fact(f"{n} keeps the pass key in the {b} box.", f"box of {n}", k) for n, b, k in zip(names, boxes, kinds, strict=True)]
    what = [Fact(f"The pass key in the {b} box is {x}.", f"{b} box", k) for b, x, k in zip(boxes, keys, kinds, strict=True)]
    return Story((*who, *what), f"The pass key of {names[0]} is", (keys[0],))


def _chain(names: list[str], value: str) -> list[str]:
    return [f"{name} = {given}" for name, given in zip(names, [value, *names[:-1]], strict=True)]
