"""QEvict examined: tiers, windows, bits, shares, periods, starts, offsets, promotion and budgets, each at the bytes it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

import kvsim
from analyses.contexts import Context, Tables
from analyses.figures import Claim, Draws, Figures, at_least, at_most, mean, rows, share
from analyses.panels import axis, styled, sweep
from analyses.question import SHORT, Chart, Question

HOLD = 0.2  # of the visible tokens: what the notes on QEvict measure with
WINDOWS = (1, 8, 32)
CODED = {"2 bits": (0.3, 0.9), "4 bits": (0.7, 0.9)}  # shares of the budget; 2 bits and 0.7 are the defaults
TWO, THREE = "2 tiers", "3 tiers"
TIERS = {TWO: 0.0, THREE: 0.7}  # full and gone, or coded between them -> quant_share
BUDGETS = {"5 %": 0.05, "20 %": 0.2}
SHORTER = 16  # recent tokens in the comparison of budgets: of 5 % of 1 000 tokens, 32 and the sinks leave no window
OPTIONS: dict[str, dict[str, Any]] = {  # the defaults with one thing changed
    "start: window": {"init": "window"},
    "start: column": {"init": "column"},
    "start: zeros": {"init": "zeros"},
    "period 1": {"period": 1},
    "period 32": {"period": 32},
    "offset 3": {"offset": 3},
    "decay 0.9": {"decay": 0.9},
    "promotion: never": {"promotion": "never"},
    "promotion: shadow": {"promotion": "shadow"},
    "coded anew": {"requantise": "each"},
    "host tier": {"host": kvsim.share(HOLD)},
}
DEFAULT = f"{THREE}, 8"
FAMILIES: dict[str, Callable[[Any], Any]] = {
    "QEvict": lambda hold: kvsim.qevict(hold=hold, recent=SHORTER),
    "eviction, QEvict's scores": lambda hold: kvsim.qevict(hold=hold, recent=SHORTER, quant_share=0.0),
    "eviction, H2O": lambda hold: kvsim.h2o(hold=hold),
    "oracle of eviction": lambda hold: kvsim.oracle_keep(hold=hold),
    "random tokens": lambda hold: kvsim.random_keep(hold=hold),
}
KIVI = "2 bits of everything, KIVI"


def asked() -> dict[str, object]:
    """Policies by "line, place"; the defaults once."""
    hold = kvsim.share(HOLD)
    out: dict[str, object] = {
        f"{name}, {n}": kvsim.qevict(hold=hold, window=n, quant_share=q) for n in WINDOWS for name, q in TIERS.items()
    }
    out |= {f"{n}, {q}": kvsim.qevict(hold=hold, bits=int(n[0]), quant_share=q) for n, shares in CODED.items() for q in shares}
    out |= {name: kvsim.qevict(hold=hold, **changed) for name, changed in OPTIONS.items()}
    out |= {f"{name}, {at}": make(kvsim.share(x)) for name, make in FAMILIES.items() for at, x in BUDGETS.items()}
    return out | {f"{KIVI}, 20 %": kvsim.kivi(bits=2, group=32, residual=32)}


def measure(context: Context) -> pl.DataFrame:
    middle = context.inner[-1:]
    every = asked()
    run = context.replay(every, layers=middle)
    seen = context.replay({x: every[x] for x in (f"{TWO}, 8", DEFAULT)}, layers=middle, explain=True)
    return pl.concat([_quality(run), _relative(run), _bytes(run), _moves(run), _classes(seen), _again(seen)])


# ---------------------------------------------------------------------------------------------- rows of one context
LINE, AT = (pl.col("policy").str.extract("^(.*?)(?:, ([^,]*))?$", i).fill_null("") for i in (1, 2))


def _quality(run: Tables) -> pl.DataFrame:
    gone, coded = (pl.col(n).cast(pl.Float64).fill_null(0) for n in ("mass_evicted", "mass_quant"))
    figures = {
        "missed": mean("mass_evicted"),
        "missed without codes": mean(gone + coded),
        "missed since the prompt": share("mass_evicted_prefill", "mass_evicted"),
        "output error": mean("rel_l2"),
        "evidence read": share("evidence_read", "evidence_dense"),
    }
    return rows(run("heads"), figures, line=LINE, at=AT)


def _relative(run: Tables) -> pl.DataFrame:
    """Errors and missed mass of an option over those of the defaults."""
    means = (
        run("heads").group_by("role", "policy", maintain_order=True).agg(pl.col("rel_l2", "mass_evicted").cast(pl.Float64).mean())
    )
    ours = means.filter(pl.col("policy") == DEFAULT).select("role", "rel_l2", "mass_evicted")
    both = means.filter(pl.col("policy").is_in(list(OPTIONS))).join(ours, on="role", suffix="_ours", maintain_order="left")
    figures = {
        "error over the defaults'": share("rel_l2", "rel_l2_ours"),
        "missed over the defaults'": share("mass_evicted", "mass_evicted_ours"),
    }
    return rows(both, figures, line=pl.lit(THREE), at="policy")


def _bytes(run: Tables) -> pl.DataFrame:
    """On the device, rows with scales and kept codes, over the full cache's; off it; codes kept beside full rows, over all on the device."""
    row = pl.col("layer").replace_strict(run.row_bytes(), return_dtype=pl.Int64)
    meta, held = (pl.col(n).cast(pl.Int64) for n in ("meta_resident_bytes", "resident_bytes"))
    whole = pl.col("visible_tokens").cast(pl.Int64) * row
    away = pl.col("host_resident_bytes").cast(pl.Int64) + pl.col("ssd_resident_bytes")
    figures = {"bytes": share(held + meta, whole), "bytes off the device": share(away, whole)}
    layer = next(x for x in run.trace.layers if x.id == run("ledger")["layer"][0])
    kept = run("ledger").filter(pl.col("policy").is_in([DEFAULT, *OPTIONS]))
    beside = meta - pl.col("quant_tokens") * scales(layer.key_dim, layer.value_dim)
    return pl.concat(
        [
            rows(run("ledger"), figures, line=LINE, at=AT),
            rows(kept, {"kept codes": share(beside, held + meta)}, line=LINE, at=AT),
        ]
    )


