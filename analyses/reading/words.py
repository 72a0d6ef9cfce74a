"""What the frames say, one sentence per question and cell; every number in it is computed here and nowhere typed."""

from __future__ import annotations

import polars as pl

from analyses.reading.measure import BUDGET, DEPTHS, ORACLE, PAGE, PAGES, QUEST, RANDOM, REACHED

SHARE = 0.35  # of full attention's bytes: where the boxes are compared
KEPT = ("quest, every 16 steps", "quest, every 64 steps", "oracle, every 64 steps", "quest, once", "random pages, once")


def slack(mine: pl.DataFrame) -> str:
    at = dict(mine.filter(pl.col("page") == PAGE).select("layer", "slack").iter_rows())
    low, high = (mine.filter(pl.col("page") == n).sort("layer")["slack"] for n in (PAGES[0], PAGES[-1]))
    each = ", ".join(f"{x:.1f} in layer {layer}" for layer, x in at.items())
    return (
        f"with pages of {PAGE} tokens the bound lies on average this far above the best token, in scaled logits: {each}; pages of "
        f"{PAGES[-1]} have {_range(high / low, '.1f')} times the slack of pages of {PAGES[0]}"
    )


def depth(mine: pl.DataFrame) -> str:
    layers = dict(mine.group_by("wanted").agg(100 * pl.col("part")).iter_rows())
    part = {wanted: _range(pl.Series(parts), ".1f") + " %" for wanted, parts in layers.items()}
    token, mass = part[DEPTHS["exact_pages_r1"]], part[DEPTHS["mass_pages_005"]]
    quest, oracle, random = (part[REACHED[name]] for name in (QUEST, ORACLE, RANDOM))
    return (
        f"by layer, the proof of the best token reads {token} of all pages, that of 95 % of the mass {mass}; without a proof quest's "
        f"order has 95 % of the mass after {quest}, the oracle's after {oracle}, a random one after {random}"
    )


def by_bytes(mine: pl.DataFrame) -> str:
    named = {"one box": QUEST, "two": "2 boxes, in order", "two clustered": "2 boxes, clustered", "four": "4 boxes, in order"}
    named |= {
        "four clustered": "4 boxes, clustered",
        f"one box and pages of {PAGE // 2}": "quest, pages of 8",
        "the oracle": ORACLE,
        RANDOM: RANDOM,
    }
    at = {p: (m, e) for p, m, e in mine.filter(pl.col("share") == SHARE).select("policy", "mass_recall", "rel_l2").iter_rows()}
    each = ", ".join(f"{said} {at[p][0]:.1%} ({at[p][1]:.3f})" for said, p in named.items() if p in at)
    return f"mass read (and output error) where rows and index are {SHARE:.0%} of the bytes of full attention: {each}"


def age(mine: pl.DataFrame) -> str:
    return "the oldest sets, and in brackets quest ranked anew at the same steps: " + "; ".join(
        _oldest(mine, policy) for policy in KEPT
    )


def _oldest(mine: pl.DataFrame, policy: str) -> str:
    row = mine.filter(pl.col("policy") == policy).sort("age").to_dicts()[-1]
    forms = {
        "mass_recall": "{:.1%} ({:.1%}) of the mass",
        "evidence_recall": "{:.1%} ({:.1%}) of the evidence",
        "rel_l2": "error {:.3f} ({:.3f})",
        "read_tokens": "{:.0f} ({:.0f}) tokens",
    }
    told = ", ".join(form.format(row[n], row[f"anew_{n}"]) for n, form in forms.items() if row[n] is not None)
    return f"{policy}, {row['ages']} steps ago: {told}"


def _range(values: pl.Series, form: str) -> str:
    low, high = (format(x, form) for x in (values.min(), values.max()))
    return low if low == high else f"{low}–{high}"


HOW = {
    "slack": "The bound of a page minus the best true logit in it, mean over pages, steps and heads (above) and of each step's loosest page "
    "(below). A slack of 3 lets a page seem e³ = 20 times as heavy as its best token. Lower is tighter.",
    "depth": f"Share of all pages of {PAGE} tokens, forced pages first, then down the ranking. Proofs: mean over steps and heads of the "
    "depth at which the guarantee holds. The last three rows have no proof: the fewest pages with which a head reads 95 % of its mass "
    "on average.",
    "bytes": f"Pages of {PAGE} tokens but where another size is named. Across: K and V rows of all pages that the query heads of a KV head read "
    "together, plus the summaries scanned, as a share of what full attention reads. More boxes know better and cost more to ask.",
    "age": f"A set of about {BUDGET} tokens per query head, kept for 16 or 64 steps or for good; pages that began since join it, so it grows. "
    "Policies ranked at every step stand where a set ranked once would: beside it they are on the same steps, beside other sets they are not. "
    "Some ages have a step or two (of_steps in the numbers), and are as ragged.",
}
ABSENT = {
    "slack": "Not drawn: full attention, the oracle and random pages, which have no bound to be loose.",
    "depth": "Full attention reads 100 %.",
    "bytes": "Full attention stands at 100 % of the bytes, recall 1 and error 0.",
    "age": "Not drawn: full attention, which has recall 1 and error 0 at any age, and random pages, which would stand far below.",
}
