"""QEvict examined: tiers, windows, bits, shares, periods, starts, offsets, promotion and budgets, each at the bytes it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import polars as pl

import kvsim
from analyses.contexts import Context, Tables
from analyses.figures import Claim, Draws, Figures, at_least, at_most, mean, rows, share
from analyses.panels import axis, styled, sweep
from analyses.question import Chart, Question

HOLD = 0.2  # of the visible tokens: what the notes on QEvict measure with
TWO, THREE, FOUR = "2 tiers", "3 tiers", "4 tiers"  # full and gone; coded between them; more codes on the host
WINDOWS, PERIODS = (1, 8, 32), (1, 8, 32)
SCHEMES = {TWO: (2, 0.0), THREE: (2, 0.7)} | {  # bits, and the share of the budget for codes
    f"{bits} bits, {part:.0%} for codes": (bits, part) for bits in (2, 4) for part in (0.3, 0.7, 0.9) if (bits, part) != (2, 0.7)
}
CODED = [name for name in SCHEMES if name != TWO]
BUDGETS = {"5 %": 0.05, "10 %": 0.1, "20 %": 0.2}
SHORTER = 16  # recent tokens in the comparison of budgets: of 5 % of 1 000 tokens, 32 and the sinks leave no window
OFFSETS = (2, 4, 6)
OPTIONS: dict[str, dict[str, Any]] = {  # the defaults with one thing changed
    "start: window": {"init": "window"},
    "start: column": {"init": "column"},
    "start: zeros": {"init": "zeros"},
    **{f"offset {n}": {"offset": n} for n in OFFSETS},
    "decay 0.9": {"decay": 0.9},
    "promotion: never": {"promotion": "never"},
    "promotion: shadow": {"promotion": "shadow"},
    "coded anew": {"requantise": "each"},
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


@dataclass(frozen=True)
class Corner:
    """One corner of the grid."""

    scheme: str
    window: int
    period: int

    @property
    def line(self) -> str:
        return self.scheme if self.period == 8 else f"{self.scheme}, a cut every {self.period}"

    @property
    def policy(self) -> Any:
        bits, part = SCHEMES[self.scheme]
        return kvsim.qevict(hold=kvsim.share(HOLD), window=self.window, period=self.period, bits=bits, quant_share=part)

    @property
    def silly(self) -> bool:
        """Codes of single tokens: a scale for each channel of each token costs more than the token. Once, to show it."""
        return self.window == 1 and self.scheme != TWO and (self.scheme, self.period) != (THREE, 8)


GRID = [c for c in (Corner(*x) for x in product(SCHEMES, WINDOWS, PERIODS)) if not c.silly]


def asked() -> dict[str, object]:
    """Policies by "line, place"; the defaults once."""
    out: dict[str, object] = {f"{c.line}, {c.window}": c.policy for c in GRID}
    out |= {name: kvsim.qevict(hold=kvsim.share(HOLD), **changed) for name, changed in OPTIONS.items()}
    out |= {f"{FOUR}, {at}": kvsim.qevict(hold=kvsim.share(HOLD), host=kvsim.share(x)) for at, x in BUDGETS.items()}
    out |= {f"{name}, {at}": make(kvsim.share(x)) for name, make in FAMILIES.items() for at, x in BUDGETS.items()}
    return out | {f"{KIVI}, 20 %": kvsim.kivi(bits=2, group=32, residual=32)}


def measure(context: Context) -> pl.DataFrame:
    middle = context.inner[-1:]
    every = asked()
    run = context.replay(every, layers=middle)
    seen = context.replay({x: every[x] for x in (f"{TWO}, 8", DEFAULT)}, layers=middle, explain=True)
    whole = pl.concat([_moves(run), _again(seen)]).with_columns(role=pl.lit(context.mostly))
    return pl.concat([_quality(run), _relative(run), _bytes(run), whole, _classes(seen), _lags(seen), _turn(run)])


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
    """Errors and missed mass of an option over those of the defaults, and of a family over QEvict's at its budget."""
    means = (
        run("heads").group_by("role", "policy", maintain_order=True).agg(pl.col("rel_l2", "mass_evicted").cast(pl.Float64).mean())
    )
    named = means.with_columns(line=LINE, at=AT)
    changed = named.filter(pl.col("policy").is_in(list(OPTIONS))).with_columns(at="policy", line=pl.lit(THREE))
    fourth = named.filter(pl.col("line") == FOUR)
    ours = named.filter(pl.col("policy") == DEFAULT).drop("policy", "line", "at")
    both = pl.concat([changed, fourth]).join(ours, on="role", suffix="_ours", maintain_order="left")
    figures = {
        "error over the defaults'": share("rel_l2", "rel_l2_ours"),
        "missed over the defaults'": share("mass_evicted", "mass_evicted_ours"),
    }
    theirs = named.filter(pl.col("line") == "QEvict").drop("policy", "line")
    beside = named.filter(pl.col("line").is_in(list(FAMILIES))).join(
        theirs, on=["role", "at"], suffix="_ours", maintain_order="left"
    )
    return pl.concat(
        [
            rows(both, figures, line="line"),
            rows(beside, {"error over QEvict's": share("rel_l2", "rel_l2_ours")}, line="line"),
        ]
    )