def scales(key_dim: int, value_dim: int, window: int = 8) -> float:
    """Bytes of scales and zeros that come with a coded row of one kv head, windows being coded whole."""
    codecs = kvsim.qevict(hold=kvsim.share(HOLD), window=window).codecs
    return codecs.k.layout(key_dim)[1] / window + codecs.v.layout(value_dim)[1]


def _moves(run: Tables) -> pl.DataFrame:
    """Over all cuts of a trace, whatever the role: they are put beside the answer's figures."""
    cuts = run("recurrence").filter(pl.col("dormancy") == 1, pl.col("set") == "deployed").with_columns(role=pl.lit("answer"))
    figures = {
        "churn": mean("churn_full"),
        "back per spell": share("returns", "spells"),
        "back per cut": share("returns", "pairs"),
    }
    joint = run("events").filter(pl.col("policy").str.starts_with(THREE), pl.col("kv_head") == pl.col("kv_head").min())
    moved = joint.with_columns(role=pl.lit("answer"))
    return pl.concat(
        [
            rows(cuts, figures, line=LINE, at=AT),
            rows(moved, {"demoted for one promoted": share("windows_demoted", "windows_promoted")}, line=LINE, at=AT),
        ]
    )


CLASSES, GONE = ("sinks", "recent", "full", "coded"), "evicted"


def _classes(seen: Tables) -> pl.DataFrame:
    """Where dense attention lies: the classes of tokens, and what is gone."""
    held = [rows(seen("by_tier"), {"mass": mean(f"held_{c}")}, line=LINE, at=pl.lit(c)) for c in CLASSES]
    return pl.concat([*held, rows(seen("heads"), {"mass": mean("mass_evicted")}, line=LINE, at=pl.lit(GONE))])


