"""Reading against keeping: what each costs in traffic and in capacity, what a query that nobody foresaw finds, and how a choice ages."""

from __future__ import annotations

from typing import Any

import polars as pl

from analyses.contexts import Context
from analyses.figures import Claim, at_least, at_most, mean, rows, share
from analyses.measures import billed, doubling, lost
from analyses.panels import axis, styled, sweep
from analyses.question import LONG, SHORT, Chart, Question

SHARES = (0.1, 0.2, 0.4)
AT = "20%"
FAMILIES = {
    "quest": "quest(read=share({x}))",
    "h2o": "h2o(hold=share({x}))",
    "streaming_llm": "streaming_llm(hold=share({x}))",
    "snapkv": "snapkv(hold=share({x}))",
    "oracle of reading": "oracle(read=share({x}))",
    "oracle of keeping": "oracle_keep(hold=share({x}))",
    "random tokens": "random_keep(hold=share({x}))",
}
KEPT = {
    "quest, ranked anew": "quest(read=tokens(128))",
    "quest, every 16 steps": "quest(read=tokens(128), refresh=16)",
    "quest, every 64 steps": "quest(read=tokens(128), refresh=64)",
    "quest, once": "quest(read=tokens(128), refresh='never')",
}
ANEW, ONCE = "quest, ranked anew", "quest, once"
RANKED = {"quest": "quest(read=tokens(128))", "oracle": "oracle(read=tokens(128))"}
PAGE, ANCHOR = 16, 0.9  # tokens; of the steps of a role: a page that so many of them read is an anchor
TURNED, ANCHORED = "pages not read before", "reads of anchors"
LATER = 64  # steps


def measure(context: Context) -> pl.DataFrame:
    run = context.replay({f"{name} at {x:.0%}": p.format(x=x) for name, p in FAMILIES.items() for x in SHARES})
    line, at = (pl.col("policy").str.split(" at ").list.get(i) for i in (0, 1))
    heads = context.replay(KEPT)("heads")
    gone = run("heads").filter(pl.col("policy") == f"h2o at {AT}")
    quarter = pl.col("step").rank("dense").over("role") * 4 / (pl.col("step").n_unique().over("role") + 1)
    late = gone.with_columns(at=quarter.floor().cast(pl.Int64) + 1)
    return pl.concat(
        [
            lost(run("heads"), line, at),
            billed(run, line, at),
            aged(heads),
            lost(heads, at=pl.lit("all ages")),
            rows(late, {"mass on evicted tokens": mean("mass_evicted")}, pl.lit("h2o")),
            turned(context),
        ]
    )


def aged(heads: pl.DataFrame) -> pl.DataFrame:
    """Rows of sets by how long ago they were ranked, in doublings; those ranked at every step stand at every age of the first set."""
    age = pl.coalesce(pl.col("set_age"), pl.col("step"))
    old = heads.with_columns(at=doubling(age))
    named = pl.concat([lost(old), rows(old, {"tokens read": mean("read_tokens")})])
    return named.with_columns(figure=pl.format("{} by age", "figure"))