def _bytes(run: Tables) -> pl.DataFrame:
    """On the device, rows with scales and kept codes, over the full cache's; off it; codes kept beside full rows, over all on the device."""
    row = pl.col("layer").replace_strict(run.row_bytes(), return_dtype=pl.Int64)
    meta, held = (pl.col(n).cast(pl.Int64) for n in ("meta_resident_bytes", "resident_bytes"))
    whole = pl.col("visible_tokens").cast(pl.Int64) * row
    away = pl.col("host_resident_bytes").cast(pl.Int64) + pl.col("ssd_resident_bytes")
    fetched = pl.col("host_read_bytes").cast(pl.Int64) + pl.col("ssd_read_bytes")
    figures = {"bytes": share(held + meta, whole), "bytes off the device": share(away, whole), "fetched": share(fetched, whole)}
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
    """Over all cuts of a trace, whatever the role. Back at once: of the returns to the full tier, those from less than 4 cuts away."""
    deployed = run("recurrence").filter(pl.col("set") == "deployed")
    unit = ["policy", "request", "layer", "kv_head"]
    later = deployed.filter(pl.col("dormancy") == 4).select(*unit, late="returns")
    cuts = deployed.filter(pl.col("dormancy") == 1).join(later, on=unit, maintain_order="left")
    figures = {
        "churn": mean("churn_full"),
        "back per spell": share("returns", "spells"),
        "back per cut": share("returns", "pairs"),
        "back at once": share(pl.col("returns") - pl.col("late"), "returns"),
    }
    coded = pl.col("policy").str.starts_with(THREE)
    joint = run("events").filter(coded, pl.col("kv_head") == pl.col("kv_head").min()).drop("role")
    return pl.concat(
        [
            rows(cuts, figures, line=LINE, at=AT),
            rows(joint, {"demoted for one promoted": share("windows_demoted", "windows_promoted")}, line=LINE, at=AT),
        ]
    )


CLASSES, GONE = ("sinks", "recent", "full", "coded"), "evicted"


def _classes(seen: Tables) -> pl.DataFrame:
    """Where dense attention lies: the classes of tokens, and what is gone."""
    held = [rows(seen("by_tier"), {"mass": mean(f"held_{c}")}, line=LINE, at=pl.lit(c)) for c in CLASSES]
    return pl.concat([*held, rows(seen("heads"), {"mass": mean("mass_evicted")}, line=LINE, at=pl.lit(GONE))])


def _again(seen: Tables) -> pl.DataFrame:
    """Recurrence of the policy and of oracles that take as many windows at the same cuts; coded against captured scores."""
    found = seen("recurrence").filter(pl.col("policy") == DEFAULT, pl.col("dormancy") == 1)
    figures = {"recurrence": share("returns", "pairs"), "score cosine": mean("score_cosine")}
    return rows(found, figures, line="set", at=pl.lit(""))


