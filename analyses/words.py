"""What figures say in words: the findings of a README, written from the numbers and never by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analyses.figures import HOLDS, NOT, OPEN, UNTOLD, Claim, Figures, Verdict, judge
from analyses.question import Question

BEGIN, END = "<!-- written by: python -m analyses NAME --write -->", "<!-- end -->"
LEAST = "no contexts of such cells"


def verdict(found: Sequence[Verdict]) -> str:
    """One line over the cells: **Holds** on a; **does not hold** on b."""
    if not found:
        return f"**{_upper(UNTOLD)}**: {LEAST}."
    parts = []
    for word in (HOLDS, NOT, UNTOLD, OPEN):
        mine = [v for v in found if v.word == word]
        if mine:
            where = "" if len(mine) == len(found) else " on " + ", ".join(v.cell for v in mine)
            few = f" with {_counts(mine)} contexts" if word == UNTOLD else ""
            parts.append(f"**{word}**{few}{where}")
    return _upper("; ".join(parts)) + "."


def numbers(claim: Claim, found: Sequence[Verdict]) -> str:
    if not found:
        return ""
    return f"{_upper(claim.of)}: " + "; ".join(f"{v.cell} {v.said(claim.form)}" for v in found) + "."


def read_as(claim: Claim) -> str:
    """The range that the claim is read as: the notes seldom say a number."""
    if claim.claimed is None:
        return ""
    form = claim.form.lstrip("+")
    low, high = (f"{x:{form}}" if math.isfinite(x) else None for x in claim.claimed)
    parts = [f"at least {low}" if low else "", f"at most {high}" if high else ""]
    return f"Read as: {' and '.join(p for p in parts if p)}."


def finding(claim: Claim, found: Sequence[Verdict]) -> str:
    """What follows where the claim holds, and where it does not, {} being its numbers there; nothing where it cannot be told."""
    sides = [(claim.so, [v for v in found if v.word in (HOLDS, OPEN)]), (claim.if_not, [v for v in found if v.word == NOT])]
    told = [(text.replace("{}", spanned(mine, claim.form.lstrip("+"))), mine) for text, mine in sides if text and mine]
    if len(told) == 1 and len(told[0][1]) == len(found):
        return _upper(told[0][0])
    return " ".join(f"On {', '.join(v.cell for v in mine)}: {text}" for text, mine in told)


def spanned(found: Sequence[Verdict], form: str) -> str:
    """2.6–2.9, or -2.9 to -2.6: the values of several cells."""
    ends = [f"{end(v.value for v in found):{form}}" for end in (min, max)]
    return (" to " if ends[0].startswith("-") else "–").join(dict.fromkeys(ends))


def block(question: Question, cells: Sequence[Figures]) -> str:
    """What stands between the marks of a README: the findings, then every claim with its number and verdict."""
    judged = [(c, judge(c, cells)) for c in question.claims]
    findings = [f"* {text}" for c, found in judged if (text := finding(c, found))]
    claims = [
        f"{i}. *The notes:* {c.notes}\n   {numbers(c, found)}\n   {' '.join(filter(None, [read_as(c), verdict(found)]))}"
        for i, (c, found) in enumerate(judged, 1)
    ]
    table = _table(*question.table(cells)) if question.table and cells else ""
    rests = "; ".join(f"{f.cell} ({len(f.contexts)})" for f in cells)
    return (
        "**Found**\n\n" + "\n".join(findings) + table + "\n\n**Claim by claim**, with 95 % intervals over contexts\n\n" + "\n".join(claims)
        + f"\n\nCells (contexts): {rests}. Command: `{question.command}`."
    )  # fmt: skip


def _table(columns: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    lines = [" | ".join(row) for row in (columns, ["---"] * len(columns), *body)]
    return "\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n\n" + "\n".join(f"{i}. {x}" for i, x in enumerate(notes, 1))


def rewritten(readme: str, text: str) -> str:
    """The README with this text between its two marks."""
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def _counts(found: Sequence[Verdict]) -> str:
    return "–".join(map(str, sorted({v.contexts for v in found})[:: max(1, len({v.contexts for v in found}) - 1)]))


def _upper(text: str) -> str:
    at = 2 if text.startswith("**") else 0
    return text[:at] + text[at : at + 1].upper() + text[at + 1 :]
