"""A rule that only the examples tell: made-up words for kinds of things."""

from __future__ import annotations

from random import Random

from kvsim.capture.tasks.hide import Fact, Story

KINDS = {
    "bird": ("heron", "eagle", "sparrow", "owl", "falcon", "swan", "raven", "finch"),
    "tool": ("hammer", "chisel", "saw", "wrench", "drill", "pliers", "shovel", "axe"),
    "fruit": ("apple", "cherry", "plum", "mango", "lemon", "peach", "grape", "fig"),
    "cloth": ("shirt", "coat", "glove", "scarf", "boot", "hat", "sock", "belt"),
}
MADE_UP = ("zup", "dax", "wug", "fep", "lorp", "blick", "tove", "miff")
EACH = 3  # examples of a kind


def few_shot(rng: Random) -> Story:
    """Twelve examples, three of each of four kinds of things, each with the made-up word for its kind; then one more thing."""
    words = dict(zip(KINDS, rng.sample(MADE_UP, len(KINDS)), strict=True))
    shown = {kind: rng.sample(things, EACH + 1) for kind, things in KINDS.items()}
    wanted = rng.choice(list(KINDS))
    facts = [
        Fact(f"Thing: {thing}\nKind: {words[kind]}", thing, "evidence" if kind == wanted else "distractor")
        for kind in KINDS
        for thing in shown[kind][:EACH]
    ]
    rng.shuffle(facts)
    return Story(tuple(facts), f"Thing: {shown[wanted][EACH]}\nKind:", (words[wanted],))
