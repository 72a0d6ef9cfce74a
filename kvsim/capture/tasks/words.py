"""A list of words, some of which come again and again: nothing is hidden in one place."""

from __future__ import annotations

import re
from functools import lru_cache
from math import ceil
from random import Random
from typing import Any

from kvsim.capture.prompt import FORCED, QUESTION, Prompt
from kvsim.capture.tasks.hide import Where
from kvsim.capture.tasks.passage import LEAST
from kvsim.capture.tasks.render import Piece, count, known, render
from kvsim.errors import WrongUse

COMMON = 3  # words that are asked for
SHARE = 4  # a quarter of the list is they
WORD = re.compile(r"\b[a-z]{4,9}\b")
ASKED = f"\nThe {COMMON} words that appear most often in the list above are"


def common_words(tokenizer: Any, text: str, where: Where, rng: Random, **meta: Any) -> Prompt:
    """Words of the text in any order, one a line: three of them make up a quarter of the list, the others come once, or a quarter as
    often at most; which three? Every occurrence of theirs is evidence.

    After the common-word extraction of RULER (https://arxiv.org/abs/2404.06654). Raises WrongUse: too few tokens, too few words."""
    for given, option in ((where.depth, "--depth"), (where.at, "--at"), (where.order or None, "--order")):
        if given is not None:
            raise WrongUse(f"{option} belongs to a task that hides facts; common-words has them everywhere")
    asked = count(tokenizer, ASKED) if where.seen else 0
    if where.tokens < asked + LEAST:
        least = asked + LEAST
        raise WrongUse(f"{where.tokens} tokens do not hold this task; it takes {least} at least (--context {least})")
    low, high = (len(text) * x // where.part[1] for x in (where.part[0], where.part[0] + 1))
    room = where.tokens - asked - 2
    there = vocabulary(text[low:high])
    drawn = rng.sample(there, min(len(there), room))
    listed, common = _listed(tokenizer, drawn, room, rng), drawn[:COMMON]
    pieces = [x for w in listed for x in (Piece(w, span=w) if w in common else Piece(w), Piece("\n"))]
    pieces += [
        Piece(ASKED, QUESTION, fed=not where.seen),
        Piece(f" {', '.join(common)}." if where.forced else "", FORCED, fed=where.forced),
    ]
    return render(tokenizer, pieces, common, "share", **meta, **known(text))


@lru_cache(4)  # a text is asked for once a request
def vocabulary(text: str) -> tuple[str, ...]:
    """The different words of a text."""
    return tuple(sorted(set(WORD.findall(text))))


def _listed(tokenizer: Any, words: list[str], room: int, rng: Random) -> list[str]:
    """As many lines as `room` tokens hold, the first COMMON words often in them. Raises WrongUse."""
    if len(words) < 10 * COMMON:
        raise WrongUse(
            f"the text has {len(words)} different words of 4 to 9 letters; expected {10 * COMMON} or more (--text FILE)"
        )
    ids = tokenizer([f"{w}\n" for w in words], add_special_tokens=False)["input_ids"]
    costs = dict(zip(words, map(len, ids), strict=True))
    common, rare = words[:COMMON], words[COMMON:]
    lines = room // 2  # a word and the end of its line are two tokens or more
    while True:
        often = max(SHARE, lines // (SHARE * COMMON))
        others = lines - often * COMMON
        again = ceil(others / len(rare))
        if again * SHARE > often:
            raise WrongUse(
                f"{room} tokens of list take more words than the {len(words)} of this text; take a longer one (--text FILE)"
            )
        found = common * often + (rare * again)[: max(others, 0)]
        taken = sum(costs[w] for w in found)
        if taken <= room:
            rng.shuffle(found)
            return found
        lines = min(lines - 1, lines * room // taken)
