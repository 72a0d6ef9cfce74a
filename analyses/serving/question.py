"""Serving: what eviction frees of pages that beams share, what a batch reads of them, drafts that are verified or taken back, and devices."""

from __future__ import annotations

import polars as pl

from analyses.contexts import Context
from analyses.figures import Claim, at_least, at_most, mean, rows, share
from analyses.panels import axis, styled, sweep
from analyses.question import SHORT, Chart, Question
from kvsim.metrics.run import open_run
from kvsim.metrics.shards import by_heads
from kvsim.metrics.sharing import batch_reads, shared
from kvsim.replay.drafts import drafted, stale_boxes

KEEPS = {
    "h2o": "h2o(hold=share(0.2))",
    "streaming_llm": "streaming_llm(hold=share(0.2))",
    "random tokens": "random_keep(hold=share(0.2))",
}
READER = "quest(read=tokens(128))"
PAGE, BLOCK = 16, 4
BEAMS = (8, 40, 72, 104)  # one request after so many steps each: branches over its prompt
FREED = "freed of what is dropped"
SETS = {"position": "of its own", "first": "of the first", "block": "of the block"}


def measure(context: Context) -> pl.DataFrame:
    layers, request = context.inner[-1:], context.trace.requests[0]
    steps = [s for s in BEAMS if s < request.total - request.prompt]
    prefix = request.prompt // PAGE * PAGE
    beams = [(request.id, s) for s in steps]
    kept = context.replay(KEEPS, layers=layers, steps=steps)
    read = context.replay({"quest": READER}, layers=layers, steps=steps, plans=True)
    names = pl.DataFrame({"policy": list(kept.ids.values()), "name": list(kept.ids)})
    freed = shared(open_run(kept.run.path), prefix, PAGE, beams).join(names, on="policy")
    reads = batch_reads(open_run(read.run.path), prefix, beams)
    uneven = by_heads(open_run(read.run.path), 3)
    verified = drafted(context.trace, READER, BLOCK, layers=layers)
    stale = stale_boxes(context.trace, PAGE, BLOCK, 2, layers=layers)
    found = [
        rows(
            freed,
            {FREED: share(pl.col("freed_bytes") * pl.col("branches"), "claimed_bytes")},
            line="name",
            at=pl.lit("by all beams"),
        ),
        rows(
            freed,
            {FREED: share(pl.col("freed_alone_bytes") * pl.col("branches"), "claimed_bytes")},
            "name",
            pl.lit("by one alone"),
        ),
        rows(reads, {"read once": share("distinct_pages", "read_pages")}, line=pl.lit("quest")),
        rows(uneven, {"busiest device": mean("page_imbalance")}, line=pl.lit("quest")),
        rows(
            verified,
            {"mass read by a draft": mean("mass_recall"), "pages of a block": mean("union_pages")},
            line=pl.lit("quest"),
            at=pl.col("sets").replace_strict(SETS),
        ),
        rows(stale, {"boxes too wide": share("stale_pages", "pages")}, line=pl.lit("quest")),
    ]
    return pl.concat(found).with_columns(role=pl.lit(context.mostly))


