"""Prompts with a known answer, made from any long text: a needle, a topic reversal, and the plain text itself.

All are plain completions, without a chat template, so that base models can do them too. The same arguments make the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from kvsim.capture.prompt import CONTEXT, FORCED, QUESTION, Prompt
from kvsim.errors import WrongUse
from kvsim.geometry import Span

BORDERS = ("\n\n", "\n", " ")
FAR = 1500  # characters: a border further away is none
CHARS = 10  # of a token at most, on average: how much text is looked at for a context
EDGE = 64  # tokens at the start that no needle is put in: sinks would keep it
DEEPEST = 0.85  # part of the context: later, every recent window holds the needle
NAMES = ("Alice", "Bob", "Carol", "David", "Erin", "Frank", "Grace", "Henry")


@dataclass(frozen=True)
class Piece:
    """A part of the text. `fed`: from here on tokens are fed in decode; `evidence`: the label of a span to mark."""

    text: str
    role: int = CONTEXT
    fed: bool = False
    evidence: str | None = None


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


def render(tokenizer: Any, pieces: Sequence[Piece], **meta: Any) -> Prompt:
    """The pieces as one text, tokenised once: a token belongs to the piece it starts in; a span is every token that overlaps it.

    A begin-of-text token goes first where the tokenizer has one. Raises WrongUse: a span whose tokens do not decode to its text."""
    text = "".join(p.text for p in pieces)
    begin = [] if tokenizer.bos_token_id is None else [(tokenizer.bos_token_id, (0, 0))]
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = [*begin, *zip(found["input_ids"], map(tuple, found["offset_mapping"]), strict=True)]
    starts = [start for _, (start, _) in tokens]
    roles, spans, at, prefill = [CONTEXT] * len(begin), [], 0, None
    for p in (p for p in pieces if p.text):
        end = at + len(p.text)
        first = len(roles)
        roles += [p.role] * sum(at <= s < end for s in starts[len(begin) :])
        if p.fed and prefill is None:
            prefill = first
        if p.evidence is not None:
            inside = [i for i, (_, (a, b)) in enumerate(tokens) if a < end and b > at]
            span = Span(p.evidence, inside[0], inside[-1] + 1, "evidence")
            said = tokenizer.decode([i for i, _ in tokens[span.start : span.stop]], clean_up_tokenization_spaces=False)
            if p.text.strip() not in said:
                raise WrongUse(
                    f"the tokens of {p.evidence!r} decode to {said!r}; expected {p.text!r} in it: another tokenizer is needed"
                )
            spans.append(span)
        at = end
    ids = tuple(int(i) for i, _ in tokens)
    return Prompt(ids, tuple(roles), len(ids) if prefill is None else prefill, tuple(spans), text, meta)


# ------------------------------------------------------------------------------------------------ tasks
@dataclass(frozen=True)
class Fact:
    """What is hidden in a text, and the question that only it answers."""

    sentence: str
    question: str
    answer: str


def needle(tokenizer: Any, text: str, seed: int = 0, **place: Any) -> Prompt:
    """A pass key in the middle of a text on something else, and the question for it. place: as `hide` takes it."""
    rng = Random(f"needle {seed}")
    key = str(rng.randrange(10**4, 10**5))
    fact = Fact(f"The secret pass key is {key}. Remember it: {key} is the pass key.", "The secret pass key is", key)
    return hide(tokenizer, text, fact, rng, **place, task="needle", seed=seed)


def reversal(tokenizer: Any, text: str, seed: int = 0, between: int = 320, **place: Any) -> Prompt:
    """Somebody's pass key in a text on something else, which then goes on, forced, for `between` tokens or a few more; only then
    the question for the key, which nothing has touched since the prompt. place: as `hide` takes it."""
    rng = Random(f"reversal {seed}")
    key, name = str(rng.randrange(10**4, 10**5)), rng.choice(NAMES)
    fact = Fact(
        f"The pass key of {name} is {key}. Remember it: {key} is the pass key of {name}.", f"The pass key of {name} is", key
    )
    return hide(tokenizer, text, fact, rng, between=between, **place, task="reversal", seed=seed)


def hide(
    tokenizer: Any,
    text: str,
    fact: Fact,
    rng: Random,
    *,
    tokens: int = 1024,
    depth: float | None = None,
    part: tuple[int, int] = (0, 1),
    between: int = 0,
    seen: bool = False,
    forced: bool = False,
    **meta: Any,
) -> Prompt:
    """A prompt of at most `tokens` tokens of text with the fact in it, then its question, fed token by token.

    depth: where the fact is, 0 to 1 (None: drawn, away from both ends); part (i, n): the text is taken from its i-th n-th;
    between: tokens of the text that are fed before the question; seen: the question is part of the prompt, so that a cut after
    prefill knows it; forced: the answer is fed too. Raises WrongUse: too short a text, a place that is none."""
    if depth is not None and not 0 <= depth <= 1:
        raise WrongUse(f"depth {depth}: expected a part of the context, 0 to 1")
    if seen and between:
        raise WrongUse("a question that is seen in the prompt cannot come after more text; leave out seen (--seen)")
    length = len(tokenizer(fact.sentence, add_special_tokens=False)["input_ids"]) + 4
    asked = len(tokenizer(fact.question, add_special_tokens=False)["input_ids"]) if seen else 0
    before, after = passage(tokenizer, text, tokens - length - asked, between, rng, part)
    place = rng.uniform(EDGE / tokens, DEEPEST) if depth is None else depth
    at = _next_border(before, int(place * len(before)))
    if depth is None and at > DEEPEST * len(before):
        at = _last_border(before, int(DEEPEST * len(before)))
    pieces = [
        Piece(before[:at]),
        Piece(fact.sentence, evidence="needle"),
        Piece("\n\n" + before[at:]),
        Piece(after.rstrip() + "\n\n" if between else "", FORCED, fed=bool(between)),
        Piece(fact.question, QUESTION, fed=not seen),
        Piece(f" {fact.answer}." if forced else "", FORCED, fed=forced),
    ]
    return render(tokenizer, pieces, answer=fact.answer, depth=round(at / len(before), 3), **meta, **_known(text))


def plain(
    tokenizer: Any, text: str, seed: int = 0, tokens: int = 1024, steps: int = 128, part: tuple[int, int] = (0, 1)
) -> Prompt:
    """Real text of at most `tokens` tokens, the `steps` that follow forced in decode; part as in `hide`."""
    before, after = passage(tokenizer, text, tokens - 1, steps + 1, Random(f"plain {seed}"), part)
    made = render(tokenizer, [Piece(before), Piece(after, FORCED, fed=True)], task="plain", seed=seed, **_known(text))
    end = made.prefill + steps
    return replace(made, tokens=made.tokens[:end], roles=made.roles[:end])


def document(tokenizer: Any, text: str, question: str | None = None, seen: bool = False, forced: int = 0) -> Prompt:
    """A text of your own: alone, with its last `forced` tokens fed, or with a question after it that is fed (seen: in the prompt)."""
    if question is not None:
        return render(tokenizer, [Piece(text.rstrip() + "\n\n"), Piece(question, QUESTION, fed=not seen)], **_known(text))
    made = render(tokenizer, [Piece(text)], **_known(text))
    prefill = len(made.tokens) - forced
    if prefill < 1:
        raise WrongUse(
            f"the text has {len(made.tokens)} tokens, and {forced} are to be fed; expected fewer, so that a prompt is left"
        )
    return replace(made, roles=made.roles[:prefill] + (FORCED,) * forced, prefill=prefill)


# ------------------------------------------------------------------------------------------------ passages
def passage(tokenizer: Any, text: str, tokens: int, then: int, rng: Random, part: tuple[int, int]) -> tuple[str, str]:
    """(a passage of at most `tokens` tokens that ends with a paragraph, what follows it: `then` tokens and the rest of their line)."""
    low, high = (len(text) * x // part[1] for x in (part[0], part[0] + 1))
    need = min((tokens + then) * CHARS, high - low)
    start = _next_border(text, low + rng.randrange(high - low - need + 1))
    offsets = tokenizer(text[start : start + need], add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if tokens < 2 * EDGE or len(offsets) < tokens + then:
        raise WrongUse(
            f"a context of {tokens} tokens and {then} after it, from a text of {len(offsets)}; take {2 * EDGE} at least, and a text "
            "that is long enough (--text FILE)"
        )
    end = start + _last_border(text[start:high], offsets[tokens - 1][1])
    last = next((i for i, (a, _) in enumerate(offsets) if start + a >= end), 0) + then - 1
    return text[start:end], text[end : _line_end(text, start + offsets[last][1])] if then else ""


def _next_border(text: str, at: int) -> int:
    """Where the first paragraph from `at` on begins; in a text without near ones, the first line or word."""
    near = [(text.find(border, at, at + FAR), len(border)) for border in BORDERS]
    return next((i + n for i, n in near if i >= 0), at)


def _last_border(text: str, at: int) -> int:
    """Where the last paragraph up to `at` ends; in a text without near ones, the last line or word."""
    near = [(text.rfind(border, max(0, at - FAR), at), len(border)) for border in BORDERS]
    return next((i + n for i, n in near if i >= 0), at)


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


def _known(text: str) -> dict[str, str]:
    return {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}
