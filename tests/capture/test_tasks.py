"""Prompts with a known answer: the same every time, evidence where it is said to be, every token with its role."""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest

from kvsim.capture import tasks
from kvsim.capture.prompt import CONTEXT, FORCED, FREE, HOLE, QUESTION, Prompt, prompt_of, score
from kvsim.capture.tasks import document, long_text, make, read_text
from kvsim.capture.tasks.hide import AT, DEEPEST, EDGE
from kvsim.capture.tasks.render import Piece, render
from kvsim.errors import WrongUse
from tests.capture.words import real, tokenizer

TEXT = read_text()
ASKING = [name for name in tasks.TASKS if name != "plain"]
HIDING = [name for name in tasks.STORIES if name != "decoded"]
ONE = ["needle", "passkey", "reversal", "code", "chat"]  # fact in the prompt
FEW = " ".join(f"word{c}" for c in "abcdefghijklmnopqrstuvwxyz") + " seven more words make thirty of them"
SEVERAL = ["multi-needle", "multi-key", "variables", "two-evidence", "few-shot"]


@cache
def text_for(name: str) -> str:
    return long_text(name)


def one(name: str, seed: int = 0, **where) -> Prompt:
    return make(name, tokenizer(), text_for(name), seed, **{"tokens": 700} | where)


def said(prompt: Prompt, start: int, stop: int, by=None) -> str:
    return (by or tokenizer()).decode([i for i in prompt.tokens[start:stop] if i != HOLE])


def evidence(prompt: Prompt, by=None) -> list[str]:
    return [said(prompt, s.start, s.stop, by) for s in prompt.spans if s.kind == "evidence"]


def runs(prompt: Prompt) -> list[tuple[int, int]]:
    """(role, how many tokens in a row have it)."""
    return [(role, len(list(group))) for role, group in itertools.groupby(prompt.roles)]


# ------------------------------------------------------------------------------------------------ spans
def planted(name: str, prompt: Prompt) -> list[str]:
    """What must stand in each span of evidence, found in the text of the prompt without looking at spans."""
    text, answers = prompt.text or "", prompt.answers
    if name == "common-words":
        listed, *_ = text.split("\n\nThe ")
        return [w for w in listed.split("\n") if w in answers]
    if name == "variables":
        return [f"VAR {x} = " for x in answers]
    if name == "two-evidence":
        [who] = re.findall(r"The pass key of (\w+) is$", text)
        [box] = re.findall(rf"{who} keeps the pass key in the (\w+) box", text)
        pair = [f"{who} keeps the pass key in the {box} box", f"The pass key in the {box} box is {answers[0]}"]
        return sorted(pair, key=text.index)
    if name == "few-shot":
        return re.findall(rf"Thing: \w+\nKind: {answers[0]}\n", text)
    if name == "code":
        return [f"():\n    return {answers[0]}"]
    if name == "multi-needle":
        return [f"is {x}. Remember it: {x} is the pass key of" for x in sorted(answers, key=text.index)]
    return [answers[0]]


@pytest.mark.parametrize("name", ASKING)
def test_a_hundred_spans_of_a_hundred_decode_to_what_was_planted(name):
    for seed in range(100):
        p = make(name, real(), text_for(name), seed, tokens=320)
        found, expected = evidence(p, real()), planted(name, p)
        assert len(found) == len(expected) > 0
        for span, words in zip(found, expected, strict=True):
            assert words.strip() in span
            assert len(span) <= len(words) + 75  # and not much else
        whole = "".join(said(p, s.start, s.stop, real()) for s in p.spans)
        for x in (x for x in p.answers if x.isdigit()):
            assert (p.text or "").count(x) == whole.count(x) + (name == "variables")  # the question says the value
        assert p.prefill <= 320


