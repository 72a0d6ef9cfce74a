"""The same methods in a running model: who reads gets the budget at which replays billed the same bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from analyses.contexts import identity
from analyses.frontier import methods
from analyses.frontier.methods import CLOSED, KEEPS, OWN, READS, STORES
from analyses.question import Numbers

SHARES = {f"{x:.0%}": x for x in methods.SHARES}
ANSWERS = "needle/short/smollm2: answer"
NEAR = 0.005  # of the visible tokens: so far the budget that replays bill may move before the model must be run again
SHARE = r"share\(([\d.]+)"
OPEN = frozenset({"oracle of keeping", "h2o with moments"})  # the future, and what is no row: replays alone have them


def policies(numbers: Numbers) -> dict[str, tuple[str, str]]:
    """{expression: (method, bytes)}. qevict gets the budget of its rows: its scales come on top, as the table's footnote says."""
    [cell] = [f for f in numbers.figures() if f.cell == ANSWERS]
    out = {e.format(x=x): (n, at) for n, e in (KEEPS | CLOSED).items() if n not in OPEN for at, x in SHARES.items()}
    for n, e in READS.items():
        for at in SHARES:
            if cell.has("read: budget", n, at):
                out[e.format(x=round(float(cell("read: budget", n, at)[0]), 3))] = (n, at)
    return out | {e: (n, OWN) for n, e in STORES.items()}


def labels(numbers: Numbers, ran: Iterable[str]) -> dict[str, tuple[str, str]]:
    """{a policy's identity in a study's tables: (method, bytes)}, of those that ran at the budgets of today's numbers or within NEAR of them."""
    today = [(*_apart(identity(e)), label) for e, label in policies(numbers).items()]
    out = {}
    for policy in ran:
        method, share = _apart(policy)
        near = [(abs(x - share), label) for name, x, label in today if name == method and abs(x - share) <= NEAR]
        if near:
            out[policy] = min(near)[1]
    return out


def _apart(policy: str) -> tuple[str, float]:
    """quest(read=share(0.312, of="visible")) -> quest(read=share(, of="visible")), 0.312"""
    found = re.search(SHARE, policy)
    return re.sub(SHARE, "share(", policy), float(found[1]) if found else 0.0
