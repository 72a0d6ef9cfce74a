"""The sums in the notes on Quest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import kvsim
from analyses.reckoning import AT_MOST, MORE, OPEN_ENDED, Sum
from kvsim.cost import claims

MIB, DIM = 2**20, 128


def of_quest() -> list[Sum]:
    told, page, tile_page = claims.quest(), 16, 12
    dense = 2 * 2 * DIM * 65536
    index, chosen = dense / page, dense * 4096 / 65536
    pages = (2048 // page) - 1 - math.ceil((512 + page - 1) / page)
    a, b = box([(3, -2), (1, 1), (0, 0)]), box([(1, 2), (-1, 4)])
    return [
        Sum(
            "on Quest, opening",
            "an RTX 4090 was seen to read 16 GB of cache in 11 ms",
            told["told_ms"],
            told["floor_ms"],
            f"16 GiB at its {told['card_gbps']:.0f} GB/s; 11 ms need {told['needs_gbps']:.0f} GB/s, which are those of an A100, and the "
            "cache does not fit "
            "beside 16-bit weights",
            ".2f",
            AT_MOST,
        ),
        Sum("on Quest, 1.2, figure 2", "page A bounds (2, −1) by 8", 8, bound(a, (2, -1)), "as drawn", ".0f"),
        Sum(
            "on Quest, 1.2, figure 2",
            "page B bounds (0, 1) by 5 once (−2, 5) is appended",
            5,
            bound(box([(1, 2), (-1, 4), (-2, 5)]), (0, 1)),
            "as drawn",
            ".0f",
        ),
        Sum(
            "on Quest, 1.2, figure 2",
            "and by 4 before",
            4,
            bound(b, (0, 1)),
            "so the choice turned with the query, not with the append",
            ".0f",
        ),
        Sum(
            "on Quest, 1.1",
            "a hand-made page of three keys bounds (2, −1) by 8",
            8,
            bound(box([(1, 4), (3, -2), (-1, 1)]), (2, -1)),
            f"another page than figure 2's A: it bounds (0, 1) by {bound(box([(1, 4), (3, -2), (-1, 1)]), (0, 1)):.0f}, A by "
            f"{bound(a, (0, 1)):.0f}",
            ".0f",
        ),
        Sum(
            "on Quest, 2",
            "64K tokens, pages of 16 and 4096 read: an eighth of the bytes",
            1 / 8,
            (index + chosen) / dense,
            f"{index / MIB:.0f} MiB of boxes and {chosen / MIB:.0f} of pages for {dense / MIB:.0f}",
            ".3f",
        ),
        Sum(
            "on Quest, 2",
            "a page of 12 in tiles of 16 reads more than 12 tokens' bytes",
            1,
            16 / tile_page,
            "of what is chosen; the index stays",
            ".3f",
            MORE,
        ),
        Sum(
            "on Quest, 3",
            "boxes are 12.5 % of the keys with pages of 16",
            0.125,
            numbers() / (page * DIM),
            "and 6.25 % of keys and values: figure 1 counts those",
            ".2%",
        ),
        Sum("on Quest, 3", "and 3.125 % with pages of 64", 0.03125, numbers() / (64 * DIM), "1.56 % of keys and values", ".2%"),
        Sum(
            "on Quest, 3.1",
            "a box per key costs about as much as the keys",
            1,
            numbers(page) / (page * DIM),
            "smallest and largest are the same key, but both are stored",
            ".2f",
        ),
        Sum(
            "on Quest, 2",
            "attention's part of a step at 60 %, 7.03 times faster: 2.06 times in all",
            2.06,
            1 / (0.4 + 0.6 / 7.03),
            "Amdahl",
            ".2f",
        ),
        Sum("on Quest, 2", "at 40 %: 1.52 times", 1.52, 1 / (0.6 + 0.4 / 7.03), "Amdahl", ".2f"),
        Sum("on Quest, 2.1", "padding 256 pages to 4096 wastes 3840", 3840, 4096 - 256, "", ",.0f"),
        Sum("on Quest, 2.1", "and 32 chosen ones to 256, 224", 224, 256 - 32, "", ",.0f"),
        Sum("on Quest, 2.1", "8 heads with 64 pages each read 512 at most", 512, 8 * 64, "if no two agree", ",.0f"),
        Sum(
            "on Quest, 2.2",
            "of 2048 tokens, 4 sinks and 512 recent ones leave 1532 to choose",
            1532,
            pages * page,
            f"pages are whole: one of sinks, 33 of recent tokens where the window lies across them, {pages} to choose",
            ",.0f",
        ),
        Sum(
            "on Quest, 3.2",
            "the bound of probability left unread is often near 1",
            None,
            eps_hat(),
            "in a worked example of three pages after one is read; measured: certificates",
            ".4f",
            OPEN_ENDED,
        ),
        Sum(
            "on Quest, 1.1",
            "the output is off by 2 ε Vmax at most",
            0.40,
            output_error(),
            "a mixture of four values; ε times the spread of the values is .30",
            ".2f",
            AT_MOST,
        ),
        Sum(
            "on Quest, 3",
            "rounding corners to fp16 may shrink a box",
            0,
            float(np.float16(1.00048)) - 1.00048,
            "1.00048 becomes 1.0, below a key that is there: round outwards",
            ".5f",
            AT_MOST,
        ),
    ]


def box(keys: Sequence[tuple[float, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.min(keys, 0), np.max(keys, 0)


def bound(corners: tuple[NDArray[np.float64], NDArray[np.float64]], query: tuple[float, float]) -> float:
    low, high = (np.asarray(x, float) for x in corners)
    q = np.asarray(query, float)
    return float(np.maximum(q * low, q * high).sum())


def numbers(boxes: int = 1) -> int:
    """Stored of a page of keys, as the index is billed."""
    return kvsim.boxes(n=boxes).numbers(DIM)


def eps_hat() -> float:
    """Three pages of two tokens, scaled bounds 8.25, 3, 0; the first is read and holds logits of 8 and 7.25: what the bounds allow unread."""
    unread = 2 * (math.exp(3) + math.exp(0))
    return unread / (math.exp(8) + math.exp(7.25) + unread)


def output_error() -> float:
    """Weights .6 .3 .07 .03 on (1,0) (0,1) (−1,0) (0,−2); the first two are read."""
    a, v = np.array([0.6, 0.3, 0.07, 0.03]), np.array([(1, 0), (0, 1), (-1, 0), (0, -2)], float)
    return float(np.linalg.norm(a @ v - a[:2] @ v[:2] / a[:2].sum()))
