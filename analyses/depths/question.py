"""Fixed against dynamic K: rules that decide how deep a query reads, against fixed budgets that read as many pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from analyses.contexts import Context, Tables
from analyses.figures import Claim, Draws, Figures, at_least, at_most, mean, rows, share
from analyses.panels import axis, styled, sweep
from analyses.question import LONG, SHORT, Chart, Question
from kvsim.metrics.paired import auc

FIXED = "quest(read=tokens(128))"
RULES = {
    "gap of 0.5": "quest(read=gap(min=0.5, floor=pages(4), cap=pages(16)))",
    "gap of 2": "quest(read=gap(min=2.0, floor=pages(4), cap=pages(16)))",
    "top_p 0.8": "quest(read=top_p(p=0.8))",
    "top_p 0.95": "quest(read=top_p(p=0.95))",
    "10 best tokens proved": "quest(read=exact(r=10))",
    "80 % of the mass proved": "quest(read=mass(eps=0.2))",
}
GAP = "quest(read=gap(min=0, floor=pages(4), cap=pages(64)))"  # its levels; which of them a query reads is learned from other contexts
LEARNED = "gap, calibrated"
RISK = 0.1
RULE, HEADS, ALL = "the rule", "fixed for each head", "fixed for all"
BEYOND = "mass beyond a fixed budget"
COVERED = 0.9  # of the mass: below it a head's step has read too little
UNIT = ["role", "layer", "q_head"]
PAGES = ("pages read", "p99 over the mean", "busiest head", "reads all", "covers too little")


def measure(context: Context) -> pl.DataFrame:
    some = context.inner
    plain = context.replay(
        {"quest": FIXED, "random": "random_read(read=tokens(128))", "oracle": "oracle(read=tokens(128))"}, layers=some
    )
    seen = context.replay({"quest": FIXED}, layers=some, explain=True)
    rules = dict(RULES)
    if context.beside:
        rules[LEARNED] = f"quest(read=gap(file='{context.calibrated(GAP, some)}', risk={RISK}))"
    run = context.replay(rules, layers=some)
    found = [
        deep(run),
        equal(run("heads"), plain("curves")),
        told(seen),
        rows(plain("heads"), {"mass read by 8 pages": mean("mass_recall")}),
    ]
    return pl.concat(found)


def deep(run: Tables) -> pl.DataFrame:
    """Rows of how many pages a rule reads: of all there are, the far end over the mean, steps that read all, the busiest head over the "
    "mean one."""
    heads = run("heads").with_columns(pages=pl.col("read_pages").cast(pl.Float64))
    pages = pl.col("pages")
    busiest = heads.group_by("role", "policy", "request", "layer", "step").agg(most=pages.max(), mean=pages.mean())
    figures = {
        "pages read": share("pages", "held_pages"),
        "p99 over the mean": (pages.quantile(0.99, "linear"), pages.mean()),
        "reads all": mean(pl.col("read_pages") == pl.col("held_pages")),
        "covers too little": mean(pl.col("mass_recall") < COVERED),
    }
    return pl.concat(
        [
            rows(heads, figures, line=pl.lit(RULE), at="policy"),
            rows(busiest, {"busiest head": share("most", "mean")}, line=pl.lit(RULE), at="policy"),
        ]
    )


def equal(heads: pl.DataFrame, curves: pl.DataFrame) -> pl.DataFrame:
    """Mass read by a rule; by a fixed number of pages for each head, the mean of the head's own; by one number for all heads, the mean of "
    "all."""
    each = heads.group_by("policy", *UNIT, maintain_order=True).agg(pl.col("read_pages", "mass_recall").cast(pl.Float64).mean())
    of = {
        key: (c["pages"].to_numpy(), c["mass_recall_mean"].to_numpy())
        for key, c in curves.filter(pl.col("policy") == "quest").group_by(*UNIT)
    }
    found = []
    for (policy, role), mine in each.group_by("policy", "role", maintain_order=True):
        mean_pages = float(mine["read_pages"].to_numpy().mean())
        for r in mine.to_dicts():
            x, y = of[role, r["layer"], r["q_head"]]
            by = {RULE: r["mass_recall"], HEADS: np.interp(r["read_pages"], x, y), ALL: np.interp(mean_pages, x, y)}
            found += [(role, policy, line, float(value)) for line, value in by.items()]
    table = pl.DataFrame(found, schema=["role", "at", "line", "mass"], orient="row")
    read = rows(table, {"mass read": mean("mass")}, line="line")
    return pl.concat([read, beyond(read)])


def beyond(read: pl.DataFrame) -> pl.DataFrame:
    """Rows of mass read, less that by as many pages for all: in whole heads, as both have the same."""
    ours = read.filter(pl.col("line") == ALL).select("role", "at", less="top")
    other = read.filter(pl.col("line") != ALL).join(ours, on=["role", "at"], maintain_order="left")
    return other.select("role", pl.lit(BEYOND).alias("figure"), "line", "at", pl.col("top") - pl.col("less"), "below")


