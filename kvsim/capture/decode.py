"""A model reads a prompt and goes on, token by token."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvsim.capture.layers import cached, placed
from kvsim.capture.prompt import HOLE, Prompt
from kvsim.errors import WrongUse

STEPS = 128  # decode steps, where nothing says how many
ANSWER_STEPS = 32  # the least of them after the last token that is fed


def steps_of(prompt: Prompt, steps: int | None, most: int | None = None) -> int:
    """Decode steps: as asked, or enough to feed what is fed and answer; `most` of them. Raises WrongUse."""
    fed = len(prompt.fed)
    if steps is not None and steps < max(1, fed):
        raise WrongUse(f"{steps} decode steps, and {fed} tokens are fed in decode; take at least {max(1, fed)}")
    return min(steps or max(STEPS, fed + ANSWER_STEPS), most or sys.maxsize)


def decode(model: Any, prompt: Prompt, steps: int, chunk: int | None = None, ends: Container[int] = ()) -> list[int]:
    """The prompt, then `steps` tokens one by one: those it feeds, then the likeliest, which also fills its holes -> all tokens that
    went through. After what is fed, one of `ends` is the last."""
    tokens = list(prompt.tokens[: prompt.prefill + steps])
    options = cached(model, DynamicCache(config=model.config))

    def forward(start: int, stop: int) -> int:
        ids = torch.tensor([tokens[start:stop]], device=model.device)
        return int(model(input_ids=ids, **options, **placed(model, start, stop)).logits[0, -1].argmax())

    chunk = chunk or prompt.prefill
    for i in range(0, prompt.prefill, chunk):
        following = forward(i, min(i + chunk, prompt.prefill))
    for n in range(prompt.prefill, prompt.prefill + steps):
        if n == len(tokens):
            tokens.append(following)
        elif tokens[n] == HOLE:
            tokens[n] = following
        following = forward(n, n + 1)
        if n >= len(prompt.tokens) and tokens[n] in ends:
            break
    return tokens


def end_of_text(model: Any) -> frozenset[int]:
    """Ids that end what a model says."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def answer(prompt: Prompt, tokens: Sequence[int], tokenizer: Any) -> dict[str, Any]:
    """What the model said of its own after all that it was fed, and how that scores."""
    said = tokenizer.decode(list(tokens[len(prompt.tokens) :]), skip_special_tokens=True)
    if not prompt.answers:
        return {"said": said}
    return {"said": said, "score": prompt.score(said), "solved": prompt.solved(said)}