def _lags(seen: Tables) -> pl.DataFrame:
    """Dense mass on evicted tokens by how many steps ago they were, in doublings; of the 10 best tokens of a step, those that are gone."""
    lags = seen("lags")
    each = lags.with_columns(lag=pl.int_ranges(pl.col("mass").list.len())).explode("mass", "lag").drop_nulls("mass")
    gone = {"needed and gone": share(pl.col("again").list.len(), "needed")}
    by_lag = rows(each.with_columns(at=2 ** pl.col("lag")), {"missed by lag": mean("mass")}, line=LINE)
    return pl.concat([by_lag, rows(lags, gone, line=LINE, at=AT)])


TURNED = (f"{TWO}, 8", DEFAULT, "decay 0.9", f"{FOUR}, 20 %", "eviction, H2O, 20 %", "oracle of eviction, 20 %")
AROUND = {"before": -64, "first 8": 0, "next 8": 8, "later": 16}  # steps from the question on, each up to the next


def _turn(run: Tables) -> pl.DataFrame:
    """Where text goes on and a question turns to something else: what is missed before it and since, beside the answer's figures."""
    request = run.trace.requests[0]
    roles = request.roles[request.prompt :].tolist()
    turn = roles.index(1) if 1 in roles else 0
    names = [name for name in AROUND if turn]
    since = pl.col("step").cast(pl.Int64) - turn
    place = pl.lit(None, pl.String)
    for name in names:
        place = pl.when(since >= AROUND[name]).then(pl.lit(name)).otherwise(place)
    heads = run.run.scan("heads").filter(pl.col("request") == request.id).drop("role").collect()
    mine = run.named(heads).filter(pl.col("policy").is_in(TURNED)).with_columns(at=place, role=pl.lit("answer")).drop_nulls("at")
    figures = {"missed around the turn": mean("mass_evicted"), "error around the turn": mean("rel_l2")}
    return rows(mine, figures)


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


def tier_at(figure: str, name: str, place: str) -> Callable[[Figures], Draws]:
    return lambda f: f(figure, name, place)


def lead(family: str, at: str) -> Callable[[Figures], Draws]:
    return lambda f: f("error over QEvict's", family, at)


def tier(figure: str, name: str, window: int = 8) -> Callable[[Figures], Draws]:
    return lambda f: f(figure, name, window)


def least(asked: Callable[[Corner], bool]) -> Callable[[Figures], Draws]:
    """The least output error of the corners of the grid that are asked for: everything else is free."""
    return lambda f: np.min([f("output error", c.line, c.window) for c in GRID if asked(c)], axis=0)


def codes(corner: Corner) -> tuple[int, float]:
    return SCHEMES[corner.scheme]