def told(seen: Tables) -> pl.DataFrame:
    """Does the gap tell who read too little? Of pairs of a head's step that did and one that did not, those in which the first has the
    smaller gap: half is chance."""
    both = seen("heads").join(
        seen("explain").select("request", "layer", "q_head", "step", "score_gap"), on=["request", "layer", "q_head", "step"]
    )
    known = both.drop_nulls("score_gap").with_columns(short=pl.col("mass_recall") < COVERED)
    found = []
    for (role,), mine in known.group_by("role", maintain_order=True):
        wins, pairs = ordered(mine.filter("short")["score_gap"].to_numpy(), mine.filter(~pl.col("short"))["score_gap"].to_numpy())
        found.append((role, "told by the gap", "quest", "", wins, pairs))
    short = rows(known, {"read too little": mean("short")}, line=pl.lit("quest"))
    return pl.concat([pl.DataFrame(found, schema=short.schema, orient="row"), short])


def ordered(low: Sequence[float] | np.ndarray, high: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Pairs in which low is below high, ties counting half; all pairs."""
    pairs = len(low) * len(high)
    return auc(np.append(low, high), np.repeat([False, True], [len(low), len(high)])) * pairs if pairs else 0.0, float(pairs)


def gain(rule: str, over: str = ALL) -> Callable[[Figures], Draws]:
    """Mass read by a rule, less that by fixed budgets of as many pages."""
    return lambda f: f("mass read", RULE, rule) - f("mass read", over, rule)


def read(figure: str, rule: str) -> Callable[[Figures], Draws]:
    return lambda f: f(figure, RULE, rule)


CLAIMS = [
    Claim(
        notes="a small gap of scores at the budget says that more pages would be worth it (on Quest, 3.2).",
        of="share of pairs in which the head's step that read too little has the smaller gap (half is chance)",
        number=lambda f: f("told by the gap", "quest"),
        claimed=at_least(0.5),
        so="of two steps of heads, the one that read less than 90 % of the mass has the smaller gap in {} of pairs: better than chance, "
        "and no oracle.",
        if_not="the gap does not tell who read too little ({} of pairs).",
    ),
    Claim(
        notes="so a budget that depends on the gap is better spent (on Quest, 3.2).",
        of="mass read with a gap of 0.5, less that with as many pages for all",
        number=gain("gap of 0.5"),
        claimed=at_least(0),
        so="a rule on the gap changes the mass that is read by {} against a fixed budget of as many pages.",
        if_not="a rule on the gap changes the mass that is read by {} against a fixed budget of as many pages: where it saves, it loses "
        "more than it wins "
        "where it spends.",
        form="+.1%",
    ),
    Claim(
        notes="a gap is worth what it was calibrated for, on other contexts (on Quest, 3.2).",
        of="mass read with a calibrated gap, less that with as many pages for all",
        number=gain(LEARNED),
        claimed=at_least(0),
        so="a gap that was calibrated on the other half of the contexts changes it by {}.",
        if_not="a gap that was calibrated on the other half of the contexts changes it by {}: no better than as many pages for all.",
        form="+.1%",
    ),
    Claim(
        notes="and calibrated it spends better than by one fixed fall of scores (the same).",
        of="what a calibrated gap reads beyond a fixed budget, less what a gap of 0.5 does",
        number=lambda f: gain(LEARNED)(f) - gain("gap of 0.5")(f),
        claimed=at_least(0),
        so="against a gap of 0.5, each beside as many pages for all, that is {} of the mass.",
        if_not="against a gap of 0.5, each beside as many pages for all, that is {} of the mass.",
        form="+.1%",
    ),
    Claim(
        notes="what it promises on the contexts that it learned from it may break on others (on Quest, 3.2).",
        of=f"steps of heads that read less than {COVERED:.0%} of the mass with a gap calibrated to a risk of {RISK:.0%}",
        number=read("covers too little", LEARNED),
        claimed=at_most(RISK),
        so="the risk that it was calibrated to is kept: {} of the steps read too little.",
        if_not="the risk that it was calibrated to is not kept: {} of the steps read too little.",
    ),
    Claim(
        notes="an estimate of the mass from scores may stop instead (after Twilight's top-p; the notes on Quest, 3.2, ask for calibration).",
        of="mass read with top_p 0.95, less that with as many pages for all",
        number=gain("top_p 0.95"),
        claimed=at_least(0),
        so="top_p changes the mass that is read by {} against a fixed budget of as many pages.",
        if_not="top_p changes the mass that is read by {} against a fixed budget of as many pages: bounds are loose by different amounts "
        "from head to "
        "head, and it believes them.",
        form="+.1%",
    ),
    Claim(
        notes="needs differ from step to step (on Quest, 1), and from head to head; which of the two a rule uses is not said.",
        of="mass read with top_p 0.95, less that with each head's own mean number of pages at every step",
        number=gain("top_p 0.95", HEADS),
        claimed=None,
        so="against budgets fixed for each head, deciding anew at every step changes it by {}.",
        form="+.2%",
    ),
    Claim(
        notes="a lower mean does not mean a lower far end (on Quest, 3.2).",
        of="99th percentile of pages read over the mean, top_p 0.95",
        number=read("p99 over the mean", "top_p 0.95"),
        claimed=at_least(2),
        so="the far end of top_p reads {} times the mean.",
        if_not="the far end of top_p reads {} times the mean.",
        form=".1f",
    ),
    Claim(
        notes="and work is uneven within a step (on Quest, 3.2).",
        of="pages of the busiest head of a step over the mean head's, top_p 0.95",
        number=read("busiest head", "top_p 0.95"),
        claimed=at_least(1.5),
        so="the busiest head of a step reads {} times what the mean head does: what a kernel of one shape waits for.",
        if_not="the busiest head of a step reads {} times what the mean head does.",
        form=".1f",
    ),
    Claim(
        notes="proofs by bounds read nearly everything when bounds are loose (on Quest, 3.2).",
        of="of all pages, those read until the 10 best tokens are proved",
        number=read("pages read", "10 best tokens proved"),
        claimed=at_least(0.9),
        so="proving the 10 best tokens reads {} of the pages.",
        if_not="proving the 10 best tokens reads {} of the pages.",
        form=".0%",
    ),
    Claim(
        notes="a probability bound mostly reads everything, too, and may find a few easy queries (on Quest, 3.2).",
        of="of the steps of heads, those that read every page until 80 % of the mass is proved",
        number=read("reads all", "80 % of the mass proved"),
        claimed=at_least(0.5),
        so="proving 80 % of the mass reads every page at {} of the steps.",
        if_not="proving 80 % of the mass reads every page at {} of the steps, and nearly all of them at the others.",
        form=".0%",
    ),
]
PLACES = [*RULES, LEARNED]


def _mass(frame: pl.DataFrame) -> object:
    y = {
        "mass read": axis("dense mass read", 0, 1, ".0%"),
        BEYOND: axis("mass beyond a fixed budget of as many pages", form="+.1%"),
    }
    return sweep(frame, y, "rule", styled([RULE, HEADS, ALL]), "Mass read by rules and by fixed budgets.", PLACES, joined=False)


def _pages(frame: pl.DataFrame) -> object:
    y = {
        "pages read": axis("pages read, of those there are", 0, 1, ".0%"),
        "p99 over the mean": axis("99th percentile over the mean", 0),
        "busiest head": axis("busiest head over the mean head", 0),
        "reads all": axis("steps that read every page", 0, 1, ".0%"),
        "covers too little": axis(f"steps that read less than {COVERED:.0%} of the mass", 0, 1, ".0%"),
    }
    return sweep(frame, y, "rule", styled([RULE]), "How many pages rules read.", PLACES, joined=False)


def _fixed(frame: pl.DataFrame) -> object:
    y = {"mass read by 8 pages": axis("dense mass read by 8 pages", 0, 1, ".0%")}
    named = frame.with_columns(at=pl.col("line"), line=pl.lit("8 pages"))
    return sweep(
        named,
        y,
        "ranked by",
        styled(["8 pages"]),
        "Mass that 8 pages hold, by who ranks them.",
        ["oracle", "quest", "random"],
        joined=False,
    )


QUESTION = Question(
    name="depths",
    title="Fixed against dynamic K",
    lead="A fixed number of pages costs every query the same. Rules stop earlier where they can and read on where they must. Does that "
    "read more of the attention than "
    "a fixed number of as many pages, and what does the far end cost?",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "mass",
            "At as many pages, does a rule read more?",
            f"Calibrated: on four contexts of the cell's other half, to {COVERED:.0%} of the mass at a risk of {RISK:.0%}, 4 to 64 pages. "
            "Fixed for each head: the mean of its own pages at every step. Fixed for all: the mean over heads. Not drawn: full attention, "
            "which reads everything, and the oracle, which is in the last chart.",
            ["mass read", BEYOND],
            _mass,
        ),
        Chart(
            "pages",
            "How many pages, and how unevenly?",
            "Not drawn: full attention, which reads all pages, and the oracle, which has no rule.",
            list(PAGES),
            _pages,
        ),
        Chart(
            "fixed",
            "How good is the order itself?",
            "A fixed budget of 128 tokens. Not drawn: full attention.",
            ["mass read by 8 pages"],
            _fixed,
        ),
    ],
    labels=[RULE, HEADS, ALL],
    cells=(*SHORT, LONG),
)
