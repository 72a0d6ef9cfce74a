"""Passages of a long text that begin and end where a paragraph does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from kvsim.errors import WrongUse

BORDERS = ("\n\n", "\n", " ")
FAR = 1500  # characters: a border further away is none
CHARS = 10  # of a token at most, on average: how much text is looked at for a context
LEAST = 128  # tokens of text that a task is hidden in


def read_text(path: str | Path | None = None) -> str:
    """A text file, or without one the language reference that comes with Python. Raises WrongUse."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name].strip() for name in sorted(topics))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise WrongUse(f"{path}: cannot be read as UTF-8 text ({e})") from None
    if not text.strip():
        raise WrongUse(f"{path}: no text in it")
    return text


def passage(tokenizer: Any, text: str, tokens: int, then: int, rng: Random, part: tuple[int, int]) -> tuple[str, str]:
    """(a passage of at most `tokens` tokens that ends with a paragraph, what follows it: `then` tokens and the rest of their line).

    part (i, n): it is taken from the i-th n-th of the text. Raises WrongUse: too short a text."""
    low, high = (len(text) * x // part[1] for x in (part[0], part[0] + 1))
    need = min((tokens + then) * CHARS, high - low)
    start = next_border(text, low + rng.randrange(high - low - need + 1))
    offsets = tokenizer(text[start : start + need], add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) < tokens + then:
        raise WrongUse(
            f"{tokens} tokens of text and {then} after it, from a text of {len(offsets)}; take a text that is long enough (--text FILE)"
        )
    end = start + last_border(text[start:high], offsets[tokens - 1][1])
    last = next((i for i, (a, _) in enumerate(offsets) if start + a >= end), 0) + then - 1
    return text[start:end], text[end : _line_end(text, start + offsets[last][1])] if then else ""


def next_border(text: str, at: int, borders: Sequence[str] = BORDERS, far: int = FAR) -> int:
    """Where the first paragraph from `at` on begins; in a text without near ones, the first line or word."""
    near = [(text.find(border, at, at + far), len(border)) for border in borders]
    return next((i + n for i, n in near if i >= 0), at)


def last_border(text: str, at: int, borders: Sequence[str] = BORDERS, far: int = FAR) -> int:
    """Where the last paragraph up to `at` ends; in a text without near ones, the last line or word."""
    near = [(text.rfind(border, max(0, at - far), at), len(border)) for border in borders]
    return next((i + n for i, n in near if i >= 0), at)


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1