CLAIMS = [
    Claim(
        notes="binary eviction throws a useful middle away: at the same bytes three tiers keep more of the attention than two (on QEvict, "
        "3; they evict 64.8 % and 35.7 %).",
        of="mass on evicted tokens with two tiers, less that with three, windows of 8",
        number=less(tier("missed", TWO), tier("missed", THREE)),
        claimed=at_least(0),
        so="three tiers miss {} of the mass less than two.",
        if_not="three tiers do not miss less than two.",
    ),
    Claim(
        notes="and so they are closer to full attention (on QEvict, 6).",
        of="output error with three tiers over that with two, windows of 8",
        number=over(tier("output error", THREE), tier("output error", TWO)),
        claimed=at_most(1),
        so="their output error is {} times that of two tiers.",
        if_not="their output error is {} times that of two tiers: what is reached again is worth less than what its 2 bits put on the rest.",
        form=".2f",
    ),
    Claim(
        notes="windows of 8 instead of tokens lower the missed mass (on QEvict, 3; their comparison changes tiers and windows together).",
        of="mass missed with windows of 8 over that with tokens, two tiers",
        number=over(tier("missed", TWO, 8), tier("missed", TWO, 1)),
        claimed=at_most(1),
        so="with two tiers, windows alone lower the missed mass to {} times.",
        if_not="with two tiers windows miss {} times the mass that single tokens do: it was the codes that lowered it.",
        form=".2f",
    ),
    Claim(
        notes="the same, with codes.",
        of="mass missed with windows of 8 over that with tokens, three tiers",
        number=over(tier("missed", THREE, 8), tier("missed", THREE, 1)),
        claimed=at_most(1),
        so="with three tiers windows of 8 miss {} times the mass of tokens: scales of a window of one token cost more than the token.",
        if_not="with three tiers windows of 8 miss {} times the mass of tokens.",
        form=".2f",
    ),
    Claim(
        notes="windows of 8 make the choice more than ten times as stable (on QEvict, 3: churn 0.017 and 0.0012).",
        of="churn of the full tier with windows of 8 over that with tokens, two tiers",
        number=over(tier("churn", TWO, 8), tier("churn", TWO, 1)),
        claimed=at_most(0.1),
        so="churn falls to {} of that of tokens.",
        if_not="churn with windows of 8 is {} of that of tokens, not a tenth.",
        form=".2f",
    ),
    Claim(
        notes="and windows of 32 are too coarse: churn rises again (on QEvict, 3).",
        of="churn with windows of 32 over that with windows of 8, three tiers",
        number=over(tier("churn", THREE, 32), tier("churn", THREE, 8)),
        claimed=at_least(1),
        so="churn with windows of 32 is {} times that with 8.",
        if_not="churn with windows of 32 is {} times that with 8.",
        form=".2f",
    ),
    Claim(
        notes="if codes could not be read, as much would be missed as with two tiers (on QEvict, 3).",
        of="mass on evicted and coded tokens with three tiers over that on evicted ones with two",
        number=over(tier("missed without codes", THREE), tier("missed without codes", TWO)),
        claimed=(0.9, 1.25),
        so="without its codes it would miss {} times what two tiers miss: what is gained is read in codes.",
        if_not="without its codes it would miss {} times what two tiers miss.",
        form=".2f",
    ),
    Claim(
        notes="scores by codes agree with those by full keys, cosine 0.9824 (on QEvict, 3).",
        of="cosine of the attention that windows get with keys as decoded and as captured",
        number=lambda f: f("score cosine", "deployed"),
        claimed=at_least(0.98),
        so="scores by codes agree with those by full keys, cosine {}.",
        if_not="scores by codes agree less with those by full keys, cosine {}.",
        form=".4f",
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
    ),
    *(
        Claim(
            notes=f"the lead over eviction grows as the budget shrinks (on QEvict, 6.2): {small} against {large}.",
            of=f"output error of eviction by the same scores over QEvict's at {small}, less the same at {large}",
            number=less(lead("eviction, QEvict's scores", small), lead("eviction, QEvict's scores", large)),
            claimed=at_least(0),
            so=f"the lead in output error grows from {large} to {small} of the tokens ({{}}).",
            if_not=f"the lead in output error shrinks from {large} to {small} of the tokens ({{}}): scales and protected tokens take a growing "
            "part.",
            form="+.2f",
        )
        for small, large in (("10 %", "20 %"), ("5 %", "10 %"))
    ),
    *(
        Claim(
            notes=f"at matched bytes it beats the best eviction (on QEvict, 6): {at}.",
            of=f"output error of H2O over QEvict's at {at}",
            number=lead("eviction, H2O", at),
            claimed=at_least(1),
            so=f"at {at} H2O has {{}} times its error.",
            if_not=f"at {at} H2O, which only evicts, has {{}} times its error.",
            form=".2f",
        )
        for at in reversed(BUDGETS)
    ),
    Claim(
        notes="and quantisation at about the same bytes (on QEvict, 6.1: 20 % against some 22 %).",
        of="output error of 2 bits of everything over QEvict's",
        number=over(error(KIVI), error("QEvict")),
        claimed=at_least(1),
        so="2 bits of everything have {} times its error.",
        if_not="2 bits of everything have {} times its error.",
        form=".2f",
    ),
    Claim(
        notes="2 bits cover more, 4 bits are truer, and 2 win (on QEvict, 6.5).",
        of="least output error with 4 bits over that with 2, windows of 8 or 32, any share and period",
        number=over(least(lambda c: codes(c)[0] == 4), least(lambda c: c.scheme in CODED and c.window > 1 and codes(c)[0] == 2)),
        claimed=at_least(1),
        so="4 bits have {} times the error of 2, each with what suits it best.",
        if_not="4 bits have {} times the error of 2, each with what suits it best: truer codes are worth more than more of them.",
        form=".2f",
    ),
    Claim(
        notes="70 % of the budget for codes is best (on QEvict, 5 and 6.5).",
        of="least output error with 70 % over that with 30 % or 90 %, any window, bits and period",
        number=over(least(lambda c: codes(c)[1] == 0.7), least(lambda c: codes(c)[1] in (0.3, 0.9))),
        claimed=at_most(1),
        so="70 % for codes has less error than 30 % and 90 % ({}).",
        if_not="another share has less error: 70 % has {} times that of the better of 30 % and 90 %.",
        form=".2f",
    ),
    Claim(
        notes="finding one fact wants fewer codes (on QEvict, 5 and 10l).",
        of="output error with 30 % for codes over that with 70 %, all else as the defaults",
        number=over(tier("output error", "2 bits, 30% for codes"), tier("output error", THREE)),
        claimed=at_most(1),
        so="with a needle, 30 % for codes has {} times the error of 70 %.",
        if_not="with a needle, 30 % for codes has {} times the error of 70 %: fewer codes do not help.",
        form=".2f",
        cells="needle",
    ),
    Claim(
        notes="a cut every 8 steps is best (on QEvict, 6.5).",
        of="least output error with a cut every 8 steps over that with one every 1 or 32, three tiers, any window, bits and share",
        number=over(least(lambda c: c.scheme in CODED and c.period == 8), least(lambda c: c.scheme in CODED and c.period != 8)),
        claimed=at_most(1),
        so="a cut every 8 steps has less error than one at each and one every 32 ({}).",
        if_not="another period has less error: a cut every 8 steps has {} times that of the better of 1 and 32.",
        form=".2f",
    ),
    Claim(
        notes="windows of 8 are best, of 32 too coarse (on QEvict, 3).",
        of="least output error with windows of 8 over that with windows of 32, three tiers, any bits, share and period",
        number=over(least(lambda c: c.scheme in CODED and c.window == 8), least(lambda c: c.scheme in CODED and c.window == 32)),
        claimed=at_most(1),
        so="windows of 8 have {} times the error of 32.",
        if_not="windows of 8 have {} times the error of 32: scales are dealt over four times the rows.",
        form=".2f",
    ),
    Claim(
        notes="windows of 8, 2 bits, 70 % and a cut every 8 steps together (on QEvict, 5 and 6.5).",
        of="output error of the defaults over the least of all corners of the grid",
        number=over(tier("output error", THREE), least(lambda c: True)),
        claimed=None,
        so="the defaults have {} times the error of the best corner, which was chosen on the same contexts.",
        form=".2f",
    ),
    Claim(
        notes="what windows of the prompt start with is not said (on QEvict, 4.2).",
        of="mass missed when they start with the attention of the last 32 prompt queries, over that of the last 8",
        number=option("start: window", "missed over the defaults'"),
        claimed=None,
        so="started by the last 32 prompt queries, {} times as much is missed as by the last 8; by nothing, more (chart).",
        form=".2f",
    ),
    Claim(
        notes="how the grid of windows lies to the 5 sinks is not said (on QEvict, 4.1).",
        of="largest output error with the grid moved by 2, 4 or 6 tokens, over the default's",
        number=lambda f: np.max([option(f"offset {n}")(f) for n in OFFSETS], axis=0),
        claimed=None,
        so="moving the grid by a few tokens gives up to {} times the error: an accident of the text, and a scale for other differences.",
        form=".2f",
    ),
    Claim(
        notes="a promoted window is in full precision again, which is worth it (on QEvict, 4.4 and 10g).",
        of="output error without any promotion, over the defaults'",
        number=option("promotion: never"),
        claimed=at_least(1),
        so="without promotion the error is {} times as large.",
        if_not="without promotion the error is no larger ({} times): a promoted window is still what its codes say.",
        form=".3f",
    ),
    Claim(
        notes="the same with originals kept off the device (our reading of what they want).",
        of="output error with promotion from originals, over the defaults'",
        number=option("promotion: shadow"),
        claimed=None,
        so="with originals to promote from the error is {} times the defaults'.",
        form=".3f",
    ),
    Claim(
        notes="coding again at every demotion would pile up error (on QEvict, 4.4).",
        of="output error when windows are coded anew, over the defaults'",
        number=option("coded anew"),
        claimed=at_least(1.01),
        so="coding anew gives {} times the error.",
        if_not="coding anew gives {} times the error: what a code decodes to is coded to itself.",
        form=".3f",
    ),
    Claim(
        notes="the bytes of codes kept beside full windows are not told, and may grow with churn (on QEvict, 8).",
        of="of all bytes on the device, codes kept beside full rows",
        number=lambda f: f("kept codes", THREE, 8),
        claimed=None,
        so="codes kept beside full rows are {} of its bytes with the defaults.",
        form=".2%",
    ),
    Claim(
        notes="sums that never fade may hold windows after the topic changed (on QEvict, 5).",
        of="mass missed when sums fade by a tenth at every cut, over the defaults'",
        number=option("decay 0.9", "missed over the defaults'"),
        claimed=at_most(1),
        so="sums that fade miss {} times as much.",
        if_not="sums that fade miss {} times as much: no less.",
        form=".2f",
    ),
    Claim(
        notes="a fourth tier off the device would cover more (on QEvict, 10i).",
        of="mass missed with codes on the host, of the bytes of 5 % of the tokens, over the defaults'",
        number=lambda f: f("missed over the defaults'", FOUR, "5 %"),
        claimed=at_most(1),
        so="with codes on the host, of the bytes of 5 % of the tokens, {} times as much is missed.",
        if_not="a host tier misses no less.",
        form=".2f",
    ),
    Claim(
        notes="whether windows swing between tiers is not said.",
        of="of the windows that return to the full tier, those that were out of it for less than 4 cuts, defaults",
        number=tier("back at once", THREE),
        claimed=None,
        so="{} of the windows that return were out for less than 4 cuts.",
        form=".0%",
    ),
    Claim(
        notes="nor whether fewer cuts make them swing less.",
        of="of the spells that windows spend out of the full tier, those that end by a return: with a cut every 8 steps over one every step",
        number=over(tier("back per spell", THREE), tier("back per spell", f"{THREE}, a cut every 1")),
        claimed=None,
        so="with a cut every 8 steps {} times as many of the windows that lose their place get it back as with a cut at every step.",
        form=".2f",
    ),
    Claim(
        notes="after the topic changed old sums may hold windows that nobody wants (on QEvict, 5).",
        of="mass missed in the first 8 steps of a question that turns to something else, over that in the 64 steps before it, defaults",
        number=over(tier_at("missed around the turn", DEFAULT, "first 8"), tier_at("missed around the turn", DEFAULT, "before")),
        claimed=at_least(1),
        so="when a question turns to something else {} times as much is missed as before it.",
        if_not="when a question turns to something else no more is missed than before it ({} times).",
        form=".2f",
        cells="reversal/short/smollm2: answer",
    ),
    Claim(
        notes="and scores catch up with it (the same).",
        of="mass missed from 16 steps after the turn on, over that in the first 8, defaults",
        number=over(tier_at("missed around the turn", DEFAULT, "later"), tier_at("missed around the turn", DEFAULT, "first 8")),
        claimed=at_most(1),
        so="16 steps later it is {} times that.",
        if_not="16 steps later it is {} times that: what was evicted before the turn does not come back.",
        form=".2f",
        cells="reversal/short/smollm2: answer",
    ),
    Claim(
        notes="what is evicted is missed later, after it lay dormant (on QEvict, 1).",
        of="of the missed mass, that on tokens which the cut after the prompt dropped, two tiers",
        number=tier("missed since the prompt", TWO),
        claimed=None,
        so="{} of what two tiers miss was dropped by the first cut, before anything was decoded.",
        form=".0%",
    ),
    Claim(
        notes="the same, of the tokens that a step wants most.",
        of="of the 10 tokens of highest logit of a step, those that two tiers have evicted, less those that three have",
        number=less(tier("needed and gone", TWO), tier("needed and gone", THREE)),
        claimed=at_least(0),
        so="of a step's 10 best tokens three tiers have {} fewer evicted than two.",
        if_not="of a step's 10 best tokens three tiers have no fewer evicted than two ({}).",
        form="+.1%",
    ),
]

