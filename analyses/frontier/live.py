"""The same methods in a running model: who reads gets the budget at which replays billed the same bytes."""

from __future__ import annotations

from analyses.contexts import identity
from analyses.frontier import methods
from analyses.frontier.methods import CLOSED, KEEPS, OWN, READS, STORES
from analyses.question import Numbers

SHARES = {f"{x:.0%}": x for x in methods.SHARES}
ANSWERS = "needle/short/smollm2: answer"
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


def labels(numbers: Numbers) -> dict[str, tuple[str, str]]:
    """The same by the policy's identity in a study's tables."""
    return {identity(e): label for e, label in policies(numbers).items()}
