"""Do better summaries pay? Boxes in parts, smaller pages, other shapes, turned axes and fewer bits, all at equal bytes."""

from __future__ import annotations

from typing import Any

import polars as pl

from analyses.contexts import Context
from analyses.figures import Claim, at_least, at_most, mean, rows
from analyses.measures import at_bytes
from analyses.panels import axis, styled, sweep
from analyses.question import SHORT, WIDE, Chart, Question

READ = "read=tokens(128)"
POLICIES = {
    "one box": f"quest({READ})",
    "two boxes": f"quest({READ}, index=boxes(n=2))",
    "two boxes, clustered": f"quest({READ}, index=boxes(n=2, by='cluster'))",
    "four boxes": f"quest({READ}, index=boxes(n=4))",
    "pages of 8": f"quest({READ}, page=8)",
    "one box in fp8": f"quest({READ}, index=boxes(dtype='fp8'))",
    "Hadamard axes": f"quest({READ}, index=boxes(rotate='hadamard'))",
    "principal axes": f"quest({READ}, index=boxes(rotate='pca'))",
    "sphere": f"quest({READ}, index=sphere())",
    "mean width": f"quest({READ}, index=digest())",
    "oracle": f"oracle({READ})",
    "random pages": f"random_read({READ})",
}
SHARES = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45)
MOST = "35%"  # where four boxes have something left to read
USUAL = "25%"


def measure(context: Context) -> pl.DataFrame:
    run = context.replay(POLICIES)
    equal = at_bytes(run, SHARES)
    figures = {"mass recall": mean("mass_recall"), "output error": mean("rel_l2")}
    return pl.concat([rows(equal, figures), rows(run("heads"), {"slack": mean("slack_mean")}, at=pl.lit("128 tokens"))])


def gain(of: str, over: str = "one box", at: str = USUAL) -> Any:
    """What one summary reads of the mass above another at equal bytes."""
    return lambda f: f("mass recall", of, at) - f("mass recall", over, at)


CLAIMS = [
    Claim(
        notes="several boxes in a page trade bytes for tightness without a break; more are tighter (on Quest, 3.1).",
        of=f"mass read with two boxes less that with one, both at {USUAL} of full attention's bytes",
        number=gain("two boxes"),
        claimed=at_least(0),
        so="a second box pays for its bytes: {} of the mass more.",
        form="+.1%",
        if_not="a second box is tighter and still reads less of the mass at equal bytes ({}): every box is scanned at every step.",
    ),
    Claim(
        notes="the more boxes, the closer to the truth (on Quest, 3.1).",
        of=f"mass read with four boxes less that with one, both at {MOST}",
        number=gain("four boxes", at=MOST),
        claimed=at_least(0),
        so="four boxes pay for their bytes: {}.",
        form="+.1%",
        if_not="four boxes cost a quarter of full attention's bytes before a page is read, and then read less of the mass ({}).",
    ),
    Claim(
        notes="boxes of clusters can be tighter than boxes of neighbours (on Quest, 3.1).",
        of="slack of two clustered boxes less that of two in order, in scaled logits",
        number=lambda f: f("slack", "two boxes, clustered", "128 tokens") - f("slack", "two boxes", "128 tokens"),
        claimed=at_most(0),
        so="clusters are tighter than neighbours: {} in scaled logits.",
        if_not="clusters are no tighter than neighbours: {}.",
        form="+.2f",
    ),
    Claim(
        notes="boxes of neighbours come to the same as smaller pages (on Quest, 3.1).",
        of=f"mass read with pages of 8 less that with two boxes in order, at {USUAL}: as many boxes, and pages half the size",
        number=gain("pages of 8", "two boxes"),
        claimed=(-0.01, 0.01),
        so="two boxes in order and pages of half the size read the same mass within a point.",
        form="+.1%",
        if_not="pages of half the size read {} more than two boxes in order: a box that wins brings its own 8 tokens, not 16.",
    ),
    Claim(
        notes="turning the axes may shrink the boxes; some other turn makes them looser (on Quest, 3.1).",
        of="slack of boxes along principal axes over that along the model's own",
        number=lambda f: f("slack", "principal axes", "128 tokens") / f("slack", "one box", "128 tokens"),
        claimed=at_most(1),
        so="principal axes shrink the slack to {} of what it is.",
        if_not="principal axes do not shrink the slack ({}).",
        form=".2f",
    ),
    Claim(
        notes="and the price is the turning of keys and queries; whether reading gains is open (on Quest, 3.1).",
        of=f"mass read along principal axes less that along the model's own, at {USUAL}",
        number=gain("principal axes"),
        claimed=None,
        form="+.1%",
        so="at equal bytes boxes along principal axes read {} of the mass against boxes along the model's own.",
    ),
    Claim(
        notes="summaries in fewer bits save bandwidth, and a bound that is rounded outward stays a bound and gets looser (on Quest, 3).",
        of=f"mass read with boxes in 8 bits less that in 16, at {USUAL}",
        number=gain("one box in fp8"),
        claimed=at_least(0),
        so="8 bits pay: {} of the mass more, half the index.",
        form="+.1%",
        if_not="8 bits do not pay ({}), although the index is half the size.",
    ),
    Claim(
        notes="what is tighter than min and max costs more bytes of index (on Quest, 1.1).",
        of=f"mass read by a box as wide as keys stray on average (ArkVale's) less that by one box, at {USUAL}: as many numbers, no bound",
        number=gain("mean width"),
        claimed=at_most(0),
        so="a box as wide as keys stray on average, which is no bound, ranks no better ({}).",
        form="+.1%",
        if_not="a box as wide as keys stray on average reads more of the mass ({}): to rank, a bound is not the best use of its bytes.",
    ),
]
AT = [f"{s:.0%}" for s in SHARES]


def _bytes(frame: pl.DataFrame) -> object:
    y = {"mass recall": axis("dense mass read", 0, 1, ".0%"), "output error": axis("output error (relative L2)", log=True)}
    styles = styled(list(POLICIES))
    return sweep(frame, y, "bytes read, of full attention's", styles, "Mass and error at equal bytes.", AT)


def _slack(frame: pl.DataFrame) -> object:
    mine = frame.drop_nulls("value").with_columns(at=pl.col("line"), line=pl.lit("slack"))
    y = {"slack": axis("slack, mean of pages (scaled logits)", 0)}
    return sweep(mine, y, "summary of a page of 16", styled(["slack"]), "Slack by summary.", joined=False)


ALSO = "Not drawn: full attention, all of the bytes and no error."
QUESTION = Question(
    name="summaries",
    title="Do better summaries pay for their bytes?",
    lead="More boxes, smaller pages, other shapes, turned axes, fewer bits: every summary ranks the same pages, and what it takes to "
    "scan is billed beside the rows that it lets a step read.",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "bytes",
            "What do better summaries buy at equal bytes?",
            "Across: rows of the pages that a kv head's query heads read together, and the summaries scanned, as a share of what full attention "
            f"reads. Pages of 16 but for one line. {ALSO}",
            ["mass recall", "output error"],
            _bytes,
        ),
        Chart(
            "slack",
            "How loose is each?",
            f"Scores less the page's best logit; what is no bound may lie below it. {ALSO} Nor the oracle, whose scores are the truth.",
            ["slack"],
            _slack,
        ),
    ],
    cells=(*SHORT, WIDE),
    labels=list(POLICIES),
)
