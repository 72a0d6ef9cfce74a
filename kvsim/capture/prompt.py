"""What a model is given: the prompt, the tokens fed to it one by one after it, and where in them the answer lies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsim.errors import WrongUse
from kvsim.geometry import Span

CONTEXT, QUESTION, FORCED, FREE = 0, 1, 2, 3
HOLE = -1  # stands for a token that the model is to say before more is fed
SCORINGS = ("any", "share")


@dataclass(frozen=True)
class Prompt:
    """Tokens with a role each; the first `prefill` are the prompt, the others are fed in decode, one a step; a HOLE among those is
    the model's to fill. answers: what it is expected to say at the end, scored as `score` does."""

    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    prefill: int
    spans: tuple[Span, ...] = ()
    text: str | None = None
    answers: tuple[str, ...] = ()
    scoring: str = "any"
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.prefill <= len(self.tokens) or len(self.roles) != len(self.tokens):
            raise WrongUse(
                f"a prompt of {self.prefill} of {len(self.tokens)} tokens with {len(self.roles)} roles; expected one token or more, "
                "a role for each"
            )

    def score(self, said: str) -> float:
        """Of what a model said after all that it was fed: 0 to 1. Raises WrongUse: nothing to score by."""
        return score(said, self.answers, self.scoring)

    def solved(self, said: str) -> bool:
        return self.score(said) == 1

    @property
    def fed(self) -> tuple[int, ...]:
        return self.tokens[self.prefill :]

    @property
    def mode(self) -> str:
        after = self.roles[self.prefill :]
        return "question_fed" if QUESTION in after else "teacher_forced" if after else "greedy"


def score(said: str, answers: Sequence[str], scoring: str = "any") -> float:
    """The part of `answers` that stand in a text as whole words, whatever their case and spacing: of all ("share"), or 1 where one
    of them does, which are ways to say the same ("any"). Raises WrongUse: no answers, an unknown scoring."""
    if not answers or scoring not in SCORINGS:
        raise WrongUse(f"{len(answers)} answers scored by {scoring!r}; expected one or more, by {' or '.join(SCORINGS)}")
    plain, *wanted = (" ".join(x.casefold().split()) for x in (said, *answers))
    hits = [re.search(rf"(?<!\w){re.escape(x)}(?!\w)", plain, re.ASCII) is not None for x in wanted]  # not all scripts part words
    return float(any(hits)) if scoring == "any" else sum(hits) / len(hits)


def prompt_of(given: Any) -> Prompt:
    """A Prompt, token ids, or a tensor of them [1, n]; alone they are all context. Raises WrongUse."""
    if isinstance(given, Prompt):
        return given
    if isinstance(given, Mapping):  # what a tokenizer returns
        if not np.all(given.get("attention_mask", 1)):
            raise WrongUse("the attention mask hides tokens of the prompt; give the prompt without padding")
        given = given["input_ids"]
    ids = _ids(given)
    return Prompt(tuple(ids), (CONTEXT,) * len(ids), len(ids))


def _ids(given: Any) -> Sequence[int]:
    ids = given.tolist() if hasattr(given, "tolist") else list(given)
    if ids and not isinstance(ids[0], int):
        if len(ids) != 1:
            raise WrongUse(f"a batch of {len(ids)} prompts; capture takes one sequence")
        ids = ids[0]
    if not ids or not all(isinstance(i, int) for i in ids):
        raise WrongUse("the prompt has no tokens; expected token ids")
    return list(ids)
