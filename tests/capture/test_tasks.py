"""Prompts with a known answer: the same every time, evidence where it is said to be, every token with its role."""

from __future__ import annotations

import itertools

import pytest

from kvsim.capture.prompt import CONTEXT, FORCED, QUESTION, Prompt, prompt_of
from kvsim.capture.tasks import DEEPEST, EDGE, Piece, document, needle, plain, read_text, render, reversal
from kvsim.errors import WrongUse
from tests.capture.words import tokenizer

TEXT = read_text()


def said(prompt: Prompt, start: int, stop: int) -> str:
    return tokenizer().decode(prompt.tokens[start:stop])


def runs(prompt: Prompt) -> list[tuple[int, int]]:
    """(role, how many tokens in a row have it)."""
    found: list[tuple[int, int]] = []
    for role in prompt.roles:
        found[-1:] = [(role, found[-1][1] + 1)] if found and found[-1][0] == role else [*found[-1:], (role, 1)]
    return found


@pytest.mark.parametrize("make", [needle, reversal])
@pytest.mark.parametrize("seed", range(12))
def test_evidence_is_where_it_is_said_to_be(make, seed):
    p = make(tokenizer(), TEXT, seed, tokens=700)
    [span] = p.spans
    key = p.meta["answer"]
    assert said(p, span.start, span.stop).count(key) == 2
    assert key not in said(p, 0, span.start)
    assert key not in said(p, span.stop, len(p.tokens))
    assert 500 < p.prefill <= 700
    assert EDGE // 2 < span.start < span.stop <= p.prefill
    assert p.meta["depth"] <= DEEPEST
    assert (p.text or "").count(key) == 2


def test_a_question_comes_token_by_token_after_the_prompt():
    p = needle(tokenizer(), TEXT, 3, tokens=700)
    assert p.mode == "question_fed"
    assert tokenizer().decode(p.fed) == "The secret pass key is"
    assert runs(p) == [(CONTEXT, p.prefill), (QUESTION, len(p.fed))]
    assert p.tokens[0] == tokenizer().bos_token_id


def test_a_question_that_is_seen_is_in_the_prompt():
    p = needle(tokenizer(), TEXT, 3, tokens=700, seen=True)
    assert p.mode == "greedy"
    assert p.prefill == len(p.tokens) <= 700
    assert runs(p)[-1][0] == QUESTION
    assert p.fed == ()


def test_a_forced_answer_is_the_right_one():
    p = needle(tokenizer(), TEXT, 3, tokens=700, forced=True)
    assert tokenizer().decode(p.fed) == f"The secret pass key is {p.meta['answer']}."
    assert [role for role, _ in runs(p)] == [CONTEXT, QUESTION, FORCED]
    seen = needle(tokenizer(), TEXT, 3, tokens=700, forced=True, seen=True)
    assert (seen.mode, tokenizer().decode(seen.fed)) == ("teacher_forced", f" {p.meta['answer']}.")


def test_a_reversal_talks_of_something_else_first():
    p = reversal(tokenizer(), TEXT, 3, tokens=700, between=320)
    (context, n), (forced, between), (question, asked) = runs(p)
    assert (context, forced, question) == (CONTEXT, FORCED, QUESTION)
    assert n == p.prefill
    assert 320 <= between < 400
    assert "pass key" not in said(p, n, n + between)
    assert said(p, n + between, n + between + asked).startswith("The pass key of")
    assert said(p, 1, n + between).replace(said(p, p.spans[0].start, p.spans[0].stop), "")[-500:].strip() in TEXT


def test_plain_text_is_the_text():
    p = plain(tokenizer(), TEXT, 3, tokens=700, steps=50)
    assert runs(p) == [(CONTEXT, p.prefill), (FORCED, 50)]
    assert tokenizer().decode(p.tokens[1:]) in TEXT
    assert p.mode == "teacher_forced"


@pytest.mark.parametrize("make", [needle, reversal, plain])
def test_the_same_arguments_make_the_same_tokens_and_others_do_not(make):
    assert make(tokenizer(), TEXT, 5, tokens=400) == make(tokenizer(), TEXT, 5, tokens=400)
    assert make(tokenizer(), TEXT, 5, tokens=400).tokens != make(tokenizer(), TEXT, 6, tokens=400).tokens


def test_parts_of_the_text_do_not_overlap():
    texts = [plain(tokenizer(), TEXT, i, tokens=300, part=(i, 24)).text or "" for i in range(24)]
    places = sorted((TEXT.index(t), len(t)) for t in texts)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))


def test_depth_is_where_it_was_asked_for():
    for depth in (0, 0.5, 1):
        p = needle(tokenizer(), TEXT, 1, tokens=900, depth=depth)
        assert abs(p.spans[0].start / p.prefill - depth) < 0.2
        assert abs(p.meta["depth"] - depth) < 0.2


def test_a_model_without_a_begin_token_gets_none():
    p = needle(tokenizer(begin=False), TEXT, 3, tokens=700)
    assert p.tokens[0] != tokenizer().bos_token_id
    assert tokenizer().decode(p.tokens[slice(p.spans[0].start, p.spans[0].stop)]).count(p.meta["answer"]) == 2


def test_a_span_holds_every_token_that_overlaps_it():
    whole = "the values of the interpreter"
    offsets = tokenizer()(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    start, stop = next((a, b) for a, b in offsets if b - a >= 4)
    cut = slice(start + 1, stop - 1)  # strictly inside a token
    p = render(tokenizer(), [Piece(whole[: cut.start]), Piece(whole[cut], evidence="x"), Piece(whole[cut.stop :])])
    [span] = p.spans
    assert (span.start, span.stop) == (1 + offsets.index((start, stop)), 2 + offsets.index((start, stop)))
    assert whole[cut] in said(p, span.start, span.stop)
    assert said(p, 1, len(p.tokens)) == whole
    assert len(p.roles) == len(p.tokens)


def test_texts_of_ones_own():
    text = TEXT[:2000]
    alone = document(tokenizer(), text)
    assert (alone.mode, alone.prefill) == ("greedy", len(alone.tokens))
    forced = document(tokenizer(), text, forced=30)
    assert (forced.mode, len(forced.fed), forced.tokens) == ("teacher_forced", 30, alone.tokens)
    asked = document(tokenizer(), text, question="Why?")
    assert (asked.mode, tokenizer().decode(asked.fed)) == ("question_fed", "Why?")
    assert document(tokenizer(), text, question="Why?", seen=True).mode == "greedy"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: needle(tokenizer(), TEXT[:3000], tokens=5000), "a text that is long enough"),
        (lambda: needle(tokenizer(), TEXT, tokens=40), "take 128 at least"),
        (lambda: needle(tokenizer(), TEXT, tokens=400, depth=1.5), "depth 1.5: expected"),
        (lambda: reversal(tokenizer(), TEXT, tokens=400, seen=True), "cannot come after more text"),
        (lambda: document(tokenizer(), "short", forced=30), "30 are to be fed"),
        (lambda: read_text("/nowhere/at/all"), "cannot be read as UTF-8 text"),
        (lambda: prompt_of([]), "no tokens"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(WrongUse, match=words):
        make()
