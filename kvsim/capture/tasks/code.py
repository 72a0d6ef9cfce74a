"""Code that needs a definition from far above."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import zipfile
from random import Random

from kvsim.capture.tasks.hide import Fact, Story
from kvsim.capture.tasks.keys import key

EARLY = (0.05, 0.3)  # depths of the definition
FAR = 400  # characters: the end of a function further away is none
VERBS, THINGS = ("read", "find", "count", "load", "pick"), ("vault", "ticket", "locker", "signal", "harbor")


def source() -> str:
    """Code to hide in, where none is given: modules that come with Python."""
    return "\n\n\n".join(inspect.getsource(module).strip() for module in (argparse, subprocess, zipfile))


def far_definition(rng: Random) -> Story:
    """A function defined early in a program; at its end, what the function returns."""
    name, k = f"{rng.choice(VERBS)}_{rng.choice(THINGS)}_code", key(rng)
    fact = Fact(f"def {name}():\n    return {k}", after="\n\n\n")
    asked = f"# {name}() returns the number in its definition.\nassert {name}() =="
    return Story((fact,), asked, (k,), tail="\n\n", range=EARLY, far=FAR, borders=("\n\n\n", "\n\n", "\n", " "))
