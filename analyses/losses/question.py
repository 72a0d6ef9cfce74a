"""Where is the loss? Oracles between full attention and a chain blame the budget, eviction or the index; and what pools of slots are worth."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from analyses.contexts import Context, Tables
from analyses.figures import Claim, Draws, Figures, at_least, mean, rows
from analyses.measures import lost
from analyses.panels import axis, styled, sweep
from analyses.question import Chart, Question

HELD, READ, SLOTS = 0.3, 128, 0.2
READER = f"quest(read=tokens({READ}))"
KEEPS = {
    "everything": "",
    "h2o": f"h2o(hold=share({HELD})) >> ",
    "QEvict": f"qevict(hold=share({HELD})) >> ",
    "streaming_llm": f"streaming_llm(hold=share({HELD})) >> ",
    "oracle of keeping": f"oracle_keep(hold=share({HELD})) >> ",
    "random tokens": f"random_keep(hold=share({HELD})) >> ",
}
EXPLAINED = ("h2o", "QEvict")
POOLS = {
    "recent": f"streaming_llm(hold=share({SLOTS}))",
    "heavy": f"h2o(hold=share({SLOTS}), recent=0)",
    "heavy + recent": f"h2o(hold=share({SLOTS}))",
    "heavy + recent + sinks": f"pools(hold=share({SLOTS}))",
    "all three + evidence": f"pools(hold=share({SLOTS}), pinned='evidence')",
    "oracle": f"oracle_keep(hold=share({SLOTS}))",
    "random": f"random_keep(hold=share({SLOTS}))",
}
LEVELS = {  # what a level gives up of the mass, and of the error
    "budget": (1 - pl.col("oracle_recall"), pl.col("oracle_rel_l2")),
    "evicted": (pl.col("oracle_recall") - pl.col("oracle_held_recall"), pl.col("oracle_held_rel_l2") - pl.col("oracle_rel_l2")),
    "coded": (pl.lit(0.0), pl.coalesce("oracle_coded_rel_l2", "oracle_held_rel_l2") - pl.col("oracle_held_rel_l2")),
    "index": (
        pl.col("oracle_held_recall") - pl.col("mass_recall"),
        pl.col("rel_l2") - pl.coalesce("oracle_coded_rel_l2", "oracle_held_rel_l2"),
    ),
}


def measure(context: Context) -> pl.DataFrame:
    some = context.inner[-1:]
    chains = {name: keep + READER for name, keep in KEEPS.items()}
    run = context.replay(chains, layers=some)
    seen = context.replay({name: chains[name] for name in EXPLAINED}, layers=some, explain=True)
    there = any(r.evidence for r in context.trace.requests)
    pools = {name: p for name, p in POOLS.items() if there or "evidence" not in p}
    kept = context.replay(pools, layers=some)
    return pl.concat(
        [decomposed(run, 0), decomposed(seen, 1), lost(run("heads"), at=pl.lit("chain")), lost(kept("heads"), at=pl.lit("pools"))]
    )


def decomposed(run: Tables, of: int) -> pl.DataFrame:
    """Rows of what every level loses: of the mass (0), or of the output error (1), in that order; they sum to all that is lost."""
    figure = ("mass lost", "error added")[of]
    heads = run("heads").with_columns(pl.selectors.float().cast(pl.Float64))
    return pl.concat([rows(heads, {figure: mean(parts[of])}, at=pl.lit(level)) for level, parts in LEVELS.items()])


def lost_by(level: str, chain: str, figure: str = "mass lost") -> Callable[[Figures], Draws]:
    return lambda f: f(figure, chain, level)


def part(level: str, chain: str, figure: str = "mass lost") -> Callable[[Figures], Draws]:
    """Of all that a chain loses, what one level does."""
    return lambda f: f(figure, chain, level) / sum(f(figure, chain, x) for x in LEVELS)


def pooled(one: str, other: str) -> Callable[[Figures], Draws]:
    """Output error of one way to spend the slots over another's."""
    return lambda f: f("output error", one, "pools") / f("output error", other, "pools")