# ---------------------------------------------------------------------------------------------- charts
ERROR, MISSED = axis("output error (relative L2)", 0, form=".2f"), axis("mass on evicted tokens", 0, form=".0%")


def _windows(frame: pl.DataFrame) -> object:
    mine = frame.filter(pl.col("line").is_in([TWO, THREE]))
    y = {"missed": MISSED, "output error": ERROR, "churn": axis("churn of the full tier", 0, form=".0%")}
    none = "counted over all cuts: beside forced text"
    sizes = [str(n) for n in WINDOWS]
    return sweep(mine, y, "window (tokens)", styled([TWO, THREE]), "Windows crossed with tiers.", sizes, none=none)


def _mass(frame: pl.DataFrame) -> object:
    y = {"mass": axis("dense attention", 0, form=".0%")}
    return sweep(frame, y, "where the token is", styled([TWO, THREE]), "Dense attention by tier.", [*CLASSES, GONE], joined=False)


def _families(frame: pl.DataFrame) -> object:
    names = [*FAMILIES, KIVI]
    mine = frame.filter(pl.col("line").is_in(names))
    y = {
        "missed": MISSED,
        "output error": axis("output error (relative L2)", log=True),
        "error over QEvict's": axis("output error over QEvict's, paired", log=True),
        "bytes": axis("bytes on the device, of the full cache's", 0, form=".0%"),
    }
    return sweep(
        mine, y, "budget, of the visible tokens", styled(names), "QEvict beside eviction and quantisation.", list(BUDGETS)
    )