def _again(seen: Tables) -> pl.DataFrame:
    """Recurrence of the policy and of oracles that take as many windows at the same cuts; coded against captured scores."""
    found = seen("recurrence").filter(pl.col("policy") == DEFAULT, pl.col("dormancy") == 1).with_columns(role=pl.lit("answer"))
    figures = {"recurrence": share("returns", "pairs"), "score cosine": mean("score_cosine")}
    return rows(found, figures, line="set", at=pl.lit(""))


# ---------------------------------------------------------------------------------------------- claims
def option(name: str, figure: str = "error over the defaults'") -> Callable[[Figures], Draws]:
    """Of the defaults with one thing changed, over the defaults; or of a share of the budget that is not theirs."""
    return lambda f: f(figure, THREE, name)


def error(line: str, at: str = "20 %", figure: str = "output error") -> Callable[[Figures], Draws]:
    return lambda f: f(figure, line, at)


def less(one: Callable[[Figures], Draws], other: Callable[[Figures], Draws]) -> Callable[[Figures], Draws]:
    return lambda f: one(f) - other(f)


def over(one: Callable[[Figures], Draws], *others: Callable[[Figures], Draws]) -> Callable[[Figures], Draws]:
    """Of one in the least of others."""
    return lambda f: one(f) / np.min([other(f) for other in others], axis=0)


def tier(figure: str, name: str, window: int = 8) -> Callable[[Figures], Draws]:
    return lambda f: f(figure, name, window)


