"""What the frames say, one sentence per question and cell; every number in it is computed here and nowhere typed."""

from __future__ import annotations

import math

import polars as pl

from analyses.keeping.measure import BITS, CODES, EVICT, H2O, HOLD, ORACLE, QEVICT, RANDOM, THREE, TWO, at_bytes


def by_bytes(mine: pl.DataFrame) -> str:
    taken = {n: mine.filter(pl.col("policy") == CODES, pl.col("at") == f"{n} bits")["bytes"].item() for n in BITS[:2]}
    parts = []
    for n, share in taken.items():
        at = at_bytes(mine, share)
        each = "; ".join(f"{line} {_told(at[line])}" for line in (QEVICT, EVICT, H2O, CODES, ORACLE, RANDOM))
        parts.append(f"where {n} bits of KIVI take {share:.1%} of the full cache's bytes: {each}")
    return "mass on evicted tokens, output error and evidence recall " + ". And ".join(parts)


def cross(mine: pl.DataFrame) -> str:
    two, three = (mine.filter(pl.col("policy") == x) for x in (TWO, THREE))
    return (
        f"with windows of {_list(two['at'])} tokens, {TWO} miss {_shares(two['fmm'])} of the mass and {THREE} {_shares(three['fmm'])}, "
        f"or {_shares(three['disabled'])} were codes lost, too; errors {_numbers(two['rel_l2'])} and {_numbers(three['rel_l2'])}, churn "
        f"{_shares(two['churn'])} and {_shares(three['churn'])}, bytes {_shares(two['bytes'])} and {_shares(three['bytes'])}. Spells that "
        f"ended full again: {_spells(two)} and {_spells(three)}; of an oracle by all attention so far {_shares(three['oracle'])}, by "
        f"attention since the last cut {_shares(three['interval'])}"
    )


def bits(mine: pl.DataFrame) -> str:
    shares = mine["at"].unique(maintain_order=True)
    each = [
        f"{line} miss {_shares(of['fmm'])} of the mass, error {_numbers(of['rel_l2'])}, churn {_shares(of['churn'])}, "
        f"full again {_spells(of)}"
        for (line,), of in mine.group_by("policy", maintain_order=True)
    ]
    return f"with {_list(shares)} of the budget for codes, " + "; ".join(each)


def start(mine: pl.DataFrame) -> str:
    each = []
    for (name,), of in mine.group_by("at", maintain_order=True):
        two, three = (of.filter(pl.col("policy") == x) for x in (TWO, THREE))
        each.append(
            f"{name} {_shares(two['fmm'])} and {_shares(three['fmm'])} (error {_numbers(two['rel_l2'])} and {_numbers(three['rel_l2'])}, "
            f"churn {_shares(two['churn'])} and {_shares(three['churn'])}, full again {_spells(two)} and {_spells(three)})"
        )
    return f"mass missed with {TWO} and with {THREE}, by start: " + "; ".join(each)


def promotion(mine: pl.DataFrame) -> str:
    each = [
        f"{r['at']}: error {r['rel_l2']:.4f}, {r['fmm']:.1%} of the mass missed, {r['bytes']:.1%} of the bytes on the device"
        + (f" and {r['host']:.1%} off it" if r["host"] else "")
        + f", churn {r['churn']:.1%}, full again {r['returns']} of {r['spells']}"
        for r in mine.to_dicts()
    ]
    return "; ".join(each)


def ledger(mine: pl.DataFrame) -> str:
    points = mine.unique(["churn", "ledger", "bytes", "fmm"], maintain_order=True)
    base = mine.filter(pl.col("policy") == "period", pl.col("at") == "8").row(0, named=True)
    most, moved = (points.sort(c, descending=True).row(0, named=True) for c in ("ledger", "churn"))
    rank = points.select(pl.corr("churn", "ledger", method="spearman")).item()
    return (
        f"over {len(points)} policies the rank correlation of churn and codes kept beside full rows is {rank:.2f}; the defaults keep "
        f"{base['ledger']:.2%} of the full cache's bytes, {base['ledger'] / base['bytes']:.1%} of their own, at a churn of {base['churn']:.1%}; "
        f"the most is {_point(most)}, and the most churn has {_point(moved)}"
    )


def _point(row: dict[str, object]) -> str:
    return f"{row['ledger']:.2%} ({row['policy']} {row['at']}, churn {row['churn']:.1%})"


def _told(at: dict[str, float]) -> str:
    evidence = at["evidence_recall"]
    return f"{at['fmm']:.1%}, {at['rel_l2']:.3f}" + ("" if math.isnan(evidence) else f", {evidence:.1%}")


def _list(values: pl.Series) -> str:
    return ", ".join(map(str, values))


def _shares(values: pl.Series) -> str:
    return ", ".join("none" if x is None else f"{x:.1%}" for x in values)


def _numbers(values: pl.Series) -> str:
    return ", ".join(f"{x:.3f}" for x in values)


def _spells(of: pl.DataFrame) -> str:
    return ", ".join(f"{back} of {spells}" for back, spells in of.select("returns", "spells").iter_rows())


ALIKE = f"All with hold=share({HOLD})."
HOW = {
    "by_bytes": "Across: bytes on the device, rows with all scales, zeros and kept codes, as a share of the full cache's, as measured. A line "
    "is one family at three budgets (KIVI: 2, 4 and 8 bits). Mass on evicted tokens is dense attention that can no longer be read; evidence "
    "recall is the part of the attention on the evidence that was read, at whatever fidelity.",
    "cross": f"{ALIKE} A spell begins when a window that was full is not, and ends when it is full again; with two tiers it never is. Oracles "
    "take as many windows at the same cuts by dense attention. The dotted line of mass counts coded tokens as lost, too.",
    "bits": f"{ALIKE} Windows of 8 tokens. More bits, or a smaller part for codes, buy fewer coded windows; codes kept beside are outside the "
    "budget.",
    "start": f"{ALIKE} What windows of the prompt count at the first cut: the attention of the last 8 prompt queries, of the last 32, of all "
    "that saw them, or nothing.",
    "promotion": f"{ALIKE} A promoted window is read as its codes decode to (ledger), as it was (shadow, which keeps originals off the "
    "device), or nothing is promoted (never): full places are for windows that were never coded.",
    "ledger": "A point per policy with three tiers. Codes of a window that is full again stay beside its rows, outside the budget. The defaults "
    "are in every series.",
}
ABSENT = {
    "by_bytes": "Not drawn: full attention, at 100 % of the bytes with nothing missed and no error. KIVI evicts nothing and takes no cuts, so "
    "it has no recurrence and no churn; those of QEvict and of eviction only are in the next chart.",
    "cross": "Not drawn: full attention, which misses nothing, and random tokens, which are in the first chart.",
    "ledger": "Not drawn: full attention, the oracle and random tokens, which have no codes.",
}
OTHERS = "Not drawn: full attention, which misses nothing; oracle and random tokens are in the first chart."
ABSENT |= dict.fromkeys(("bits", "start", "promotion"), OTHERS)
