"""Prompts with a known answer, made from any long text, or read from a file: what a capture or a closed loop runs a model on.

    prompt = make("needle", tokenizer, read_text(), seed=3, tokens=4096)
    prompt.score("The key is 48213.")

All are plain completions, without a chat template, so that base models can do them too. The same arguments make the same tokens. A
task is a function of its name in one of these files: of a random generator to the story that is hidden, or of the text to the prompt."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from random import Random
from typing import Any

from kvsim.capture.prompt import Prompt
from kvsim.capture.tasks import chat, code, examples, keys, links, own, words
from kvsim.capture.tasks.hide import Story, Where, hide
from kvsim.capture.tasks.own import document
from kvsim.capture.tasks.passage import read_text
from kvsim.capture.tasks.rows import Row, read_rows, row_prompt
from kvsim.errors import WrongUse

__all__ = ["TASKS", "Row", "Where", "document", "long_text", "make", "read_rows", "read_text", "row_prompt"]

STORIES: dict[str, Callable[[Random], Story]] = {
    "needle": keys.needle,
    "passkey": keys.passkey,
    "border": keys.needle,
    "multi-needle": keys.multi_needle,
    "multi-key": keys.multi_key,
    "variables": links.variables,
    "two-evidence": links.two_evidence,
    "few-shot": examples.few_shot,
    "code": code.far_definition,
    "chat": chat.chat,
    "decoded": keys.decoded,
    "reversal": keys.reversal,
}
WHOLE: dict[str, Callable[..., Prompt]] = {"common-words": words.common_words, "plain": own.plain}
TASKS = (*STORIES, *WHOLE)
DEFAULTS: dict[str, dict[str, Any]] = {"border": {"at": "border"}}  # a needle across a page border


def make(name: str, tokenizer: Any, text: str, seed: int = 0, **where: Any) -> Prompt:
    """The prompt of a task; where: the fields of Where. Raises WrongUse: no such task, or what it cannot do."""
    check(name)
    rng, place = Random(f"{name} {seed}"), Where(**DEFAULTS.get(name, {}) | where)
    build = WHOLE.get(name) or partial(_hidden, STORIES[name])
    return build(tokenizer, text, place, rng, task=name, seed=seed)


def check(name: str) -> None:
    """Raises WrongUse: no such task."""
    if name not in TASKS:
        near = get_close_matches(name, TASKS, 1)
        raise WrongUse(
            f"no task {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; expected {', '.join(TASKS)}, or FILE.jsonl")
        )


def long_text(name: str, path: str | None = None) -> str:
    """The text that a task is hidden in: a file, or what comes with Python. Raises WrongUse."""
    return code.source() if path is None and name == "code" else read_text(path)


def _hidden(story: Callable[[Random], Story], tokenizer: Any, text: str, where: Where, rng: Random, **meta: Any) -> Prompt:
    return hide(tokenizer, text, story(rng), where, rng, **meta)