ANSWER = "answer"
CLAIMS = [
    Claim(
        notes="binary eviction throws a useful middle away: at the same bytes three tiers keep more of the attention than two (on QEvict, "
        "3; they evict 64.8 % and 35.7 %).",
        of="mass on evicted tokens with two tiers, less that with three, windows of 8",
        number=less(tier("missed", TWO), tier("missed", THREE)),
        claimed=at_least(0),
        so="three tiers miss {} of the mass less than two.",
        if_not="three tiers do not miss less than two.",
        cells=ANSWER,
    ),
    Claim(
        notes="and so they are closer to full attention (on QEvict, 6).",
        of="output error with three tiers over that with two, windows of 8",
        number=over(tier("output error", THREE), tier("output error", TWO)),
        claimed=at_most(1),
        so="their output error is {} times that of two tiers.",
        if_not="their output error is {} times that of two tiers: what is reached again is worth less than what its 2 bits put on the rest.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="windows of 8 instead of tokens lower the missed mass (on QEvict, 3; their comparison changes tiers and windows together).",
        of="mass missed with windows of 8 over that with tokens, two tiers",
        number=over(tier("missed", TWO, 8), tier("missed", TWO, 1)),
        claimed=at_most(1),
        so="with two tiers, windows alone lower the missed mass to {} times.",
        if_not="with two tiers windows miss {} times the mass that single tokens do: it was the codes that lowered it.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="the same, with codes.",
        of="mass missed with windows of 8 over that with tokens, three tiers",
        number=over(tier("missed", THREE, 8), tier("missed", THREE, 1)),
        claimed=at_most(1),
        so="with three tiers windows of 8 miss {} times the mass of tokens: scales of a window of one token cost more than the token.",
        if_not="with three tiers windows of 8 miss {} times the mass of tokens.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="windows of 8 make the choice more than ten times as stable (on QEvict, 3: churn 0.017 and 0.0012).",
        of="churn of the full tier with windows of 8 over that with tokens, two tiers",
        number=over(tier("churn", TWO, 8), tier("churn", TWO, 1)),
        claimed=at_most(0.1),
        so="churn falls to {} of that of tokens.",
        if_not="churn with windows of 8 is {} of that of tokens, not a tenth.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="and windows of 32 are too coarse: churn rises again (on QEvict, 3).",
        of="churn with windows of 32 over that with windows of 8, three tiers",
        number=over(tier("churn", THREE, 32), tier("churn", THREE, 8)),
        claimed=at_least(1),
        so="churn with windows of 32 is {} times that with 8.",
        if_not="churn with windows of 32 is {} times that with 8.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="if codes could not be read, as much would be missed as with two tiers (on QEvict, 3).",
        of="mass on evicted and coded tokens with three tiers over that on evicted ones with two",
        number=over(tier("missed without codes", THREE), tier("missed without codes", TWO)),
        claimed=(0.9, 1.25),
        so="without its codes it would miss {} times what two tiers miss: what is gained is read in codes.",
        if_not="without its codes it would miss {} times what two tiers miss.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="scores by codes agree with those by full keys, cosine 0.9824 (on QEvict, 3).",
        of="cosine of the attention that windows get with keys as decoded and as captured",
        number=lambda f: f("score cosine", "deployed"),
        claimed=at_least(0.98),
        so="scores by codes agree with those by full keys, cosine {}.",
        if_not="scores by codes agree less with those by full keys, cosine {}.",
        form=".4f",
        cells=ANSWER,
    ),
    Claim(
        notes="what matters changes more online than it really does: recurrence 6.18 % against an oracle's 0.98 % (on QEvict, 3).",
        of="share of dormant windows that come back at a cut, less that of an oracle by attention since the last cut",
        number=lambda f: f("recurrence", "deployed") - f("recurrence", "oracle_interval"),
        claimed=at_least(0),
        so="windows come back more often than an oracle by recent attention would have them.",
        if_not="windows come back less often ({}) than an oracle by recent attention would have them: sums that never fade hold on "
        "to what they have.",
        form="+.1%",
        cells=ANSWER,
    ),
    Claim(
        notes="the lead over eviction grows as the budget shrinks (on QEvict, 6.2).",
        of="output error of eviction by the same scores over QEvict's at 5 %, less the same at 20 %",
        number=less(
            over(error("eviction, QEvict's scores", "5 %"), error("QEvict", "5 %")),
            over(error("eviction, QEvict's scores"), error("QEvict")),
        ),
        claimed=at_least(0),
        so="the lead in output error grows as the budget shrinks.",
        if_not="the lead in output error shrinks with the budget: scales and protected tokens take a growing part of it.",
        form="+.2f",
        cells=ANSWER,
    ),
    Claim(
        notes="at matched bytes it beats the best eviction (on QEvict, 6).",
        of="output error of H2O at 20 % over QEvict's",
        number=over(error("eviction, H2O"), error("QEvict")),
        claimed=at_least(1),
        so="H2O has {} times its error.",
        if_not="H2O, which only evicts, has {} times its error.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="and quantisation at about the same bytes (on QEvict, 6.1: 20 % against some 22 %).",
        of="output error of 2 bits of everything over QEvict's",
        number=over(error(KIVI), error("QEvict")),
        claimed=at_least(1),
        so="2 bits of everything have {} times its error.",
        if_not="2 bits of everything have {} times its error.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="2 bits cover more, 4 bits are truer, and 2 win (on QEvict, 6.5).",
        of="output error with 4 bits over that with 2, 70 % of the budget for codes",
        number=over(error("4 bits", "0.7"), tier("output error", THREE)),
        claimed=at_least(1),
        so="4 bits have {} times the error of 2.",
        if_not="4 bits have {} times the error of 2: truer codes are worth more than more of them.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="70 % of the budget for codes is best (on QEvict, 5 and 6.5).",
        of="output error with 70 % over the least of those with 30 % and 90 %",
        number=over(tier("output error", THREE), error("2 bits", "0.3"), error("2 bits", "0.9")),
        claimed=at_most(1),
        so="70 % has less error than 30 % and 90 %.",
        if_not="another share has less error: 70 % has {} times that of the better of 30 % and 90 %.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="finding one fact wants fewer codes (on QEvict, 5 and 10l).",
        of="output error with 30 % for codes over that with 70 %",
        number=over(error("2 bits", "0.3"), tier("output error", THREE)),
        claimed=at_most(1),
        so="with a needle, 30 % for codes has {} times the error of 70 %.",
        if_not="with a needle, 30 % for codes has {} times the error of 70 %: fewer codes do not help.",
        form=".2f",
        cells="needle",
    ),
    Claim(
        notes="a cut every 8 steps is best (on QEvict, 6.5).",
        of="output error with a cut every 8 steps over the least of those at every step and every 32",
        number=lambda f: 1 / np.minimum(option("period 1")(f), option("period 32")(f)),
        claimed=at_most(1),
        so="a cut every 8 steps has less error than one at each and one every 32.",
        if_not="another period has less error: a cut every 8 steps has {} times that of the better of 1 and 32.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="what windows of the prompt start with is not said (on QEvict, 4.2).",
        of="mass missed when they start with the attention of the last 32 prompt queries, over that of the last 8",
        number=option("start: window", "missed over the defaults'"),
        claimed=None,
        so="started by the last 32 prompt queries, {} times as much is missed as by the last 8; by nothing, more (chart).",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="how the grid of windows lies to the 5 sinks is not said (on QEvict, 4.1).",
        of="output error with the grid moved by 3 tokens, over the default's",
        number=option("offset 3"),
        claimed=None,
        so="moving the grid by 3 tokens gives {} times the error: an accident of the text, and a scale for other differences.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="a promoted window is in full precision again, which is worth it (on QEvict, 4.4 and 10g).",
        of="output error without any promotion, over the defaults'",
        number=option("promotion: never"),
        claimed=at_least(1),
        so="without promotion the error is {} times as large.",
        if_not="without promotion the error is no larger ({} times): a promoted window is still what its codes say.",
        form=".3f",
        cells=ANSWER,
    ),
    Claim(
        notes="the same with originals kept off the device (our reading of what they want).",
        of="output error with promotion from originals, over the defaults'",
        number=option("promotion: shadow"),
        claimed=None,
        so="with originals to promote from the error is {} times the defaults'.",
        form=".3f",
        cells=ANSWER,
    ),
    Claim(
        notes="coding again at every demotion would pile up error (on QEvict, 4.4).",
        of="output error when windows are coded anew, over the defaults'",
        number=option("coded anew"),
        claimed=at_least(1.01),
        so="coding anew gives {} times the error.",
        if_not="coding anew gives {} times the error: what a code decodes to is coded to itself.",
        form=".3f",
        cells=ANSWER,
    ),
    Claim(
        notes="the bytes of codes kept beside full windows are not told, and may grow with churn (on QEvict, 8).",
        of="of all bytes on the device, codes kept beside full rows",
        number=lambda f: f("kept codes", THREE, 8),
        claimed=None,
        so="codes kept beside full rows are {} of its bytes with the defaults.",
        form=".2%",
        cells=ANSWER,
    ),
    Claim(
        notes="sums that never fade may hold windows after the topic changed (on QEvict, 5).",
        of="mass missed when sums fade by a tenth at every cut, over the defaults'",
        number=option("decay 0.9", "missed over the defaults'"),
        claimed=at_most(1),
        so="sums that fade miss {} times as much.",
        if_not="sums that fade miss {} times as much: no less.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="a fourth tier off the device would cover more (on QEvict, 10i).",
        of="mass missed with a host tier of as many bytes, over the defaults'",
        number=option("host tier", "missed over the defaults'"),
        claimed=at_most(1),
        so="with as many bytes of codes on the host, {} times as much is missed.",
        if_not="a host tier misses no less.",
        form=".2f",
        cells=ANSWER,
    ),
    Claim(
        notes="what is evicted is missed later, after it lay dormant (on QEvict, 1).",
        of="of the missed mass, that on tokens which the cut after the prompt dropped, two tiers",
        number=tier("missed since the prompt", TWO),
        claimed=None,
        so="{} of what two tiers miss was dropped by the first cut, before anything was decoded.",
        form=".0%",
        cells=ANSWER,
    ),
]