def turned(context: Context) -> pl.DataFrame:
    """Rows of how the pages that are read change: of a step's that were there so many steps before, those that were not read then; and of
    all reads in a role, those of pages that nearly every step of it reads. Pages that every step must read are left out."""
    run = context.replay(RANKED, plans=True)
    of = ["request", "policy", "layer", "q_head"]
    each = run("plans").select("role", *of, "step", pages=pl.col("pages").list.set_difference("forced"))
    prompt = pl.col("request").replace_strict({r.id: r.prompt for r in context.trace.requests}, return_dtype=pl.Int64)
    pairs = each.join(each.drop("role"), on=of, suffix="_before", maintain_order="left_right").filter(
        pl.col("step") > pl.col("step_before")
    )
    pairs = pairs.explode("pages").filter(pl.col("pages") < (prompt + pl.col("step_before")) // PAGE)
    moved = pairs.with_columns(
        at=doubling(pl.col("step").cast(pl.Int64) - pl.col("step_before")), new=~pl.col("pages").is_in(pl.col("pages_before"))
    )
    steps = each.group_by("role", *of).agg(steps=pl.col("step").n_unique())
    often = each.explode("pages").drop_nulls("pages").group_by("role", *of, "pages").agg(reads=pl.len().cast(pl.Int64))
    often = often.join(steps, on=["role", *of]).sort("role", *of, "pages")
    anchored = pl.col("reads") * (pl.col("reads") >= ANCHOR * pl.col("steps"))
    return pl.concat([rows(moved, {TURNED: mean("new")}), rows(often, {ANCHORED: share(anchored, "reads")}, at=pl.lit(""))])


def over(figure: str, one: str, other: str) -> Any:
    return lambda f: f(figure, one, AT) - f(figure, other, AT)


def old(figure: str) -> Any:
    """A set kept for good less one ranked anew, at the oldest ages that the cell has."""

    def found(f: Any) -> Any:
        at = max(f.places(figure, ONCE), key=int)
        return f(figure, ONCE, at) - f(figure, ANEW, at)

    return found


CLAIMS = [
    Claim(
        notes="what is read tells nothing of what is held: reading a part saves no capacity (on reading and evicting, opening and 1).",
        of=f"bytes that quest holds on the device, of the full cache's, while it reads {AT} of the tokens",
        number=lambda f: f("bytes resident", "quest", AT),
        claimed=at_least(1),
        so="quest holds {} of the full cache: all of it, and an index.",
        if_not="quest holds {} of the full cache.",
    ),
    Claim(
        notes="heads of a group each read their own pages; evicting bounds traffic and capacity alike (on reading and evicting; on Quest, 2.1).",
        of=f"bytes read by quest over bytes read by h2o, both at {AT}",
        number=lambda f: f("bytes read", "quest", AT) / f("bytes read", "h2o", AT),
        claimed=at_least(1),
        so="at the same budget quest reads {} times the bytes of h2o: the union of a group's pages, and the index.",
        if_not="at the same budget quest reads no more bytes than h2o ({}).",
        form=".2f",
    ),
    Claim(
        notes="what was never needed may be needed suddenly, and what was evicted cannot be found again (on reading and evicting, 2 and 5).",
        of=f"evidence read by quest less that read by h2o, when a question turns to it, both at {AT}",
        number=over("evidence recall", "quest", "h2o"),
        claimed=at_least(0),
        so="a question that turns to the evidence finds {} of it more by reading than by keeping heavy hitters.",
        form="+.1%",
        if_not="a question finds no more of the evidence by reading than by keeping heavy hitters ({}).",
        cells="answer",
    ),
    Claim(
        notes="queries that stay with one subject favour heavy hitters (on reading and evicting, 5).",
        of=f"output error of h2o less that of quest in text that goes on, both at {AT}",
        number=over("output error", "h2o", "quest"),
        claimed=at_most(0),
        so="in text that goes on h2o errs less than quest at the same budget ({}).",
        if_not="even in text that goes on h2o errs more than quest at the same budget ({}).",
        form="+.3f",
        cells="forced text",
    ),
    Claim(
        notes="a score of the past lags behind: an oracle would keep other tokens (on reading and evicting, 2).",
        of=f"dense mass within reach of an oracle of keeping less that of h2o, both at {AT}",
        number=over("mass recall", "oracle of keeping", "h2o"),
        claimed=at_least(0),
        so="who knew the future would keep {} of the mass more in as many slots.",
        form="+.1%",
        if_not="h2o keeps what an oracle would ({}).",
    ),
    Claim(
        notes="errors of eviction may pile up over tens to hundreds of steps (on reading and evicting, 4).",
        of=f"mass on evicted tokens in the last quarter of the steps less that in the first, h2o at {AT}",
        number=lambda f: f("mass on evicted tokens", "h2o", 4) - f("mass on evicted tokens", "h2o", 1),
        claimed=at_least(0),
        so="what is missed grows: {} of the mass more in the last quarter of the steps than in the first.",
        form="+.1%",
        if_not="what is missed does not grow over these steps ({}): the share of recent text grows, too.",
    ),
    Claim(
        notes="a first step flatters a set of candidates that is kept: it ages (on reading and evicting, 4).",
        of="mass read by a set chosen once less that by one chosen anew, when it is oldest",
        number=old("mass recall by age"),
        claimed=at_most(0),
        so="a set of pages that is kept for good reads less of the mass when it is oldest ({}).",
        form="+.1%",
        if_not="a set that is kept for good reads more of the mass as it ages ({}), not less: every page that began since joins it.",
    ),
    Claim(
        notes="and candidates move with what the answer is about (on reading and evicting, 4).",
        of="evidence read by a set chosen once less that by one chosen anew, over all steps",
        number=lambda f: f("evidence recall", ONCE, "all ages") - f("evidence recall", ANEW, "all ages"),
        claimed=at_most(0),
        so="what a set that is kept loses is the evidence ({} of it).",
        form="+.1%",
        if_not="it does not lose the evidence ({}).",
        cells="answer",
    ),
    Claim(
        notes="how fast candidates turn over is not said.",
        of=f"of the pages that quest reads and that were there {LATER} to {2 * LATER - 1} steps before, those that it did not read then",
        number=lambda f: f(TURNED, "quest", LATER),
        claimed=None,
        so=f"{{}} of the pages that quest reads it did not read {LATER} to {2 * LATER - 1} steps before.",
        form=".0%",
    ),
    Claim(
        notes="nor how many of them are anchors, which every query wants.",
        of=f"of the pages that quest reads, those that it reads at {ANCHOR:.0%} of the role's steps or more",
        number=lambda f: f(ANCHORED, "quest"),
        claimed=None,
        so="{} of what it reads are pages that nearly every step reads.",
        form=".0%",
    ),
]


def _budget(frame: pl.DataFrame) -> object:
    y = {
        "bytes read": axis("bytes read, of full attention's", 0, None, ".0%"),
        "bytes resident": axis("bytes on the device, of the full cache's", 0, None, ".0%"),
        "mass recall": axis("dense mass read", 0, 1, ".0%"),
        "output error": axis("output error (relative L2)", log=True),
        "evidence recall": axis("attention on the evidence that was read", 0, 1, ".0%"),
    }
    said = "Traffic, capacity and what they buy, by budget."
    return sweep(
        frame, y, "budget, of the visible tokens", styled(list(FAMILIES)), said, [f"{x:.0%}" for x in SHARES], none=NOTHING
    )


def _age(frame: pl.DataFrame) -> object:
    y = {
        "mass recall by age": axis("dense mass read", 0, 1, ".0%"),
        "output error by age": axis("output error (relative L2)", 0),
        "evidence recall by age": axis("attention on the evidence that was read", 0, 1, ".0%"),
        "tokens read by age": axis("tokens read per query head", 0, None, ",.0f"),
    }
    places = sorted(frame["at"].unique(), key=int)
    return sweep(
        frame, y, "steps since the set was ranked (from)", styled(list(KEPT)), "By the age of a set.", places, none=NOTHING
    )


def _gone(frame: pl.DataFrame) -> object:
    y = {"mass on evicted tokens": axis("dense mass on evicted tokens", 0, None, ".0%")}
    return sweep(frame, y, "quarter of the steps", styled(["h2o"]), "Mass on evicted tokens over time.", ["1", "2", "3", "4"])


def _turned(frame: pl.DataFrame) -> object:
    y = {TURNED: axis("pages read, not read so many steps before", 0, 1, ".0%")}
    places = sorted(frame["at"].unique(), key=int)
    return sweep(frame, y, "steps before (from)", styled(list(RANKED)), "How fast the pages that are read turn over.", places)


NOTHING = "hardly any attention on the evidence"
ALSO = "Not drawn: full attention, all of the bytes, all of the mass and no error."
QUESTION = Question(
    name="reading",
    title="Reading against keeping",
    lead="Reading a part of a cache that is held whole saves traffic; keeping a part saves capacity, too, and cannot be taken back. "
    "What do both cost, what do they miss, and for how long is a choice good?",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "budget",
            "What do traffic and capacity buy?",
            "Quest and the oracle of reading hold everything and read the budget's pages of 16; the others keep the budget's tokens and read "
            "all of them, so that in the second row they lie on one another. Snapkv cuts the prompt alone: what is decoded comes on top. "
            f"{ALSO}",
            ["bytes read", "bytes resident", "mass recall", "output error", "evidence recall"],
            _budget,
        ),
        Chart(
            "age",
            "How does a set of pages age?",
            "128 tokens; pages that began since the ranking join the set, so that an old one reads more. Ranked anew: at the steps at which "
            f"the first set is so old. {ALSO} "
            "Nor the oracle, which ranks at every step.",
            [f"{x} by age" for x in ("mass recall", "output error", "evidence recall", "tokens read")],
            _age,
        ),
        Chart(
            "turned",
            "How fast do the pages that are read turn over?",
            "128 tokens, ranked at every step; of pages that were there at both steps. Steps before an answer may lie in the text before it. "
            "The oracle of reading ranks by true mass. Not drawn: full attention, which always reads all of them.",
            [TURNED],
            _turned,
        ),
        Chart(
            "gone",
            "Does eviction miss more and more?",
            f"h2o at {AT}. {ALSO} Nor the oracle of keeping, which is in the first chart.",
            ["mass on evicted tokens"],
            _gone,
        ),
    ],
    cells=(*SHORT, LONG),
    labels=[*FAMILIES, *KEPT],
)
