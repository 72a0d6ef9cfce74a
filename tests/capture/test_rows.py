"""Rows of a file as tasks: captured, scored, and refused by line and field."""

from __future__ import annotations

import json
import re

import pytest

from kvsim.capture.prompt import CONTEXT, FORCED, QUESTION
from kvsim.capture.tasks import Where, read_rows, row_prompt
from kvsim.errors import WrongUse
from tests.capture.words import tokenizer

ROW = {
    "context": ["The sky over the bay was grey that day.", "The key of the old house is 48213, she wrote."],
    "question": "Which number is the key?",
    "answers": ["48213"],
    "evidence": ["is 48213"],
}


def file(tmp_path, *rows) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return str(path)


def prompt(tmp_path, row=ROW, limit=None, **where):
    return row_prompt(tokenizer(), read_rows(file(tmp_path, row))[0], Where(**where), limit)


def test_a_row_is_its_documents_and_its_question(tmp_path):
    p = prompt(tmp_path)
    assert p.text == "\n\n".join([*ROW["context"], ROW["question"]])
    assert tokenizer().decode(p.fed) == ROW["question"]
    assert set(p.roles[: p.prefill]) == {CONTEXT}
    assert set(p.roles[p.prefill :]) == {QUESTION}
    [span] = p.spans
    assert (span.kind, "48213" in tokenizer().decode(p.tokens[span.start : span.stop])) == ("evidence", True)
    assert p.solved("It is 48213.")
    assert p.meta == {"task": "jsonl", "row": 1}


def test_documents_in_another_order(tmp_path):
    p = prompt(tmp_path, order=1)
    assert p.text == "\n\n".join([*reversed(ROW["context"]), ROW["question"]])
    assert "48213" in tokenizer().decode(p.tokens[p.spans[0].start : p.spans[0].stop])
    with pytest.raises(WrongUse, match="line 1: order 2; 2 documents have 2 orders"):
        prompt(tmp_path, order=2)


def test_seen_and_forced(tmp_path):
    assert prompt(tmp_path, seen=True).mode == "greedy"
    assert tokenizer().decode(prompt(tmp_path, forced=True).fed).endswith("key? 48213")
    assert prompt(tmp_path, forced=True).roles[-1] == FORCED


def test_a_request_of_a_log_has_no_answer(tmp_path):
    p = prompt(tmp_path, {"context": "Only this.", "question": "", "answers": []})
    assert (p.mode, p.answers) == ("greedy", ())


def test_a_context_that_does_not_fit_tells_the_least(tmp_path):
    with pytest.raises(WrongUse, match=r"line 1: 10 tokens do not hold its context; it takes \d+ at least") as e:
        prompt(tmp_path, limit=10)
    least = int(re.findall(r"takes (\d+)", str(e.value))[0])
    assert prompt(tmp_path, limit=least).prefill == least


def test_lines_are_counted_as_an_editor_does(tmp_path):
    found = read_rows(file(tmp_path, ROW, "", ROW | {"id": "q7"}))
    assert [(r.line, r.id) for r in found] == [(1, None), (3, "q7")]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        *(
            ({k: v for k, v in ROW.items() if k != name}, f"line 2: no field '{name}'; expected")
            for name in ("context", "question", "answers")
        ),
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a list; expected an object with context, question, answers"),
        (ROW | {"context": 3}, "line 2: field 'context' is 3; expected a text, or a list of documents"),
        (ROW | {"context": " "}, "line 2: field 'context' is"),
        (ROW | {"question": None}, r"line 2: field 'question' is \[null\]"),
        (ROW | {"answers": "48213"}, "line 2: field 'answers' is \"48213\"; expected a list of texts"),
        (ROW | {"answers": [48213]}, "line 2: field 'answers' is"),
        (ROW | {"evidence": ["no such words"]}, "line 2: field 'evidence': 'no such words' stands in the context 0 times"),
        (ROW | {"evidence": ["The"]}, "line 2: field 'evidence': 'The' stands in the context 2 times"),
        (ROW | {"evidence": ["house is 48", "is 48213"]}, "line 2: field 'evidence': 'is 48213' overlaps"),
        (ROW | {"scoring": "best"}, "line 2: field 'scoring' is 'best'; expected any or share"),
    ],
)
def test_a_row_that_is_none(tmp_path, row, words):
    with pytest.raises(WrongUse, match=words) as e:
        read_rows(file(tmp_path, ROW, row))
    assert "\n" not in str(e.value)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(WrongUse, match="no rows"):
        read_rows(file(tmp_path, ""))
    with pytest.raises(WrongUse, match="cannot be read"):
        read_rows(tmp_path / "nowhere.jsonl")
