"""Texts as they are: a part of one that goes on, and one of your own with or without a question."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from kvsim.capture.prompt import FORCED, QUESTION, Prompt
from kvsim.capture.tasks.hide import Where
from kvsim.capture.tasks.passage import LEAST, passage
from kvsim.capture.tasks.render import Piece, known, render
from kvsim.errors import WrongUse


def plain(tokenizer: Any, text: str, where: Where, rng: Random, **meta: Any) -> Prompt:
    """Real text of at most `where.tokens` tokens, the `where.steps` that follow forced in decode. Raises WrongUse."""
    if where.tokens < LEAST + 1:
        raise WrongUse(f"{where.tokens} tokens do not hold this task; it takes {LEAST + 1} at least (--context {LEAST + 1})")
    before, after = passage(tokenizer, text, where.tokens - 1, where.steps + 1, rng, where.part)
    made = render(tokenizer, [Piece(before), Piece(after, FORCED, fed=True)], **meta, **known(text))
    end = made.prefill + where.steps
    return replace(made, tokens=made.tokens[:end], roles=made.roles[:end])


def document(tokenizer: Any, text: str, question: str | None = None, seen: bool = False, forced: int = 0) -> Prompt:
    """A text of your own: alone, with its last `forced` tokens fed, or with a question after it that is fed (seen: in the prompt)."""
    if question is not None:
        return render(tokenizer, [Piece(text.rstrip() + "\n\n"), Piece(question, QUESTION, fed=not seen)], **known(text))
    made = render(tokenizer, [Piece(text)], **known(text))
    prefill = len(made.tokens) - forced
    if prefill < 1:
        raise WrongUse(
            f"the text has {len(made.tokens)} tokens, and {forced} are to be fed; expected fewer, so that a prompt is left"
        )
    return replace(made, roles=made.roles[:prefill] + (FORCED,) * forced, prefill=prefill)