@pytest.mark.parametrize("name", ["needle", "reversal"])
@pytest.mark.parametrize("seed", range(6))
def test_evidence_is_clear_of_both_ends(name, seed):
    p = one(name, seed)
    [span] = p.spans
    [key] = p.answers
    assert said(p, span.start, span.stop).count(key) == 2
    assert key not in said(p, 0, span.start)
    assert key not in said(p, span.stop, len(p.tokens))
    assert 500 < p.prefill <= 700
    assert EDGE // 2 < span.start < span.stop <= p.prefill
    assert p.meta["depth"][0] <= DEEPEST


def test_a_passkey_is_anywhere():
    places = [(p.spans[0].start, p.prefill - p.spans[0].stop) for p in (one("passkey", seed) for seed in range(60))]
    assert min(a for a, _ in places) < EDGE
    assert min(b for _, b in places) < EDGE


@pytest.mark.parametrize("name", ONE)
def test_depth_is_where_it_was_asked_for(name):
    for depth in (0, 0.5, 1):
        p = one(name, 1, tokens=900, depth=depth)
        assert abs(p.spans[0].start / p.prefill - depth) < 0.25
        assert abs(p.meta["depth"][0] - depth) < 0.25


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("name", ["needle", "reversal"])
def test_evidence_is_placed_on_its_page(name, at):
    for seed, page in itertools.product(range(4), (16, 64)):
        p = one(name, seed, at=at, page=page)
        [span] = p.spans
        middle = (span.start + span.stop) // 2
        assert {
            "start": span.start % page,
            "end": span.stop % page,
            "border": middle % page,
            "middle": (middle - page // 2) % page,
        }[at] == 0
        assert p.answers[0] in said(p, span.start, span.stop)
        assert p.answers == one(name, seed).answers


def test_border_puts_half_of_the_needle_on_each_side():
    for seed in range(8):
        [span] = one("border", seed).spans
        assert (span.start + span.stop) // 2 % 16 == 0


@pytest.mark.parametrize("name", SEVERAL)
def test_orders_are_of_the_same_facts(name):
    first, other, again = (one(name, 2, order=k) for k in (0, 1, 1))
    assert other == again
    labels = [[s.label for s in p.spans] for p in (first, other)]
    assert labels[0] != labels[1]
    assert sorted(labels[0]) == sorted(labels[1])
    assert (first.answers, first.fed) == (other.answers, other.fed)
    assert sorted((first.text or "").split()) == sorted((other.text or "").split())


@pytest.mark.parametrize("name", ["multi-key", "two-evidence", "few-shot", "variables"])
def test_others_stand_by_that_do_not_answer(name):
    kinds = [s.kind for s in one(name, 5).spans]
    assert {"evidence", "distractor"} == set(kinds)


def test_a_span_holds_every_token_that_overlaps_it():
    whole = "the values of the interpreter"
    offsets = tokenizer()(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    start, stop = next((a, b) for a, b in offsets if b - a >= 4)
    cut = slice(start + 1, stop - 1)  # strictly inside a token
    p = render(tokenizer(), [Piece(whole[: cut.start]), Piece(whole[cut], span="x"), Piece(whole[cut.stop :])])
    [span] = p.spans
    assert (span.start, span.stop) == (1 + offsets.index((start, stop)), 2 + offsets.index((start, stop)))
    assert whole[cut] in said(p, span.start, span.stop)
    assert said(p, 1, len(p.tokens)) == whole
    assert len(p.roles) == len(p.tokens)


# ------------------------------------------------------------------------------------------------ what is fed, and who says it
def test_a_question_comes_token_by_token_after_the_prompt():
    p = one("needle", 3)
    assert p.mode == "question_fed"
    assert tokenizer().decode(p.fed) == "The secret pass key is"
    assert runs(p) == [(CONTEXT, p.prefill), (QUESTION, len(p.fed))]
    assert p.tokens[0] == tokenizer().bos_token_id


@pytest.mark.parametrize("name", [n for n in ASKING if n not in ("reversal", "decoded", "chat")])
def test_a_question_that_is_seen_is_in_the_prompt(name):
    p = one(name, 3, seen=True)
    assert p.mode == "greedy"
    assert p.prefill == len(p.tokens) <= 700
    assert runs(p)[-1][0] == QUESTION
    assert p.fed == ()


@pytest.mark.parametrize("name", ASKING)
def test_a_forced_answer_is_the_right_one(name):
    p = one(name, 3, forced=True)
    answer = said(p, len(p.tokens) - runs(p)[-1][1], len(p.tokens))
    assert [role for role, _ in runs(p)][-2:] == [QUESTION, FORCED]
    assert p.solved(answer)
    assert not p.solved(said(p, 0, 40))


def test_a_reversal_talks_of_something_else_first():
    p = one("reversal", 3)
    (context, n), (forced, between), (question, asked) = runs(p)
    assert (context, forced, question) == (CONTEXT, FORCED, QUESTION)
    assert n == p.prefill
    assert 320 <= between < 400
    assert "pass key" not in said(p, n, n + between)
    assert said(p, n + between, n + between + asked).startswith("The pass key of")
    assert said(p, 1, n + between).replace(said(p, p.spans[0].start, p.spans[0].stop), "")[-500:].strip() in TEXT


def test_evidence_that_is_decoded_is_not_in_the_prompt():
    for seed in range(6):
        p = one("decoded", seed)
        [span] = p.spans
        assert p.prefill + 30 < span.start < span.stop < len(p.tokens) - 30
        assert [role for role, _ in runs(p)] == [CONTEXT, FORCED, QUESTION]


def test_the_model_speaks_between_the_turns_of_a_chat():
    p = one("chat", 3)
    assert [role for role, _ in runs(p)] == [CONTEXT, QUESTION, FREE, QUESTION]
    assert [i == HOLE for i in p.tokens] == [role == FREE for role in p.roles]
    assert HOLE not in p.tokens[: p.prefill]
    assert said(p, p.prefill, len(p.tokens)).count("User:") == 2
    assert said(p, 1, p.prefill).count("User:") == 3


def test_plain_text_is_the_text():
    p = one("plain", 3, steps=50)
    assert runs(p) == [(CONTEXT, p.prefill), (FORCED, 50)]
    assert tokenizer().decode(p.tokens[1:]) in TEXT
    assert p.mode == "teacher_forced"
    with pytest.raises(WrongUse, match="0 answers"):
        p.score("x")


def test_common_words_are_the_most_common():
    for tokens in (200, 900, 3000):
        p = one("common-words", 4, tokens=tokens)
        words = (p.text or "").split("\n\nThe ")[0].split()
        counts = sorted(((words.count(w), w) for w in set(words)), reverse=True)
        assert {w for _, w in counts[:3]} == set(p.answers)
        assert counts[2][0] >= 4 * counts[3][0]
        assert tokens * 0.8 < p.prefill <= tokens


def test_a_chain_of_variables_leads_to_its_value():
    p = one("variables", 4)
    [value] = re.findall(r"whose value is (\d+) are$", p.text or "")
    pairs = dict(re.findall(r"VAR (\w+) = (\w+)", p.text or ""))

    def of(x: str) -> str:
        return of(pairs[x]) if x in pairs else x

    assert sorted(x for x in pairs if of(x) == value) == sorted(p.answers)
    assert len(pairs) == 2 * len(p.answers)


# ------------------------------------------------------------------------------------------------ the same, and others
@pytest.mark.parametrize("name", tasks.TASKS)
def test_the_same_arguments_make_the_same_tokens_and_others_do_not(name):
    assert one(name, 5, tokens=400) == one(name, 5, tokens=400)
    assert one(name, 5, tokens=400).tokens != one(name, 6, tokens=400).tokens


def test_parts_of_the_text_do_not_overlap():
    texts = [one("plain", i, tokens=300, part=(i, 24)).text or "" for i in range(24)]
    places = sorted((TEXT.index(t), len(t)) for t in texts)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))


