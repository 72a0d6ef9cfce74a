"""The measurements that QEvict is argued from, in their own set-up: text that goes on for 256 tokens after 512, a fifth of them held."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import polars as pl

import kvsim
from analyses.contexts import Context, Tables, spread
from analyses.figures import Claim, Draws, Figures, at_least, at_most, mean, rows, share
from analyses.panels import axis, styled, sweep
from analyses.qevict.question import AT, GRID, HOLD, LINE, MISSED, THREE, TWO, WINDOWS, less, over, tier
from analyses.question import Chart, Question
from kvsim.metrics.keeping import WHOSE
from kvsim.report.theme import Style

CELL = "plain/notes/smollm2"
CROSSED = {f"{c.line}, {c.window}": c.policy for c in GRID if c.scheme in (TWO, THREE) and c.period == 8}
R1, R2, R3, R4 = f"{TWO}, 1", f"{TWO}, 8", f"{THREE}, 8", f"{THREE}, 32"  # as the notes call them
UNREAD, BEST = f"{THREE}, 8, codes not read", "oracle of eviction"
PUBLISHED = [f"{TWO}, published", f"{THREE}, published"]
TOGETHER = 32  # steps of a point over time
CLASSES = ("full", "coded", "evicted")
SHARES = {
    (TWO, "full"): 0.333,
    (TWO, "evicted"): 0.648,
    (THREE, "full"): 0.197,
    (THREE, "coded"): 0.426,
    (THREE, "evicted"): 0.357,
}
CHURNS = {(TWO, "1"): 0.017, (THREE, "8"): 0.0012, (THREE, "32"): 0.018}  # published, as the shares, of Llama-3.1-8B-Instruct


def measure(context: Context) -> pl.DataFrame:
    layers = spread([x.id for x in context.trace.captured_layers], 2 * context.most)
    run = context.replay(CROSSED, layers=layers, explain=True)
    best = context.replay({BEST: kvsim.oracle_keep(hold=kvsim.share(HOLD))}, layers=layers)
    moves = pl.concat([_moves(run), _again(run)]).with_columns(role=pl.lit(context.mostly))
    return pl.concat([_missed(run), _over_time(run, best), _classes(run), moves])


# ---------------------------------------------------------------------------------------------- rows of one context
GONE, CODED = (pl.col(n).cast(pl.Float64).fill_null(0) for n in ("mass_evicted", "mass_quant"))


def _missed(run: Tables) -> pl.DataFrame:
    return rows(run("heads"), {"missed": mean(GONE), "missed without codes": mean(GONE + CODED)}, line=LINE, at=AT)


def _over_time(run: Tables, best: Tables) -> pl.DataFrame:
    """Mass missed by when it was, in the middle of so many steps; a policy is a line."""
    when = (pl.col("step").cast(pl.Int64) // TOGETHER) * TOGETHER + TOGETHER // 2
    found = {name: frame.with_columns(at=when) for name, frame in (("run", run("heads")), ("best", best("heads")))}
    unread = found["run"].filter(pl.col("policy") == R3)
    return pl.concat(
        [
            *(rows(frame, {"missed by step": mean(GONE)}) for frame in found.values()),
            rows(unread, {"missed by step": mean(GONE + CODED)}, line=pl.lit(UNREAD)),
            rows(found["best"], {"missed": mean(GONE)}, at=pl.lit("")),
        ]
    )


def _classes(run: Tables) -> pl.DataFrame:
    """Dense attention by class: as parts of what lies on neither sinks nor recent tokens, and that as a part of all."""
    unit = ["policy", "request", "layer", "q_head", "step"]
    both = run("by_tier").join(run("heads").select(*unit, "mass_evicted"), on=unit, maintain_order="left")
    mass = {c: pl.col("mass_evicted" if c == "evicted" else f"held_{c}").cast(pl.Float64) for c in CLASSES}
    seen = both.with_columns(**mass, history=pl.sum_horizontal(mass.values()))
    each = [
        rows(seen, {"of the history": share(c, "history")}, line=LINE, at=pl.format("{}, {}", AT, pl.lit(c))) for c in CLASSES
    ]
    return pl.concat([*each, rows(seen, {"protected": mean(1 - pl.col("history"))}, line=LINE, at=AT)])


def _moves(run: Tables) -> pl.DataFrame:
    """Over all cuts of a trace, whatever the role."""
    cuts = run("recurrence").filter(pl.col("set") == "deployed", pl.col("dormancy") == 1)
    churn = {"churn of all that is held": mean("churn_held"), "churn of the full tier": mean("churn_full")}
    joint = run("events").filter(pl.col("kv_head") == pl.col("kv_head").min()).drop("role")
    moved = {"demoted for one promoted": share("windows_demoted", "windows_promoted")}
    return pl.concat([rows(cuts, churn, line=LINE, at=AT), rows(joint.filter(pl.col("policy") == R3), moved, line=LINE, at=AT)])


def _again(run: Tables) -> pl.DataFrame:
    """Recurrence of three tiers with windows of 8, and of the oracles at the same cuts, by how many cuts a window was out."""
    found = run("recurrence").filter(pl.col("policy") == R3).with_columns(pl.col("set").replace_strict(WHOSE))
    figures = {"recurrence": share("returns", "pairs"), "returns": mean("returns")}
    return pl.concat(
        [
            rows(found, figures, line="set", at="dormancy"),
            rows(found.filter(pl.col("dormancy") == 1), {"score cosine": mean("score_cosine")}, line="set"),
        ]
    )


# ---------------------------------------------------------------------------------------------- claims
def part(scheme: str, of: str) -> Callable[[Figures], Draws]:
    return lambda f: f("of the history", scheme, f"8, {of}")


def again(of: str, figure: str = "recurrence") -> Callable[[Figures], Draws]:
    return lambda f: f(figure, WHOSE[of], 1)


HELD, FULL = "churn of all that is held", "churn of the full tier"
CLAIMS = [
    Claim(
        notes="what is neither full nor coded nor evicted is a small local tail, the 2 % that their shares leave of 100 % (on QEvict, 3).",
        of="dense attention on sinks and recent tokens",
        number=tier("protected", THREE),
        claimed=at_most(0.05),
        so="sinks and recent tokens have {} of all attention.",
        if_not="sinks and recent tokens have {} of all attention, which no share below counts: the published ones can only be of the rest, too.",
    ),
    Claim(
        notes="two tiers evict 64.8 % of the attention (on QEvict, 3).",
        of="mass on evicted tokens with two tiers and windows of 8, of that on neither sinks nor recent tokens",
        number=part(TWO, "evicted"),
        claimed=at_least(0.5),
        so="of the rest two tiers evict {} (published: 64.8 %), more than half.",
        if_not="of the rest two tiers evict {} (published: 64.8 %), less than half.",
    ),
    Claim(
        notes="three tiers evict 35.7 % (the same).",
        of="the same with three tiers",
        number=part(THREE, "evicted"),
        claimed=at_most(0.5),
        so="three tiers evict {} (published: 35.7 %), less than half.",
        if_not="three tiers evict {} (published: 35.7 %), more than half.",
    ),
    Claim(
        notes="two tiers keep 33.3 % in full precision, three only 19.7 %.",
        of="mass on full tokens with three tiers over that with two",
        number=over(part(THREE, "full"), part(TWO, "full")),
        claimed=at_most(1),
        so="of what two tiers have in full precision three have {} times as much (published: 0.59).",
        if_not="in full precision three tiers have {} times what two have (published: 0.59).",
        form=".2f",
    ),
    Claim(
        notes="and 42.6 % in codes.",
        of="mass on coded tokens with three tiers, less that on full ones",
        number=less(part(THREE, "coded"), part(THREE, "full")),
        claimed=at_least(0),
        so="codes hold more of it than the full tier, by {} (published: 22.9 %).",
        if_not="codes hold no more of it than the full tier ({}; published: 22.9 %).",
    ),
    Claim(
        notes="what eviction can do at best is not said.",
        of="mass missed by an oracle of eviction over that of two tiers, windows of 8",
        number=over(lambda f: f("missed", BEST), tier("missed", TWO)),
        claimed=None,
        so="an oracle of eviction, which knows all later attention, misses {} times what two tiers miss.",
        form=".2f",
    ),
    Claim(
        notes="nor how codes compare with it.",
        of="mass missed by three tiers over that of an oracle of eviction",
        number=over(tier("missed", THREE), lambda f: f("missed", BEST)),
        claimed=None,
        so="and three tiers {} times what that oracle misses.",
        form=".2f",
    ),
    Claim(
        notes="windows lower what is missed all through decoding: R3 (three tiers, windows of 8) against R1 (tokens; on QEvict, 3).",
        of="mass missed by three tiers with windows of 8 over two tiers with tokens",
        number=over(tier("missed", THREE, 8), tier("missed", TWO, 1)),
        claimed=at_most(1),
        so="R3 misses {} times what R1 misses.",
        if_not="R3 misses {} times what R1 misses.",
        form=".2f",
    ),
    Claim(
        notes="and R4 (windows of 32) against R1.",
        of="mass missed by three tiers with windows of 32 over two tiers with tokens",
        number=over(tier("missed", THREE, 32), tier("missed", TWO, 1)),
        claimed=at_most(1),
        so="R4 misses {} times what R1 misses.",
        if_not="R4 misses {} times what R1 misses.",
        form=".2f",
    ),
    Claim(
        notes="the same with windows alone changed: R2 (two tiers, windows of 8) against R1.",
        of="mass missed by two tiers with windows of 8 over that with tokens",
        number=over(tier("missed", TWO, 8), tier("missed", TWO, 1)),
        claimed=at_most(1),
        so="windows alone lower it to {} times.",
        if_not="but windows alone raise it to {} times: it is the codes that lower it.",
        form=".2f",
    ),
    Claim(
        notes="without its codes R3 misses about as much as R1 and R2 (on QEvict, 3).",
        of="mass on evicted and coded tokens of R3 over that missed by R2",
        number=over(tier("missed without codes", THREE), tier("missed", TWO)),
        claimed=(0.9, 1.25),
        so="were its codes not read, R3 would miss {} times what R2 misses.",
        if_not="were its codes not read, R3 would miss {} times what R2 misses: more than about as much.",
        form=".2f",
    ),
    Claim(
        notes="churn falls from 0.017 (R1) to 0.0012 (R3), more than ten times (on QEvict, 3).",
        of="churn between cuts of all tokens that R3 holds, coded ones too, over R1's",
        number=over(tier(HELD, THREE, 8), tier(HELD, TWO, 1)),
        claimed=at_most(0.1),
        so="of all that is held, R3's churn is {} of R1's (published: 0.07).",
        if_not="of all that is held, R3's churn is {} of R1's (published: 0.07), not a tenth.",
        form=".2f",
    ),
    Claim(
        notes="and is as high as R1's again with windows of 32 (R4: 0.018).",
        of="the same churn of R4 over R3's",
        number=over(tier(HELD, THREE, 32), tier(HELD, THREE, 8)),
        claimed=at_least(1),
        so="R4's is {} times R3's (published: 15).",
        if_not="R4's is {} times R3's (published: 15).",
        form=".2f",
    ),
    Claim(
        notes="and it is windows that lower it.",
        of="the same churn of R2 over R1's",
        number=over(tier(HELD, TWO, 8), tier(HELD, TWO, 1)),
        claimed=at_most(1),
        so="windows alone lower it, too (R2 to R1: {} times).",
        if_not="windows alone do not lower it (R2 to R1: {} times).",
        form=".2f",
    ),
    Claim(
        notes="the same of the full tier, which they may mean instead.",
        of="churn between cuts of R3's full tokens over R1's",
        number=over(tier(FULL, THREE, 8), tier(FULL, TWO, 1)),
        claimed=at_most(0.1),
        so="of full tokens alone, R3's churn is {} of R1's.",
        if_not="of full tokens alone R3's churn is {} times R1's: few windows have such a place, and each that changes counts for more.",
        form=".2f",
    ),
    Claim(
        notes="recurrence is 6.18 % online and 0.98 % by an oracle: what matters hardly changes, and decisions are noisier (on QEvict, 3).",
        of="of (window, cut) pairs out of the full tier, those back at the next cut, less those of an oracle by all attention so far",
        number=less(again("deployed"), again("oracle")),
        claimed=at_least(0),
        so="a window that lost its place comes back more often than an oracle's by all attention so far.",
        if_not="a window that lost its place comes back less often ({}) than an oracle's by all attention so far.",
        form="+.1%",
    ),
    Claim(
        notes="the same, by how many come back at the same cuts: six times as many.",
        of="returns to the full tier over those of that oracle",
        number=over(again("deployed", "returns"), again("oracle", "returns")),
        claimed=at_least(1),
        so="but it has {} times as many returns (published: 6.3, if both rates are of the same cuts and windows).",
        if_not="and it has {} times as many returns (published: 6.3, if both rates are of the same cuts and windows).",
        form=".2f",
    ),
    Claim(
        notes="the same, by an oracle that ranks what mattered since the last cut: they do not say which.",
        of="recurrence online, less that of an oracle by attention since the last cut",
        number=less(again("deployed"), again("oracle_interval")),
        claimed=at_least(0),
        so="and more often than an oracle's by attention since the last cut.",
        if_not="and less often ({}) than an oracle's by attention since the last cut.",
        form="+.1%",
    ),
    Claim(
        notes="recurrence online itself, 6.18 %.",
        of="of (window, cut) pairs out of the full tier, those back at the next cut",
        number=again("deployed"),
        claimed=None,
        so="recurrence online is {} (published: 6.18 %).",
    ),
    Claim(
        notes="windows are demoted clearly more often than promoted (on QEvict, 3).",
        of="windows demoted for one that is promoted, R3",
        number=lambda f: f("demoted for one promoted", THREE, 8),
        claimed=at_least(1),
        so="{} windows are demoted for one that is promoted.",
        if_not="{} windows are demoted for one that is promoted.",
        form=".2f",
    ),
    Claim(
        notes="scores by codes agree with those by full keys, cosine 0.9824 (on QEvict, 3).",
        of="cosine of the attention that windows get with keys as decoded and as captured",
        number=lambda f: f("score cosine", WHOSE["deployed"]),
        claimed=at_least(0.98),
        so="scores by codes agree with those by full keys, cosine {}.",
        if_not="scores by codes agree with those by full keys to a cosine of {}.",
        form=".4f",
    ),
]


# ---------------------------------------------------------------------------------------------- charts
def _curves(frame: pl.DataFrame) -> object:
    names = [R1, R2, R3, R4, UNREAD, BEST]
    mine = frame.filter(pl.col("line").is_in(names))
    return sweep(mine, {"missed by step": MISSED}, "decode step", styled(names), "Missed mass over time.", numeric=True)


def published(frame: pl.DataFrame, figure: str, numbers: Mapping[tuple[str, str], float]) -> pl.DataFrame:
    """With published numbers by (line, place), which have no interval, beside those of each cell."""
    said = [
        {"cell": cell, "contexts": n, "figure": figure, "line": f"{line}, published", "at": at, "value": x}
        for cell, n in frame.select("cell", "contexts").unique(maintain_order=True).iter_rows()
        for (line, at), x in numbers.items()
    ]
    return pl.concat([frame, pl.DataFrame(said)], how="diagonal_relaxed")


def _paired() -> list[Style]:
    """Each scheme and what is published of it: one colour, two shapes."""
    ours = styled([TWO, THREE])
    return styled([TWO, THREE, *PUBLISHED], **{f"{s.policy}, published": (s.colour, s.dash) for s in ours})


def _parts(frame: pl.DataFrame) -> object:
    mine = frame.filter(pl.col("at").str.starts_with("8, ")).with_columns(pl.col("at").str.strip_prefix("8, "))
    mine = mine.filter((pl.col("line") == THREE) | (pl.col("at") != "coded"))
    y = {"of the history": axis("dense attention, of that on the history", 0, 1, ".0%")}
    both = published(mine, "of the history", SHARES)
    return sweep(both, y, "where the token is", _paired(), "Attention by tier.", CLASSES, joined=False)


def _churn(frame: pl.DataFrame) -> object:
    y = {
        HELD: axis("churn of all that is held, a cut", 0, form=".1%"),
        FULL: axis("churn of the full tier, a cut", 0, form=".0%"),
    }
    both = published(frame, HELD, CHURNS)
    return sweep(both, y, "window (tokens)", _paired(), "Churn by windows.", [str(n) for n in WINDOWS])


def _recurrence(frame: pl.DataFrame) -> object:
    y = {
        "recurrence": axis("of windows that are out, back at a cut", 0, form=".0%"),
        "returns": axis("returns, of a layer", 0, form=".1f"),
    }
    return sweep(frame, y, "out for at least (cuts)", styled(list(WHOSE.values())), "Recurrence.", ["1", "4", "16"])


ALIKE = f"Budgets are {HOLD:.0%} of the visible tokens, 5 of them sinks and 32 the most recent; a cut every 8 steps."
QUESTION = Question(
    name="diagnosis",
    title="QEvict's diagnosis, in the notes' own set-up",
    lead="512 tokens and 256 more, a fifth of them held: what eviction misses, how stable the choice is, what comes back. The published "
    "numbers are of Llama-3.1-8B-Instruct, with heads of 128 channels; these are of SmolLM2-135M-Instruct, with 64.",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "over_time",
            "How much is missed, and when?",
            f"{ALIKE} “3 tiers, 8” has windows of 8 tokens. The notes' R1 to R4 are: 2 tiers, 1; 2 tiers, 8; 3 tiers, 8; 3 tiers, 32. A "
            f"point is the mean of {TOGETHER} steps. Not drawn: full attention, which misses nothing, and the notes' curves, of which there "
            "are no numbers.",
            ["missed by step"],
            _curves,
        ),
        Chart(
            "tiers",
            "Where does the attention lie?",
            f"{ALIKE} Windows of 8; parts of the dense attention on neither sinks nor recent tokens. Published: of Llama-3.1-8B-Instruct, "
            "without intervals. Not drawn: full attention, which has all of it in full, and the oracle of eviction, which protects nothing.",
            ["of the history"],
            _parts,
        ),
        Chart(
            "churn",
            "Do windows make the choice more stable?",
            f"{ALIKE} Jaccard distance between two cuts; by step it is an eighth. Published: of Llama-3.1-8B-Instruct, without intervals, "
            "and beside what is held, as they do not say of which set. Not drawn: full attention, which chooses nothing, and the oracle of "
            "eviction, which chooses at every step.",
            [HELD, FULL],
            _churn,
        ),
        Chart(
            "recurrence",
            "What comes back?",
            f"{ALIKE} Three tiers with windows of 8, and two oracles that take as many windows at the same cuts. Published: 6.18 % online, "
            "0.98 % by an oracle; for how long a window must have been out is not said. Not drawn: full attention, from which nothing goes.",
            ["recurrence", "returns"],
            _recurrence,
        ),
    ],
    cells=(CELL,),
    labels=list(CROSSED),
)