def _grid(frame: pl.DataFrame) -> object:
    """A row per period, a line per scheme."""
    of = {c.line: c for c in GRID}
    mine = frame.filter(pl.col("line").is_in(list(of)))
    lines = mine["line"].to_list()
    named = mine.with_columns(
        line=pl.Series([of[x].scheme for x in lines], dtype=pl.String),
        figure=pl.Series([f"period {of[x].period}" for x in lines], dtype=pl.String),
    )
    y = {
        f"period {n}": axis(f"output error, a cut every {n if n > 1 else ''} step{'s' if n > 1 else ''}", 0, form=".2f")
        for n in PERIODS
    }
    return sweep(named, y, "window (tokens)", styled(list(SCHEMES)), "The grid.", [str(n) for n in WINDOWS])


def _options(frame: pl.DataFrame) -> object:
    y = {
        "error over the defaults'": axis("output error, times the defaults'"),
        "missed over the defaults'": axis("mass missed, times the defaults'"),
    }
    mine = frame.filter(pl.col("line") == THREE)
    return sweep(mine, y, "changed", styled([THREE]), "Each option over the defaults.", list(OPTIONS), joined=False)


def _fourth(frame: pl.DataFrame) -> object:
    y = {
        "missed": axis("mass on evicted tokens", 0, form=".1%"),
        "error over the defaults'": axis("output error, times three tiers'"),
        "bytes off the device": axis("bytes on the host, of the full cache's", 0, form=".0%"),
        "fetched": axis("bytes fetched a step, of the full cache's", 0, form=".1%"),
    }
    mine = frame.filter(pl.col("line") == FOUR)
    return sweep(mine, y, "codes on the host, of the visible tokens", styled([FOUR]), "A fourth tier.", list(BUDGETS))