CLAIMS = [
    Claim(
        notes="evicting gives slots back (on reading and evicting, 2; that pages keep holes is our addition).",
        of="bytes of whole pages that h2o gives back, of the rows that it drops of a prompt, pages of 16",
        number=lambda f: f(FREED, "h2o", "by one alone"),
        claimed=at_least(0.5),
        so="as whole pages, h2o gives back {} of what it drops.",
        if_not="as whole pages, h2o gives back {} of what it drops: it leaves holes, and a pool of pages has to move rows before it gains "
        "what a budget says.",
        form=".0%",
    ),
    Claim(
        notes="a window of recent tokens leaves whole pages (the same).",
        of="bytes of whole pages that streaming_llm gives back, of the rows that it drops",
        number=lambda f: f(FREED, "streaming_llm", "by one alone"),
        claimed=at_least(0.5),
        so="and streaming_llm {}.",
        if_not="and streaming_llm {}.",
        form=".0%",
    ),
    Claim(
        notes="beams that share pages give one back only when none needs it (on Quest, 1.2).",
        of="what four beams of h2o give back together, over what one alone would",
        number=lambda f: f(FREED, "h2o", "by all beams") / f(FREED, "h2o", "by one alone"),
        claimed=None,
        so="four beams, forked along one answer, give back {} of what one would: what goes is decided by the cut after the prompt, which "
        "they share.",
        form=".0%",
    ),
    Claim(
        notes="a prefix page that several requests choose may be read once for all; their choices are their own (on Quest, 1.2 and 3).",
        of="distinct pages that four beams read in a step, of those that they read",
        number=lambda f: f("read once", "quest"),
        claimed=at_most(1),
        so="of the pages that four beams choose, {} are distinct: one load for all would save the rest.",
        form=".0%",
    ),
    Claim(
        notes="the pages of a draft's first token are no set for the whole block (on Quest, 1.2).",
        of=f"mass read with each draft's own pages, less that with those of the first of {BLOCK}",
        number=lambda f: f("mass read by a draft", "quest", "of its own") - f("mass read by a draft", "quest", "of the first"),
        claimed=at_least(0),
        so="with the pages of the first draft, {} of the mass is lost.",
        if_not="with the pages of the first draft no mass is lost.",
        form="+.1%",
    ),
    Claim(
        notes="one set for a block is an approximation of its own (on Quest, 1.2).",
        of="pages that a block loads when it has one set, over those when every draft has its own",
        number=lambda f: f("pages of a block", "quest", "of the block") / f("pages of a block", "quest", "of its own"),
        claimed=None,
        so="one set by the largest score of the block loads {} of the pages.",
        form=".0%",
    ),
    Claim(
        notes="after drafts are taken back inside a page its box still covers them (on Quest, 3).",
        of=f"of the pages that decoding wrote to, those whose box is too wide when 2 of {BLOCK} drafts are taken back and nothing is "
        "scanned again",
        number=lambda f: f("boxes too wide", "quest"),
        claimed=at_least(0.5),
        so="{} of the pages that decoding wrote to keep a box that is too wide.",
        if_not="{} of the pages that decoding wrote to keep a box that is too wide.",
        form=".0%",
    ),
    Claim(
        notes="devices that share a layer by heads may choose their own pages (on Quest, 2.1).",
        of="pages of the busiest of three devices over the mean",
        number=lambda f: f("busiest device", "quest"),
        claimed=None,
        so="the busiest of three devices, a kv head each, reads {} times the mean: that is what sharing by heads waits for.",
        form=".2f",
    ),
]


def _freed(frame: pl.DataFrame) -> object:
    y = {FREED: axis("given back, of the bytes dropped", 0, 1, ".0%")}
    return sweep(
        frame,
        y,
        "given back",
        styled(list(KEEPS)),
        "What eviction gives back of shared pages.",
        ["by one alone", "by all beams"],
        joined=False,
    )


def _drafts(frame: pl.DataFrame) -> object:
    y = {"mass read by a draft": axis("dense mass read", 0, 1, ".0%"), "pages of a block": axis("pages loaded for a block", 0)}
    return sweep(
        frame, y, "pages", styled(["quest"]), "Three ways to choose the pages of drafts.", list(SETS.values()), joined=False
    )


QUESTION = Question(
    name="serving",
    title="Pages in a serving system",
    lead="In a server requests share pages, drafts are taken back and a layer lies on several devices. What is a policy's decision worth there?",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "freed",
            "What does eviction give back?",
            "A fifth of the tokens is held, pages of 16 over a shared prompt. Not drawn: full attention, which drops nothing, and the "
            "oracle of keeping, which no server has.",
            [FREED],
            _freed,
        ),
        Chart(
            "drafts",
            "Which pages for a block of drafts?",
            f"Blocks of {BLOCK}, 8 pages each. Not drawn: full attention, which reads all pages, and the oracle, which no draft can ask.",
            ["mass read by a draft", "pages of a block"],
            _drafts,
        ),
    ],
    labels=list(KEEPS),
    cells=(SHORT[0], SHORT[2]),
)
