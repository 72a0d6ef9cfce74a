"""From pieces of text to a prompt: tokens, the role of each, and where in them the evidence lies."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvsim.capture.prompt import CONTEXT, FREE, HOLE, Prompt
from kvsim.errors import WrongUse
from kvsim.geometry import Span


@dataclass(frozen=True)
class Piece:
    """A part of the text. `fed`: from here on tokens are fed in decode; `span`: the label of a span to mark, of a `kind`;
    `free`: after it the model says so many tokens of its own."""

    text: str
    role: int = CONTEXT
    fed: bool = False
    span: str | None = None
    kind: str = "evidence"
    free: int = 0


def render(tokenizer: Any, pieces: Sequence[Piece], answers: Sequence[str] = (), scoring: str = "any", **meta: Any) -> Prompt:
    """The pieces as one text, tokenised in one go up to where the model speaks: a token belongs to the piece it starts in; a span
    is every token that overlaps it.

    A begin-of-text token goes first where the tokenizer has one. Raises WrongUse: a span whose tokens do not decode to its text."""
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    tokens, roles, spans, prefill = begin, [CONTEXT] * len(begin), [], None
    for part in _parts([p for p in pieces if p.text]):
        offset, ids, firsts, found = len(tokens), *_tokenised(tokenizer, part)
        for p, first, stop in zip(part, firsts, [*firsts[1:], len(ids)], strict=True):
            roles += [p.role] * (stop - first)
            if p.fed and prefill is None:
                prefill = offset + first
        tokens = [*tokens, *ids]
        spans += [Span(s.label, s.start + offset, s.stop + offset, s.kind) for s in found]
        tokens += [HOLE] * part[-1].free
        roles += [FREE] * part[-1].free
    text = "".join(p.text for p in pieces)
    return Prompt(
        tokens=tuple(tokens),
        roles=tuple(roles),
        prefill=len(tokens) if prefill is None else prefill,
        spans=tuple(spans),
        text=text,
        answers=tuple(answers),
        scoring=scoring,
        meta=meta,
    )


def known(text: str) -> dict[str, str]:
    """By what the text is known again."""
    return {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}


def count(tokenizer: Any, text: str) -> int:
    """Tokens of a text by itself."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _parts(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """The pieces between two words of the model's own."""
    ends = [i + 1 for i, p in enumerate(pieces) if p.free]
    yield from (pieces[a:b] for a, b in pairwise([0, *ends, len(pieces)]) if a < b)


def _tokenised(tokenizer: Any, pieces: Sequence[Piece]) -> tuple[list[int], list[int], list[Span]]:
    """(token ids, the first token of each piece, the spans). Raises WrongUse."""
    found = tokenizer("".join(p.text for p in pieces), add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = [int(i) for i in found["input_ids"]], found["offset_mapping"]
    starts, stops = [a for a, _ in offsets], [b for _, b in offsets]
    firsts, spans, at = [], [], 0
    for p in pieces:
        end = at + len(p.text)
        firsts.append(bisect_left(starts, at))
        if p.span is not None:
            span = Span(p.span, bisect_right(stops, at), bisect_left(starts, end), p.kind)
            said = tokenizer.decode(ids[span.start : span.stop], clean_up_tokenization_spaces=False)
            if p.text.strip() not in said:
                raise WrongUse(
                    f"the tokens of {p.span!r} decode to {said!r}; expected {p.text!r} in it: another tokenizer is needed"
                )
            spans.append(span)
        at = end
    return ids, firsts, spans