# ---------------------------------------------------------------------------------------------- charts
ERROR, MISSED = axis("output error (relative L2)", 0, form=".2f"), axis("mass on evicted tokens", 0, form=".0%")


def _windows(frame: pl.DataFrame) -> object:
    mine = frame.filter(pl.col("line").is_in(list(TIERS)))
    y = {"missed": MISSED, "output error": ERROR, "churn": axis("churn of the full tier", 0, form=".0%")}
    return sweep(mine, y, "window (tokens)", styled(list(TIERS)), "Windows crossed with tiers.", [str(n) for n in WINDOWS])


def _mass(frame: pl.DataFrame) -> object:
    y = {"mass": axis("dense attention", 0, form=".0%")}
    return sweep(frame, y, "where the token is", styled(list(TIERS)), "Dense attention by tier.", [*CLASSES, GONE], joined=False)


def _families(frame: pl.DataFrame) -> object:
    names = [*FAMILIES, KIVI]
    mine = frame.filter(pl.col("line").is_in(names))
    y = {
        "missed": MISSED,
        "output error": axis("output error (relative L2)", log=True),
        "bytes": axis("bytes on the device, of the full cache's", 0, form=".0%"),
    }
    return sweep(mine, y, "budget", styled(names), "QEvict beside eviction and quantisation.", list(BUDGETS))


