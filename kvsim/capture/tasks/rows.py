"""Tasks as data: a JSONL file of contexts, questions and answers, one request a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from math import factorial
from pathlib import Path
from typing import Any

from kvsim.capture.prompt import FORCED, QUESTION, SCORINGS, Prompt
from kvsim.capture.tasks.hide import Where
from kvsim.capture.tasks.render import Piece, render
from kvsim.errors import WrongUse

FIELDS = {
    "context": "a text, or a list of documents",
    "question": 'a text ("": none)',
    "answers": "a list of texts ([]: not scored)",
}


@dataclass(frozen=True)
class Row:
    """One line: `documents` are the context; evidence: texts that stand in it once."""

    where: str  # file and line, for complaints
    line: int
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    evidence: tuple[str, ...] = ()
    scoring: str = "any"
    id: str | None = None


def read_rows(path: str | Path) -> list[Row]:
    """Every line of a file. Raises WrongUse: the line and the field that is missing or is not what is expected."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise WrongUse(f"{path}: cannot be read as UTF-8 text ({e})") from None
    rows = [_row(f"{path}, line {n}", n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise WrongUse(f"{path}: no rows; expected a JSON object a line with {', '.join(FIELDS)}")
    return rows


def row_prompt(tokenizer: Any, row: Row, where: Where, limit: int | None = None) -> Prompt:
    """The documents of a row in the order asked for, then its question, fed token by token (where.seen: in the prompt).

    Raises WrongUse: a longer prompt than `limit` tokens, an order that it does not have."""
    n = len(row.documents)
    if where.order >= factorial(n):
        raise WrongUse(f"{row.where}: order {where.order}; {n} documents have {factorial(n)} orders")
    documents = next(islice(permutations(row.documents), where.order, None))
    text = "\n\n".join(d.strip() for d in documents)
    pieces = [*_marked(row, text), Piece("\n\n"), Piece(row.question, QUESTION, fed=not where.seen)]
    pieces.append(Piece(f" {row.answers[0]}" if where.forced and row.answers else "", FORCED, fed=where.forced))
    told = {"task": "jsonl", "row": row.id or row.line} | ({"order": where.order} if where.order else {})
    prompt = render(tokenizer, pieces, row.answers, row.scoring, **told)
    if limit is not None and prompt.prefill > limit:
        raise WrongUse(
            f"{row.where}: {limit} tokens do not hold its context; it takes {prompt.prefill} at least (--context {prompt.prefill})"
        )
    return prompt


def _row(where: str, n: int, line: str) -> Row:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise WrongUse(f"{where}: not JSON ({e}); expected an object with {', '.join(FIELDS)}") from None
    if not isinstance(given, dict):
        raise WrongUse(f"{where}: a {type(given).__name__}; expected an object with {', '.join(FIELDS)}")
    for name, what in FIELDS.items():
        if name not in given:
            raise WrongUse(f"{where}: no field {name!r}; expected {what}")
    context = given["context"]
    row = Row(
        where=where,
        line=n,
        documents=tuple(_texts(where, "context", [context] if isinstance(context, str) else context, FIELDS["context"])),
        question=_texts(where, "question", [given["question"]], FIELDS["question"])[0],
        answers=tuple(_texts(where, "answers", given["answers"], FIELDS["answers"])),
        evidence=tuple(_texts(where, "evidence", given.get("evidence") or [], "a list of texts that stand in the context")),
        scoring=given.get("scoring", "any"),
        id=None if given.get("id") is None else str(given["id"]),
    )
    if row.scoring not in SCORINGS:
        raise WrongUse(f"{where}: field 'scoring' is {row.scoring!r}; expected {' or '.join(SCORINGS)}")
    _marked(row, "\n\n".join(d.strip() for d in row.documents))
    return row


def _texts(where: str, field: str, found: Any, expected: str) -> Sequence[str]:
    if (
        not isinstance(found, list)
        or not all(isinstance(x, str) for x in found)
        or (field == "context" and not any(map(str.strip, found)))
    ):
        raise WrongUse(f"{where}: field {field!r} is {json.dumps(found, ensure_ascii=False)[:60]}; expected {expected}")
    return found


def _marked(row: Row, text: str) -> list[Piece]:
    """The text in pieces, its evidence marked. Raises WrongUse: evidence that is not in it, or more than once, or overlaps."""
    places = []
    for x in row.evidence:
        times = text.count(x) if x else 0
        if times != 1:
            raise WrongUse(
                f"{row.where}: field 'evidence': {x[:40]!r} stands in the context {times} times; expected once, word for word"
            )
        places.append((text.index(x), x))
    pieces, at = [], 0
    for i, (start, x) in enumerate(sorted(places)):
        if start < at:
            raise WrongUse(f"{row.where}: field 'evidence': {x[:40]!r} overlaps the one before; expected texts apart")
        pieces += [Piece(text[at:start]), Piece(x, span=f"evidence {i}")]
        at = start + len(x)
    return [*pieces, Piece(text[at:])]