def _again_(frame: pl.DataFrame) -> object:
    of = [c.line for c in GRID if c.scheme == THREE]
    mine = frame.filter(pl.col("line").is_in(of))
    y = {
        "churn": axis("churn of the full tier", 0, form=".0%"),
        "back per cut": axis("dormant windows back at a cut", 0, form=".1%"),
        "back at once": axis("of those back, out for less than 4 cuts", 0, 1, ".0%"),
    }
    return sweep(mine, y, "window (tokens)", styled(list(dict.fromkeys(of))), "How windows swing.", [str(n) for n in WINDOWS])


def _lag(frame: pl.DataFrame) -> object:
    y = {"missed by lag": axis("dense attention on tokens evicted so long ago", 0, form=".0%")}
    places = sorted(frame["at"].unique(), key=int)
    return sweep(frame, y, "steps since the cut (from)", styled([TWO, THREE]), "Missed mass by lag.", places)


def _around(frame: pl.DataFrame) -> object:
    y = {"missed around the turn": MISSED, "error around the turn": ERROR}
    none = "no turn"
    return sweep(frame, y, "steps of the question", styled(list(TURNED)), "Around the turn.", list(AROUND), none=none)


ALIKE = f"Budgets are {HOLD:.0%} of the visible tokens."
NEITHER = "Not drawn: full attention, which evicts nothing, and the oracle of eviction, which has no tiers."
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
            f"{ALIKE} {NEITHER}",
            ["missed", "output error", "churn"],
            _windows,
        ),
        Chart(
            "mass",
            "Where does attention lie?",
            f"{ALIKE} Windows of 8. Full attention has all of it within reach; the oracle of eviction is in the next chart.",
            ["mass"],
            _mass,
        ),
        Chart(
            "families",
            "What are the same bytes worth?",
            f"QEvict and its scores with {SHORTER} recent tokens here, so that 5 % leave room for windows. 2 bits of everything stand at 20 "
            "% by their bytes. Not drawn: full "
            "attention, at 100 % of the bytes.",
            ["missed", "output error", "error over QEvict's", "bytes"],
            _families,
        ),
        Chart(
            "grid",
            "Windows, tiers, bits, shares and periods, all crossed",
            f"{ALIKE} Three tiers: 2 bits and 70 % of the budget for codes. Left out: codes of single tokens but for the defaults', each would "
            f"bring a scale for every channel; bits and shares with two tiers, which have no codes. {NEITHER}",
            ["output error"],
            _grid,
        ),
        Chart(
            "options",
            "What do the other choices decide?",
            f"{ALIKE} One thing changed against: windows of 8, a cut every 8 steps, started by the last 8 prompt queries, no decay, "
            f"promotion from codes. {NEITHER}",
            ["error over the defaults'", "missed over the defaults'"],
            _options,
        ),
        Chart(
            "fourth",
            "What does a tier on the host bring?",
            f"{ALIKE} Beside them, as many codes on the host; they are read from there. {NEITHER}",
            ["missed", "error over the defaults'", "bytes off the device", "fetched"],
            _fourth,
        ),
        Chart(
            "swings",
            "How often do windows come and go?",
            f"{ALIKE} Over all cuts of a trace, whatever the role; three tiers. {NEITHER}",
            ["churn", "back per cut", "back at once"],
            _again_,
        ),
        Chart(
            "lag",
            "How long after eviction is it missed?",
            f"{ALIKE} Windows of 8. Steps that can have such a lag. {NEITHER}",
            ["missed by lag"],
            _lag,
        ),
        Chart(
            "turn",
            "And where the topic changes?",
            f"{ALIKE} The 64 steps before a question that turns to something else (every seventh), and the steps from it on. Not drawn: full "
            "attention, which misses nothing; the oracle of eviction is.",
            ["missed around the turn", "error around the turn"],
            _around,
        ),
    ],
    labels=[TWO, THREE, *FAMILIES, KIVI],
)
