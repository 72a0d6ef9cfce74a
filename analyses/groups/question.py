"""How should query heads that share a kv head choose pages? Every way of choosing at equal bytes of the union."""

from __future__ import annotations

from typing import Any

import polars as pl

from analyses.contexts import Context
from analyses.figures import Claim, at_least, at_most, mean, rows, share
from analyses.measures import at_bytes
from analyses.panels import axis, styled, sweep
from analyses.question import SHORT, WIDE, Chart, Question

READ = "read=tokens(128)"
MODES = {
    "each head its own": "each",
    "each head the union": "share",
    "one set, largest bound": "max",
    "one set, mean bound": "mean",
    "one set, mean of softmax": "softmax_mean",
    "private page, then largest": "split",
}
POLICIES = {name: f"quest({READ}, heads='{mode}')" for name, mode in MODES.items()} | {
    "oracle, each head its own": f"oracle({READ})"
}
SHARES = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
AT = "25%"
OWN, UNION, MAX, MEAN, SOFT, SPLIT = MODES


def measure(context: Context) -> pl.DataFrame:
    run = context.replay(POLICIES)
    equal = at_bytes(run, SHARES)
    worst = equal.group_by("role", "policy", "at", maintain_order=True).agg(pl.col("mass_recall").min())
    own = run("ledger").filter(pl.col("policy") == OWN)
    heads = run("heads").group_by("role", "policy", "request", "layer", "step").agg(pl.col("read_pages").cast(pl.Int64).sum())
    asked = own.group_by("role", "policy", "request", "layer", "step").agg(
        pl.col("read_pages").cast(pl.Int64).sum().alias("union")
    )
    union = asked.join(heads, on=["role", "policy", "request", "layer", "step"])
    return pl.concat(
        [
            rows(equal, {"mass recall": mean("mass_recall"), "output error": mean("rel_l2")}),
            rows(worst, {"worst head's mass recall": mean("mass_recall")}),
            rows(union, {"union": share("union", "read_pages")}, at=pl.lit("128 tokens")),
        ]
    )


def over(one: str, other: str, figure: str = "mass recall") -> Any:
    return lambda f: f(figure, one, AT) - f(figure, other, AT)


CLAIMS = [
    Claim(
        notes="in the worst case heads choose disjoint pages, and their union is as large as all their budgets together (on Quest, 2.1).",
        of="pages of the union over the pages that the heads of a group choose, 128 tokens each",
        number=lambda f: f("union", OWN, "128 tokens"),
        claimed=at_least(0.9),
        so="the heads of a group hardly share pages: the union is {} of all they choose.",
        if_not="heads of a group share pages: the union is {} of all they choose; one set "
        "for all would be a third, and with four heads a quarter.",
    ),
    Claim(
        notes="sets of their own are finer, one set is more regular to read: the finer is the better recall (on Quest, 2.1).",
        of=f"mass read by sets of their own less that by one set of the largest bound, at {AT} of full attention's bytes",
        number=over(OWN, MAX),
        claimed=at_least(0),
        so="at equal bytes sets of their own read {} of the mass more than one set for the group.",
        form="+.1%",
        if_not="at equal bytes one set for the group reads more than sets of their own ({}): each head attends to all that is paid for.",
    ),
    Claim(
        notes="but a union that is read anyway could be attended to by all heads (kernels decide; the notes leave it open).",
        of=f"mass read by each head from the union less that from its own set, at {AT}",
        number=over(UNION, OWN),
        claimed=None,
        form="+.1%",
        so="who reads the union anyway gains {} of the mass by letting every head attend to all of it.",
    ),
    Claim(
        notes="the largest bound of a group adds up the false positives of its heads (on Quest, 2.1).",
        of=f"mass read by the largest bound less that by the mean bound, at {AT}",
        number=over(MAX, MEAN),
        claimed=at_most(0),
        so="one set by the largest bound reads less of the mass than one by the mean ({}).",
        form="+.1%",
        if_not="the largest bound is no worse than the mean ({}).",
    ),
    Claim(
        notes="a mean dilutes what few heads want very much (on Quest, 2.1).",
        of=f"mass read by the worst head under the largest bound less that under the mean, at {AT}",
        number=over(MAX, MEAN, "worst head's mass recall"),
        claimed=at_least(0),
        so="the worst head does better with the largest bound than with the mean: {}.",
        form="+.1%",
        if_not="the worst head does no better with the largest bound than with the mean ({}).",
    ),
    Claim(
        notes="some private pages for each head, the rest in common, is a middle way (on Quest, 2.1).",
        of=f"mass read by the worst head with a private page each less that of the largest bound alone, at {AT}",
        number=over(SPLIT, MAX, "worst head's mass recall"),
        claimed=at_least(0),
        so="a private page each helps the worst head: {}.",
        form="+.2%",
        if_not="a private page each does not help the worst head ({}).",
    ),
]


def _bytes(frame: pl.DataFrame) -> object:
    y = {
        "mass recall": axis("dense mass read, mean of heads", 0, 1, ".0%"),
        "worst head's mass recall": axis("dense mass read, worst head", 0, 1, ".0%"),
        "output error": axis("output error (relative L2)", log=True),
    }
    places = [f"{s:.0%}" for s in SHARES]
    return sweep(
        frame, y, "bytes of the union and the index, of full attention's", styled(list(POLICIES)), "By equal bytes.", places
    )


QUESTION = Question(
    name="groups",
    title="How should heads that share keys choose pages?",
    lead="With grouped queries a page that one head wants is read for all of its group. Choose apart, together, or by halves? Compared where "
    "the union of a group takes equal bytes.",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "bytes",
            "What does each way of choosing read at equal bytes?",
            "Across: rows of the pages that a group reads together, and the index, as a share of what full attention reads. SmolLM2 "
            "has three query heads to a kv head, Gemma 3 four. Not drawn: full attention, all of the bytes and no error.",
            ["mass recall", "worst head's mass recall", "output error"],
            _bytes,
        )
    ],
    cells=(*SHORT, WIDE),
    labels=list(POLICIES),
)
