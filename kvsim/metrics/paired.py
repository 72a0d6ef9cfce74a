"""Small counts told honestly: an interval of a share, a test of pairs, a correlation of ranks."""

from __future__ import annotations

from math import comb, sqrt
from typing import Any

import numpy as np

NORMAL = 1.959964  # two-sided 95 %


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share seen in n independent cases (E. B. Wilson, 1927); (0, 1) without any."""
    if n == 0:
        return 0.0, 1.0
    z = NORMAL**2 / n
    centre, half = (share + z / 2) / (1 + z), NORMAL * sqrt(share * (1 - share) / n + z / (4 * n)) / (1 + z)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # at 0 and 1 they meet but for rounding


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p of that many wins and losses of equal odds (on discordant pairs: McNemar's test); ties do not count."""
    n, most = wins + losses, max(wins, losses)
    return 1.0 if n == 0 else min(1.0, 2 * sum(comb(n, k) for k in range(most, n + 1)) / 2**n)


def spearman(x: Any, y: Any) -> float:
    """Rank correlation, ties sharing their mean rank; NaN where one side does not vary."""
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size > 0 else float("nan")


def auc(x: Any, solved: Any) -> float:
    """How often a solved case has the larger x than one that is not, ties as half; NaN without one of each."""
    place, yes = ranks(x), np.asarray(solved, bool)
    won, lost = int(yes.sum()), int((~yes).sum())
    return float((place[yes].sum() - won * (won - 1) / 2) / (won * lost)) if won and lost else float("nan")


def ranks(x: Any) -> Any:
    """f64[n]: from 0, ties sharing their mean."""
    _, place, count = np.unique(np.asarray(x, np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]