def test_a_model_without_a_begin_token_gets_none():
    p = make("needle", tokenizer(begin=False), TEXT, 3, tokens=700)
    assert p.tokens[0] != tokenizer().bos_token_id
    assert tokenizer().decode(p.tokens[slice(p.spans[0].start, p.spans[0].stop)]).count(p.answers[0]) == 2


def test_any_text_will_do():
    lines = " ".join(f"word{i} goes its own way" for i in range(900))  # no paragraph, no line
    p = make("needle", tokenizer(), lines, 3, tokens=400)
    assert p.answers[0] in evidence(p)[0]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_the_least_length_is_told_and_fits(name):
    with pytest.raises(WrongUse, match=r"100 tokens do not hold this task; it takes \d+ at least \(--context \d+\)") as e:
        one(name, 1, tokens=100)
    least = int(re.findall(r"takes (\d+)", str(e.value))[0])
    assert 0 < one(name, 1, tokens=least).prefill <= least
    with pytest.raises(WrongUse, match=f"takes {least} at least"):
        one(name, 1, tokens=least - 1)


def test_texts_of_ones_own():
    text = TEXT[:2000]
    alone = document(tokenizer(), text)
    assert (alone.mode, alone.prefill) == ("greedy", len(alone.tokens))
    forced = document(tokenizer(), text, forced=30)
    assert (forced.mode, len(forced.fed), forced.tokens) == ("teacher_forced", 30, alone.tokens)
    asked = document(tokenizer(), text, question="Why?")
    assert (asked.mode, tokenizer().decode(asked.fed)) == ("question_fed", "Why?")
    assert document(tokenizer(), text, question="Why?", seen=True).mode == "greedy"