CLAIMS = [
    Claim(
        notes="evicting first and reading a part of the rest does not unite what is good of both (on reading and evicting, 3).",
        of="mass read by quest over everything, less that by quest over what h2o held",
        number=lambda f: f("mass recall", "everything", "chain") - f("mass recall", "h2o", "chain"),
        claimed=at_least(0),
        so="behind h2o, the same reads find {} of the mass less.",
        if_not="behind h2o the same reads find no less.",
    ),
    Claim(
        notes="because what the first level deletes by mistake the second cannot find (on reading and evicting, 3).",
        of="of the mass that h2o >> quest loses beyond quest alone, what eviction took from an oracle's reads",
        number=lambda f: (
            f("mass lost", "h2o", "evicted") / (f("mass recall", "everything", "chain") - f("mass recall", "h2o", "chain"))
        ),
        claimed=at_least(0.5),
        so="most of what the chain loses beyond quest alone is what was evicted.",
        if_not="only {} of what the chain loses beyond quest alone was evicted: an oracle would still find the rest in what is held; the "
        "index, which ranks a page by its best key however few keys it holds, does not.",
        form=".0%",
    ),
    Claim(
        notes="indexes on two levels cost twice (on reading and evicting, 3; what it does to recall is left open).",
        of="mass that the index loses behind h2o, over what it loses with everything held",
        number=lambda f: f("mass lost", "h2o", "index") / f("mass lost", "everything", "index"),
        claimed=None,
        so="the index loses {} times as much behind h2o as over everything.",
        form=".1f",
    ),
    Claim(
        notes="where a reading policy loses is to be told by oracles (on reading and evicting, 3).",
        of="of the mass that quest alone loses, what the budget would lose with the best pages",
        number=part("budget", "everything"),
        claimed=None,
        so="of what quest alone loses, {} is the budget's: the best pages would lose it, too.",
        form=".0%",
    ),
    Claim(
        notes="a tier of codes loses less than eviction before the same reads (on QEvict, 3).",
        of="mass read behind QEvict, less that behind h2o",
        number=lambda f: f("mass recall", "QEvict", "chain") - f("mass recall", "h2o", "chain"),
        claimed=at_least(0),
        so="behind QEvict the same reads find {} of the mass more than behind h2o.",
        if_not="behind QEvict the same reads find no more than behind h2o.",
    ),
    Claim(
        notes="what codes add to the error is told by an oracle that reads rows as stored (left open).",
        of="of the output error of QEvict >> quest, what codes add",
        number=part("coded", "QEvict", "error added"),
        claimed=None,
        so="codes add {} of the output error of QEvict >> quest; the rest is the budget's, the index's and eviction's.",
    ),
    Claim(
        notes="heavy hitters find what a window of recent tokens cannot (on reading and evicting, 2).",
        of="output error of recent tokens alone over that of heavy hitters and recent tokens, as many slots",
        number=pooled("recent", "heavy + recent"),
        claimed=at_least(1),
        so="recent tokens alone have {} times the error of heavy hitters and recent ones.",
        if_not="recent tokens (with 4 sinks) have {} times the error of heavy hitters and recent ones: hardly anything but sinks and "
        "recent text is read here.",
        form=".2f",
    ),
    Claim(
        notes="pools may be steadier than one pool with as many slots (on reading and evicting, 5).",
        of="output error of heavy hitters alone over that of heavy hitters, recent tokens and sinks",
        number=pooled("heavy", "heavy + recent + sinks"),
        claimed=at_least(1),
        so="one pool of heavy hitters has {} times the error of three pools.",
        if_not="one pool of heavy hitters has {} times the error of three pools.",
        form=".2f",
    ),
    Claim(
        notes="and each further pool takes freedom from the others (on reading and evicting, 5).",
        of="output error with half the slots for recent tokens over that with 32",
        number=pooled("heavy + recent", "heavy + recent + sinks"),
        claimed=None,
        so="half of the slots for recent tokens, instead of 32 slots, gives {} times the error: how the slots are dealt matters more than "
        "how many pools there are.",
        form=".2f",
    ),
    Claim(
        notes="anchors that the task names can have slots of their own (on reading and evicting, 5).",
        of="part of the attention on the evidence that is read with slots for it, less that without",
        number=lambda f: (
            f("evidence recall", "all three + evidence", "pools") - f("evidence recall", "heavy + recent + sinks", "pools")
        ),
        claimed=at_least(0),
        so="with its own slots {} more of the attention on the evidence is read.",
        if_not="slots of its own bring no more of the evidence.",
        cells="needle",
    ),
]
LOST = f"Chains hold {HELD:.0%} of the tokens and quest reads {READ} of them, whole pages of 16."
PARTS = list(LEVELS)


def _mass(frame: pl.DataFrame) -> object:
    y = {"mass lost": axis("dense mass lost", 0, form=".0%")}
    return sweep(frame, y, "lost by", styled(list(KEEPS)), "Mass lost by level, a line for each chain.", PARTS, joined=False)


def _error(frame: pl.DataFrame) -> object:
    y = {"error added": axis("output error added (relative L2)", form=".2f")}
    both = [s for s in styled(list(KEEPS)) if s.policy in EXPLAINED]  # as in the chart above
    return sweep(frame, y, "added by", both, "Output error added by level.", PARTS, joined=False)


def _pools(frame: pl.DataFrame) -> object:
    mine = frame.filter(pl.col("at") == "pools").with_columns(at=pl.col("line"), line=pl.lit("slots"))
    y = {
        "mass recall": axis("dense mass within reach", 0, 1, ".0%"),
        "output error": axis("output error (relative L2)", log=True),
        "evidence recall": axis("attention on the evidence read", 0, 1, ".0%"),
    }
    none, said = "hardly any attention on the evidence", "Ways to spend the same slots."
    return sweep(mine, y, "who has the slots", styled(["slots"]), said, list(POOLS), none=none, joined=False)


QUESTION = Question(
    name="losses",
    title="Where is the loss?",
    lead="A chain that evicts and then reads a part of the rest can lose in three places: the budget is too small for anyone, what is "
    "wanted was evicted, or the "
    "index chose other pages. Oracles in between tell them apart.",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "mass", "Which level loses the mass?", f"{LOST} Not drawn: full attention, which loses nothing.", ["mass lost"], _mass
        ),
        Chart(
            "error",
            "And which adds the error?",
            f"{LOST} A level may take error away: budget is the oracle's error. Not drawn: full attention.",
            ["error added"],
            _error,
        ),
        Chart(
            "pools",
            "Who should have the slots?",
            f"{SLOTS:.0%} of the tokens are held and all of them read. Sinks are the first 4 tokens. Not drawn: full attention.",
            ["mass recall", "output error", "evidence recall"],
            _pools,
        ),
    ],
    labels=list(KEEPS),
)
