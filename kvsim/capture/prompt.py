"""What a model is given: the prompt, the tokens fed to it one by one after it, and where in them the answer lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsim.errors import WrongUse
from kvsim.geometry import Span

CONTEXT, QUESTION, FORCED, FREE = 0, 1, 2, 3


@dataclass(frozen=True)
class Prompt:
    """Tokens with a role each; the first `prefill` are the prompt, the others are fed in decode, one a step."""

    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    prefill: int
    spans: tuple[Span, ...] = ()
    text: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.prefill <= len(self.tokens) or len(self.roles) != len(self.tokens):
            raise WrongUse(
                f"a prompt of {self.prefill} of {len(self.tokens)} tokens with {len(self.roles)} roles; expected one token or more, "
                "a role for each"
            )

    @property
    def fed(self) -> tuple[int, ...]:
        return self.tokens[self.prefill :]

    @property
    def mode(self) -> str:
        after = self.roles[self.prefill :]
        return "question_fed" if QUESTION in after else "teacher_forced" if after else "greedy"


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