def _codes(frame: pl.DataFrame) -> object:
    ours = frame.filter(pl.col("line") == THREE, pl.col("at") == "8").with_columns(line=pl.lit("2 bits"), at=pl.lit("0.7"))
    mine = pl.concat([frame.filter(pl.col("line").is_in(list(CODED))), ours])
    y = {"missed": MISSED, "output error": ERROR}
    return sweep(
        mine,
        y,
        "part of the budget for codes",
        styled(list(CODED)),
        "Bits and the part of the budget for codes.",
        ["0.3", "0.7", "0.9"],
    )


def _options(frame: pl.DataFrame) -> object:
    y = {
        "error over the defaults'": axis("output error, times the defaults'"),
        "missed over the defaults'": axis("mass missed, times the defaults'"),
    }
    return sweep(frame, y, "changed", styled([THREE]), "Each option over the defaults.", list(OPTIONS), joined=False)


ALIKE = f"Budgets are {HOLD:.0%} of the visible tokens."
QUESTION = Question(
    name="qevict",
    title="QEvict examined",
    lead="Keep the most attended windows in full precision, the next in 2 bits, evict the rest, and promote what matters again. What of it does "
    "what, and is it the best use of the bytes?",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "windows",
            "Windows or tiers: which of the two helps?",
            f"{ALIKE} Not drawn: full attention, which misses nothing.",
            ["missed", "output error", "churn"],
            _windows,
        ),
        Chart(
            "mass",
            "Where does attention lie?",
            f"{ALIKE} Windows of 8. Full attention has all of it within reach.",
            ["mass"],
            _mass,
        ),
        Chart(
            "families",
            "What are the same bytes worth?",
            f"QEvict and its scores with {SHORTER} recent tokens here, so that 5 % leave room for windows. 2 bits of everything stand at 20 "
            "% by their bytes. Not drawn: full "
            "attention, at 100 % of the bytes.",
            ["missed", "output error", "bytes"],
            _families,
        ),
        Chart(
            "codes",
            "How many bits, and how much of the budget?",
            f"{ALIKE} Windows of 8. Not drawn: full attention.",
            ["missed", "output error"],
            _codes,
        ),
        Chart(
            "options",
            "What do the other choices decide?",
            f"{ALIKE} One thing changed against: windows of 8, a cut every 8 steps, started by the last 8 prompt queries, no decay, "
            "promotion from codes. Not drawn: full attention.",
            ["error over the defaults'", "missed over the defaults'"],
            _options,
        ),
    ],
    labels=[TWO, THREE, *FAMILIES, KIVI],
    cells=SHORT[:1],
)