# ------------------------------------------------------------------------------------------------ scores
@pytest.mark.parametrize(
    ("text", "answers", "scoring", "expected"),
    [
        (" 48213.\n\nThe", ("48213",), "any", 1),
        ("482135", ("48213",), "any", 0),
        ("In the\nGREEN  Box", ("green box", "the box"), "any", 1),
        ("Paris", ("London", "Paris"), "any", 1),
        ("Paris", ("London", "Paris"), "share", 0.5),
        ("YEM and MAL", ("YEM", "MAL"), "share", 1),
        ("", ("x",), "share", 0),
        ("答案是北京。", ("北京",), "any", 1),  # scripts that do not part words
    ],
)
def test_an_answer_is_found_as_words(text, answers, scoring, expected):
    assert score(text, answers, scoring) == expected


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: make("needle", tokenizer(), TEXT[:3000], tokens=5000), "a text that is long enough"),
        (lambda: make("common-words", tokenizer(), "few words only", tokens=500), "2 different words"),
        (lambda: make("common-words", tokenizer(), FEW, tokens=1000), "take more words than the"),
        (lambda: one("needle", depth=1.5), "depth 1.5: expected"),
        (lambda: one("needle", at="top"), "at 'top': expected start, middle, end, border"),
        (lambda: one("needle", order=1), "1 facts have 1 orders"),
        (lambda: one("multi-key", depth=0.5), "--depth belongs to a task with one fact in its prompt; this one has 4"),
        (lambda: one("common-words", order=2), "--order belongs to"),
        (lambda: one("reversal", seen=True), "cannot come after more text"),
        (lambda: one("needle", depth=0, at="end", page=512), "the evidence cannot be brought to the end of a page of 512"),
        (lambda: one("needel"), "no task 'needel', did you mean 'needle'"),
        (lambda: document(tokenizer(), "short", forced=30), "30 are to be fed"),
        (lambda: read_text("/nowhere/at/all"), "cannot be read as UTF-8 text"),
        (lambda: prompt_of([]), "no tokens"),
        (lambda: score("x", ["x"], "best"), "by 'best'; expected"),
    ],
)
def test_refusals(make_it, words):
    with pytest.raises(WrongUse, match=words):
        make_it()
