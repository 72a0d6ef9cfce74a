"""What do certificates cost? Pages that a proof must read, beside pages that would have been enough."""

from __future__ import annotations

import polars as pl

from analyses.contexts import Context, Tables
from analyses.figures import Claim, at_least, mean, rows, share
from analyses.panels import axis, styled, sweep
from analyses.question import LONG, SHORT, Chart, Question

PAGE = 16
MASS = 0.95
PROOFS = {
    "exact_pages_r1": "the best token",
    "exact_pages_r10": "the best 10 tokens",
    "exact_pages_r64": "the best 64 tokens",
    "mass_pages_02": "80% of the mass",
    "mass_pages_01": "90% of the mass",
    "mass_pages_005": "95% of the mass",
    "mass_pages_001": "99% of the mass",
}
ORDERS = {
    "quest": "quest(read=tokens(128))",
    "oracle": "oracle(read=tokens(128))",
    "random pages": "random_read(read=tokens(128))",
}
RULES = {
    "95% proved, by 1": "quest(read=mass(eps=0.05))",
    "95% proved, by 8": "quest(read=mass(eps=0.05, batch=8))",
    "10 tokens proved, by 1": "quest(read=exact(r=10))",
    "10 tokens proved, by 8": "quest(read=exact(r=10, batch=8))",
}
ENOUGH = "95% of the mass"


def measure(context: Context) -> pl.DataFrame:
    run, rules = context.replay(ORDERS), context.replay(RULES)
    deep = context.replay({"proof": ORDERS["quest"]}, explain=True)
    there = (
        run("ledger").select("role", "request", "layer", "step", pages_there=(pl.col("visible_tokens") / PAGE).ceil()).unique()
    )
    at = ["role", "request", "layer", "step"]
    proofs = (
        deep("explain")
        .join(there, on=at)
        .unpivot(list(PROOFS), index=[*at, "q_head", "pages_there"], variable_name="at", value_name="depth")
    )
    proofs = proofs.with_columns(part=pl.col("depth") / pl.col("pages_there"), at=pl.col("at").replace_strict(PROOFS))
    easy = {"part of all pages": mean("part"), "easy steps": mean(pl.col("part") <= 0.5)}
    rounds = rules("heads").join(there, on=at)
    stopped = {"part read": share("read_pages", "pages_there"), "rounds": mean("rounds"), "mass recall": mean("mass_recall")}
    return pl.concat([rows(proofs, easy, pl.lit("proof")), enough(run, there), rows(rounds, stopped)])


def enough(run: Tables, there: pl.DataFrame) -> pl.DataFrame:
    """Of every order the fewest pages with which a head's mean recall is MASS, no proof in hand."""
    unit = ["role", "policy", "layer", "q_head"]
    reached = pl.col("pages").filter(pl.col("mass_recall_mean") >= MASS).min()
    pages = run("curves").group_by(unit, maintain_order=True).agg(reached)
    all_of = there.group_by("role", "layer").agg(pl.col("pages_there").mean())
    part = pages.join(all_of, on=["role", "layer"]).with_columns(part=(pl.col("pages") / pl.col("pages_there")).fill_null(1))
    return rows(part, {"part of all pages": mean("part")}, at=pl.lit(ENOUGH))


