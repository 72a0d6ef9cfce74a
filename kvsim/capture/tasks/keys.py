"""Pass keys in a text on something else: one, several, one among others, one whose place is chosen, one that comes in decode."""

from __future__ import annotations

from random import Random

from kvsim.capture.tasks.hide import Fact, Story

NAMES = ("Alice", "Bob", "Carol", "David", "Erin", "Frank", "Grace", "Henry")
SEVERAL = 3  # needles of multi-needle
KEYS = 4  # of multi-key, one of which is asked for


def key(rng: Random) -> str:
    return str(rng.randrange(10**4, 10**5))


def needle(rng: Random) -> Story:
    """A pass key, said twice in one sentence; the question for it."""
    k = key(rng)
    return Story((Fact(f"The secret pass key is {k}. Remember it: {k} is the pass key."),), "The secret pass key is", (k,))


def passkey(rng: Random) -> Story:
    """A pass key, said once, at any depth: also in the first tokens and in the last ones."""
    k = key(rng)
    return Story((Fact(f"The secret pass key is {k}."),), "The secret pass key is", (k,), range=(0, 1))


def multi_needle(rng: Random) -> Story:
    """The pass keys of three people; the question for all of them."""
    names, keys = rng.sample(NAMES, SEVERAL), [key(rng) for _ in range(SEVERAL)]
    facts = tuple(_of(name, k, f"key of {name}") for name, k in zip(names, keys, strict=True))
    asked = f"The pass keys of {', '.join(names[:-1])} and {names[-1]} are, in this order,"
    return Story(facts, asked, tuple(keys), "share")


def multi_key(rng: Random) -> Story:
    """The pass keys of four people; the question for one of them."""
    names, keys = rng.sample(NAMES, KEYS), [key(rng) for _ in range(KEYS)]
    wanted = rng.randrange(KEYS)
    facts = [
        _of(n, k, f"key of {n}", "evidence" if n == names[wanted] else "distractor") for n, k in zip(names, keys, strict=True)
    ]
    return Story(tuple(facts), f"The pass key of {names[wanted]} is", (keys[wanted],))


def reversal(rng: Random) -> Story:
    """Somebody's pass key; then 320 tokens or a few more of the text that follows, forced; only then the question for the key,
    which nothing has touched since the prompt."""
    k, name = key(rng), rng.choice(NAMES)
    return Story((_of(name, k, "needle"),), f"The pass key of {name} is", (k,), between=320)


def decoded(rng: Random) -> Story:
    """A text that goes on, forced, for 192 tokens or a few more with a pass key in their midst; then the question for it. No cut
    after prefill has seen the key."""
    k = key(rng)
    fact = Fact(f"The secret pass key is {k}. Remember it: {k} is the pass key.", before="\n\n")
    return Story((fact,), "The secret pass key is", (k,), between=192, decoded=True)


def _of(name: str, k: str, label: str, kind: str = "evidence") -> Fact:
    """Said twice, so that small models find it."""
    return Fact(f"The pass key of {name} is {k}. Remember it: {k} is the pass key of {name}.", label, kind)
