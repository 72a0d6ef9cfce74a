"""Facts hidden in a text on something else, and the question that only they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, permutations
from math import factorial
from random import Random
from typing import Any

from kvsim.capture.prompt import FORCED, QUESTION, Prompt
from kvsim.capture.tasks.passage import BORDERS, FAR, LEAST, last_border, next_border, passage
from kvsim.capture.tasks.render import Piece, count, known, render
from kvsim.errors import WrongUse
from kvsim.geometry import Span

EDGE = 64  # tokens at the start that no fact is put in: sinks would keep it
DEEPEST = 0.85  # part of the context: later, every recent window holds the fact
JOINTS = 4  # tokens that a fact may cost beside its own
CLEAR = 3  # pages before evidence that is to stand somewhere on its page

AT: dict[str, Callable[[Span, int], bool]] = {
    "start": lambda s, page: s.start % page == 0,
    "middle": lambda s, page: (s.start + s.stop) // 2 % page == page // 2,
    "end": lambda s, page: s.stop % page == 0,
    "border": lambda s, page: (s.start + s.stop) // 2 % page == 0,
}


@dataclass(frozen=True)
class Where:
    """How long a prompt is and where in it things stand: the options that tasks share.

    tokens: of the prompt, at most; depth: where its one fact is, 0 to 1 (None: drawn); part (i, n): the text is taken from its i-th
    n-th; order: the k-th permutation of what is hidden, over the same places; at: of the evidence on a page of `page` tokens, one of
    AT; seen: the question is part of the prompt, so that a cut after prefill knows it; forced: the answer is fed too; steps: of text
    that goes on, for a task that forces it."""

    tokens: int = 1024
    depth: float | None = None
    part: tuple[int, int] = (0, 1)
    order: int = 0
    page: int = 16
    at: str | None = None
    seen: bool = False
    forced: bool = False
    steps: int = 128

    def __post_init__(self) -> None:
        """Raises WrongUse."""
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise WrongUse(f"depth {self.depth}: expected a part of the context, 0 to 1")
        if self.at is not None and self.at not in AT:
            raise WrongUse(f"at {self.at!r}: expected {', '.join(AT)}, a place on a page (--at)")
        if self.page < 2 or self.order < 0:
            raise WrongUse(f"page {self.page}, order {self.order}: expected 2 tokens or more, and 0 or more")


@dataclass(frozen=True)
class Fact:
    """A sentence that is hidden, between words that introduce it and words that lead back to the text. kind: "evidence" where the
    answer needs it, else "distractor"."""

    sentence: str
    label: str = "needle"
    kind: str = "evidence"
    before: str = ""
    after: str = "\n\n"

    @property
    def pieces(self) -> list[Piece]:
        return [Piece(self.before), Piece(self.sentence, span=self.label, kind=self.kind), Piece(self.after)]


@dataclass(frozen=True)
class Story:
    """What a task hides and asks. lead, tail: around the whole text; fed: pieces in decode before the question; between: tokens of
    the text that go on, forced, before it; decoded: the fact stands in the middle of those; range: of depths to draw from (None:
    clear of both ends)."""

    facts: tuple[Fact, ...]
    question: str
    answers: tuple[str, ...]
    scoring: str = "any"
    lead: str = ""
    tail: str = ""
    fed: tuple[Piece, ...] = ()
    between: int = 0
    decoded: bool = False
    range: tuple[float, float] | None = None
    borders: tuple[str, ...] = BORDERS
    far: int = FAR


def hide(tokenizer: Any, text: str, story: Story, where: Where, rng: Random, **meta: Any) -> Prompt:
    """A prompt of at most `where.tokens` tokens of text with the facts of the story in it, then its question, fed token by token.

    Raises WrongUse: too few tokens for the story, with the least that do; too short a text; an option that the story has no use for."""
    _check(story, where)
    room = where.tokens - _taken(tokenizer, story, where.seen)
    if room < LEAST:
        least = where.tokens - room + LEAST
        raise WrongUse(f"{where.tokens} tokens do not hold this task; it takes {least} at least (--context {least})")
    before, after = passage(tokenizer, text, room, story.between, rng, where.part)
    places = list(_places(before, story, where, rng))
    facts = next(islice(permutations(() if story.decoded else story.facts), where.order, None))
    meta |= {"depth": [round(at / len(before), 3) for at in places]} | ({"order": where.order} if where.order else {})
    texts = [before[a:b] for a, b in zip([0, *places], [*places, len(before)], strict=True)]

    def made(skip: int = 0) -> Prompt:
        first = Piece(texts[0][skip:])
        hidden = [x for fact, t in zip(facts, texts[1:], strict=True) for x in (*fact.pieces, Piece(t))]
        pieces = [Piece(story.lead), first, *hidden, Piece(story.tail), *_fed(story, after, where)]
        return render(tokenizer, pieces, story.answers, story.scoring, **meta, **known(text))

    return made() if where.at is None else _on_page(made, tokenizer, texts[0], where)


def _check(story: Story, where: Where) -> None:
    """Raises WrongUse: options that this story cannot honour."""
    n = 0 if story.decoded else len(story.facts)
    for given, option in ((where.depth, "--depth"), (where.at, "--at")):
        if given is not None and n != 1:
            raise WrongUse(f"{option} belongs to a task with one fact in its prompt; this one has {n}")
    if where.order >= factorial(n):
        raise WrongUse(f"order {where.order}: {n} facts have {factorial(n)} orders, 0 to {factorial(n) - 1}")
    if where.seen and (story.between or story.fed):
        raise WrongUse("a question that is seen in the prompt cannot come after more text; leave out seen (--seen)")


def _taken(tokenizer: Any, story: Story, seen: bool) -> int:
    """Tokens of the prompt that are none of the text."""
    facts = () if story.decoded else story.facts
    around = [x for x in (story.lead, story.tail, story.question if seen else "") if x]
    return sum(count(tokenizer, f.before + f.sentence + f.after.rstrip()) + JOINTS for f in facts) + sum(
        count(tokenizer, x) for x in around
    )


def _places(before: str, story: Story, where: Where, rng: Random) -> Iterator[int]:
    """Where in the passage each fact goes, ascending: at borders, drawn from bands of depth, one for each."""
    low, high = story.range or (EDGE / where.tokens, DEEPEST)
    low = low if where.at is None else max(low, CLEAR * where.page / where.tokens)
    n, at = 0 if story.decoded else len(story.facts), 0
    for i in range(n):
        depth = (
            where.depth if where.depth is not None else rng.uniform(low + (high - low) * i / n, low + (high - low) * (i + 1) / n)
        )
        place = next_border(before, int(depth * len(before)), story.borders, story.far)
        if where.depth is None and place > high * len(before):
            place = last_border(before, int(high * len(before)), story.borders, story.far)
        at = max(at, place)
        yield at


def _fed(story: Story, after: str, where: Where) -> Iterator[Piece]:
    """What comes in decode, or is seen at the end of the prompt."""
    if story.decoded:
        at = next_border(after, len(after) // 2, far=len(after) // 4)
        yield Piece(after[:at], FORCED, fed=True)
        for fact in story.facts:
            yield from (Piece(p.text, FORCED, span=p.span, kind=p.kind) for p in fact.pieces)
        yield Piece(after[at:].rstrip() + "\n\n", FORCED)
    elif story.between:
        yield Piece(after.rstrip() + "\n\n", FORCED, fed=True)
    yield from story.fed
    yield Piece(story.question, QUESTION, fed=not where.seen)
    yield Piece(f" {', '.join(story.answers)}." if where.forced else "", FORCED, fed=where.forced)


def _on_page(made: Callable[[int], Prompt], tokenizer: Any, text: str, where: Where) -> Prompt:
    """The prompt with so much of the start of its text left out that the evidence stands where it is asked for. Raises WrongUse.

    Without its first i tokens all others move by i, where i is the start of a word; inside of one they may be cut otherwise."""
    fits, whole = AT[where.at or ""], _evidence(made(0))
    starts = [a for a, _ in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]]
    moved = [i for i in range(len(starts)) if fits(replace(whole, start=whole.start - i, stop=whole.stop - i), where.page)]
    for i in sorted(moved, key=lambda i: not text[max(0, starts[i] - 1) : starts[i] + 1].count(" ")):
        prompt = made(starts[i])
        if fits(_evidence(prompt), where.page):
            return prompt
    raise WrongUse(
        f"the evidence cannot be brought to the {where.at} of a page of {where.page}; take another seed, or a later depth"
    )


def _evidence(prompt: Prompt) -> Span:
    return next(s for s in prompt.spans if s.kind == "evidence")