CLAIMS = [
    Claim(
        notes="when bounds are loose, proving the best tokens opens nearly all pages (on Quest, 3.2).",
        of="part of all pages that must be read to prove the best 10 tokens",
        number=lambda f: f("part of all pages", "proof", "the best 10 tokens"),
        claimed=at_least(0.9),
        so="to prove the best 10 tokens {} of all pages must be read.",
        if_not="the best 10 tokens are proved after {} of all pages.",
    ),
    Claim(
        notes="a bound on the mass left unread is sound and often near 1: page bounds are loose, and count for every token (on Quest, 3.2).",
        of="part of all pages that must be read to prove 95% of the mass",
        number=lambda f: f("part of all pages", "proof", ENOUGH),
        claimed=at_least(0.9),
        so="to prove 95% of the mass {} of all pages must be read: the proof comes when there is nothing left to save.",
        if_not="95% of the mass is proved after {} of all pages.",
    ),
    Claim(
        notes="it fits better to tell the few very easy queries (on Quest, 3.2).",
        of="steps and heads of which half the pages prove 95% of the mass",
        number=lambda f: f("easy steps", "proof", ENOUGH),
        claimed=at_least(0.01),
        so="{} of steps and heads are easy: half of the pages prove 95% of the mass.",
        if_not="there are hardly any easy queries: half of the pages prove 95% of the mass at {} of steps and heads.",
    ),
    Claim(
        notes="Quest takes a fixed budget for its time and leaves recall to experience; a proof costs more pages (on Quest, 1.1).",
        of="part of all pages that a proof of 95% of the mass reads beyond where quest's own order has it on average",
        number=lambda f: f("part of all pages", "proof", ENOUGH) - f("part of all pages", "quest", ENOUGH),
        claimed=at_least(0),
        so="the same order has 95% of the mass {} of all pages earlier: what a proof pays for is the slack of pages that do not matter.",
        if_not="a proof costs no further pages ({}).",
        form="+.1%",
    ),
    Claim(
        notes="opening pages in batches trades the number of rounds against pages read too many (on Quest, 3.2).",
        of="rounds saved by opening 8 pages at once",
        number=lambda f: 1 - f("rounds", "95% proved, by 8", "") / f("rounds", "95% proved, by 1", ""),
        claimed=at_least(0.5),
        so="8 pages at once save {} of the rounds.",
        if_not="8 pages at once save {} of the rounds only.",
    ),
    Claim(
        notes="and what it reads too many (on Quest, 3.2).",
        of="further part of all pages read by opening 8 at once",
        number=lambda f: f("part read", "95% proved, by 8", "") - f("part read", "95% proved, by 1", ""),
        claimed=at_least(0.01),
        so="and read {} of all pages more.",
        if_not="and read no more than {} of all pages more, because the proof comes at the end anyway.",
        form=".2%",
    ),
    Claim(
        notes="rounds after one another cost launches and waiting, which can eat what they save (on Quest, 3.2).",
        of="rounds a step, page by page, until 95% of the mass is proved",
        number=lambda f: f("rounds", "95% proved, by 1", ""),
        claimed=at_least(10),
        so="page by page a step takes {} rounds one after another.",
        if_not="page by page a step takes {} rounds.",
        form=".0f",
    ),
]


def _depth(frame: pl.DataFrame) -> object:
    y = {
        "part of all pages": axis("part of all pages", 0, 1, ".0%"),
        "easy steps": axis("steps of which half the pages are enough", 0, None, ".0%"),
    }
    lines = styled(["proof", *ORDERS])
    return sweep(frame, y, "what is wanted", lines, "Pages that a guarantee must read.", list(PROOFS.values()), joined=False)


def _rules(frame: pl.DataFrame) -> object:
    mine = frame.with_columns(at=pl.col("line"), line=pl.lit("quest with a stopping rule"))
    y = {
        "part read": axis("pages read, of those there are", 0, 1, ".0%"),
        "rounds": axis("rounds a step", 0),
        "mass recall": axis("dense mass read", 0, 1, ".0%"),
    }
    return sweep(mine, y, "rule", styled(["quest with a stopping rule"]), "What stopping rules read.", list(RULES), joined=False)


ALSO = "Not drawn: full attention, which reads every page and needs no proof."
QUESTION = Question(
    name="certificates",
    title="What do certificates cost?",
    lead="Pages are opened from the highest bound down until what was read proves that the rest cannot matter. How far does that go, "
    "and how far would it have had to go?",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "depth",
            "How deep must a proof read?",
            "Part of all pages of 16 that are read when the proof is complete; beside it, for 95% of the mass, where quest's, the oracle's "
            f"and a random order have it on average without a proof. {ALSO}",
            ["part of all pages", "easy steps"],
            _depth,
        ),
        Chart(
            "rules",
            "What do stopping rules read?",
            f"Quest, stopped by its own bounds, opening pages one by one or 8 at once. {ALSO} Nor the oracle, which proves nothing.",
            ["part read", "rounds", "mass recall"],
            _rules,
        ),
    ],
    cells=(*SHORT, LONG),
)
