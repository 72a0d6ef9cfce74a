"""Every method at equal bytes: what it holds, what it reads, what that loses; and what a running model then answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import polars as pl

from analyses.contexts import Context, Tables
from analyses.figures import Claim, Draws, Figures, at_least, at_most
from analyses.frontier.methods import KEEPS, MORE, OWN, READS, SHARES, STORES
from analyses.frontier.table import table
from analyses.measures import ANSWER, UNIT, whole
from analyses.panels import axis, styled, sweep
from analyses.question import SHORT, Chart, Question
from kvsim.metrics.traffic import RESIDENT, side_bytes

AROUND = (
    0.15,
    0.25,
    0.4,
    0.5,
    0.65,
)  # budgets of what holds other bytes than those of its rows: 25 % and 50 % lie between two of them
MEASURES = ("mass_recall", "rel_l2", "evidence_read", "evidence_dense", "budget")
NAMES = {"mass_recall": "mass recall", "rel_l2": "output error", "budget": "budget"}


def measure(context: Context) -> pl.DataFrame:
    keeps = {f"{n} @ {x}": e.format(x=x) for n, e in KEEPS.items() for x in (AROUND if n in MORE else SHARES)}
    reads = {n: e.format(x=SHARES[0]) for n, e in READS.items()}
    held = context.replay(keeps)
    read = context.replay(reads)
    coded = context.replay(STORES)
    return pl.concat([at_equal(held, RESIDENT, "held"), at_equal(read, (), "read"), as_is(coded)])


def at_equal(run: Tables, billed: Sequence[str], side: str) -> pl.DataFrame:
    """Rows at equal bytes: held, a policy's own budgets joined by straight lines; read, the budgets of its curves."""
    each = _held(run, billed) if side == "held" else _read(run)
    met = [_between(key, part.sort("share")) for key, part in each.group_by(*UNIT, "q_head", maintain_order=True)]
    return _rows(pl.concat(met), side)


def _held(run: Tables, billed: Sequence[str]) -> pl.DataFrame:
    """-> role, policy, layer, q_head, share of full attention's bytes, MEASURES: a row for every budget."""
    names = {"policy": pl.col("policy").str.split(" @ ").list.first()}
    cost = run("ledger").with_columns(whole=whole(run), held=pl.sum_horizontal(billed).cast(pl.Float64))
    share = cost.group_by(UNIT).agg(share=pl.col("held").sum() / pl.col("whole").sum())
    return _means(run).join(share, on=UNIT).with_columns(**names)


def _means(run: Tables) -> pl.DataFrame:
    heads = run("heads")
    there = [x for x in MEASURES if x in heads.columns]
    each = heads.group_by(*UNIT, "q_head", maintain_order=True).agg(pl.col(there).cast(pl.Float64).mean())
    return each.with_columns(pl.lit(None, pl.Float64).alias(x) for x in MEASURES if x not in there)


def _read(run: Tables) -> pl.DataFrame:
    """The same along the curves, index and what all heads of a group read together billed."""
    side = run("ledger").with_columns(whole=whole(run)).group_by(UNIT)
    seen = pl.col("visible_tokens").cast(pl.Float64).mean()
    each = side.agg(side=side_bytes().cast(pl.Float64).mean(), whole=pl.col("whole").cast(pl.Float64).mean(), seen=seen)
    dense = _means(run).select(*UNIT, "q_head", "evidence_dense")
    curves = run("curves").join(each, on=UNIT).join(dense, on=[*UNIT, "q_head"])
    recall = pl.col("evidence_recall").cast(pl.Float64) if "evidence_recall" in curves.columns else pl.lit(None, pl.Float64)
    return curves.select(
        *UNIT,
        "q_head",
        share=(pl.col("read_bytes_mean") + pl.col("side")) / pl.col("whole"),
        mass_recall=pl.col("mass_recall_mean").cast(pl.Float64),
        rel_l2=pl.col("rel_l2_mean").cast(pl.Float64),
        evidence_read=recall * pl.col("evidence_dense"),
        evidence_dense="evidence_dense",
        budget=pl.col("tokens") / pl.col("seen"),
    )


def _between(key: tuple[object, ...], curve: pl.DataFrame) -> pl.DataFrame:
    """A curve of one query head at SHARES; what it does not reach is null."""
    out: dict[str, object] = {n: [v] * len(SHARES) for n, v in zip((*UNIT, "q_head"), key, strict=True)}
    for x in MEASURES:
        known = curve.drop_nulls(x)
        got = np.full(len(SHARES), np.nan)
        if len(known):
            share = known["share"].to_numpy().round(9)
            got = np.interp(SHARES, share, known[x].to_numpy(), left=np.nan, right=np.nan)
            got = np.where(np.isnan(got) & (np.abs(np.array(SHARES) - share.max()) < 0.01), known[x].to_numpy()[-1], got)
        out[x] = got
    return pl.DataFrame(out).with_columns(at=pl.Series([f"{s:.0%}" for s in SHARES])).fill_nan(None)


def as_is(run: Tables) -> pl.DataFrame:
    """Rows of what codes everything, at its own bytes."""
    met = _rows(_means(run).with_columns(at=pl.lit(OWN)), "coded")
    cost = run("ledger").with_columns(whole=whole(run), held=pl.sum_horizontal(RESIDENT).cast(pl.Float64))
    held = cost.group_by("role", "policy", maintain_order=True).agg(
        top=pl.col("held").sum(), below=pl.col("whole").cast(pl.Float64).sum()
    )
    named = held.select(
        "role", pl.lit("coded: bytes").alias("figure"), pl.col("policy").alias("line"), pl.lit(OWN).alias("at"), "top", "below"
    )
    return pl.concat([met, named])


def _rows(each: pl.DataFrame, side: str) -> pl.DataFrame:
    """role, policy, at, MEASURES of every query head -> rows of figures; evidence is a ratio of sums, of answers alone."""
    keys = ["role", pl.col("policy").alias("line"), "at"]
    out = []
    for x, name in ((x, name) for x, name in NAMES.items() if x in each.columns):
        known = each.drop_nulls(x).group_by(keys, maintain_order=True)
        out.append(known.agg(top=pl.col(x).sum(), below=pl.len().cast(pl.Float64)).with_columns(figure=pl.lit(f"{side}: {name}")))
    seen = (
        each.filter(pl.col("role") == ANSWER).drop_nulls(["evidence_read", "evidence_dense"]).group_by(keys, maintain_order=True)
    )
    evidence = seen.agg(top=pl.col("evidence_read").sum(), below=pl.col("evidence_dense").sum())
    out.append(evidence.with_columns(figure=pl.lit(f"{side}: evidence recall")))
    return pl.concat([x.select("role", "figure", "line", "at", "top", "below") for x in out])


def over(figure: str, one: str, other: str, at: str = "25%") -> Callable[[Figures], Draws]:
    return lambda f: f(figure, one, at) / f(figure, other, at)


def less(figure: str, one: str, other: str, at: str = "25%") -> Callable[[Figures], Draws]:
    return lambda f: f(figure, one, at) - f(figure, other, at)


CLAIMS = [
    Claim(
        notes="keeping what the last queries look at is better than keeping what all did (SnapKV, arXiv 2404.14469).",
        of="output error of snapkv over that of h2o, a quarter of the bytes held",
        number=over("held: output error", "snapkv", "h2o"),
        claimed=at_most(1),
        so="snapkv has {} times the output error of h2o.",
        if_not="snapkv has {} times the output error of h2o.",
        form=".2f",
    ),
    Claim(
        notes="a score that knows the values evicts better than its base (CAOTE, arXiv 2504.14051).",
        of="output error of caote over that of h2o, its base, a quarter of the bytes held",
        number=over("held: output error", "caote on h2o", "h2o"),
        claimed=at_most(1),
        so="knowing the values brings h2o's error to {}.",
        if_not="knowing the values does not lower h2o's error ({} times).",
        form=".2f",
    ),
    Claim(
        notes="a tail that is summed up is better than one that is dropped (MomentKV, arXiv 2606.01563, its abstract).",
        of="output error of h2o with moments over that of h2o, both at a quarter of the bytes, the moments among them",
        number=over("held: output error", "h2o with moments", "h2o"),
        claimed=at_most(1),
        so="with moments in place of some rows h2o has {} times its error.",
        if_not="moments do not pay for their bytes here: {} times the error of h2o.",
        form=".2f",
    ),
    Claim(
        notes="bounds rank pages better than means (Quest, arXiv 2406.10774, and block means of trained selectors).",
        of="mass read by quest less that by block means, a quarter of the bytes read",
        number=less("read: mass recall", "quest", "block mean"),
        claimed=at_least(0),
        so="bounds read more of the mass than block means: {}, as parts of all of it.",
        if_not="block means, half the numbers, read as much of the mass or more ({}).",
        form="+.1%",
    ),
    Claim(
        notes="the same of what the answer needs.",
        of="of the attention on the evidence, the part read by quest less that by block means, a quarter of the bytes read",
        number=less("read: evidence recall", "quest", "block mean"),
        claimed=at_least(0),
        so="bounds read more of the evidence, too: {}.",
        if_not="block means read more of the evidence than bounds do ({}).",
        form="+.1%",
    ),
    Claim(
        notes="what the last queries look at is what later ones need (SnapKV, arXiv 2404.14469); here they have not seen the question.",
        of="of the attention on the evidence, the part held by snapkv less that by h2o, a quarter of the bytes held",
        number=less("held: evidence recall", "snapkv", "h2o"),
        claimed=at_least(0),
        so="snapkv keeps more of the evidence than h2o: {}.",
        if_not="asked after the prompt, snapkv keeps less of the evidence than h2o ({}).",
        form="+.1%",
    ),
]


def _drawn(side: str, names: Mapping[str, str], word: str) -> Callable[[pl.DataFrame], object]:
    def draw(frame: pl.DataFrame) -> object:
        mine = (
            frame.filter(pl.col("at") != OWN)
            .with_columns(share=pl.col("at"), at=pl.col("line"))
            .with_columns(line=pl.col("share"))
        )
        y = {
            f"{side}: mass recall": axis("dense mass read", 0, 1, ".0%"),
            f"{side}: evidence recall": axis("attention on the evidence read", 0, 1, ".0%"),
            f"{side}: output error": axis("output error (relative L2)", log=True),
        }
        return sweep(mine, y, "method", styled(["25%", "50%"]), f"Every method at equal bytes {word}.", list(names), joined=False)

    return draw


QUESTION = Question(
    name="frontier",
    title="Every method at equal bytes",
    lead="Every way to keep less, at equal bytes held; every way to read less, at equal bytes read; and codes of everything, at what they take.",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "held",
            "What does keeping lose?",
            "25% and 50% of the bytes that full attention holds: rows, codes, scales, moments. Bars: 95 % intervals over contexts.",
            [f"held: {x}" for x in ("mass recall", "evidence recall", "output error")],
            _drawn("held", KEEPS, "held"),
        ),
        Chart(
            "read",
            "What does reading less lose?",
            "25% and 50% of the bytes that full attention reads: what a group's heads read together, and the index. Bars: 95 % intervals.",
            [f"read: {x}" for x in ("mass recall", "evidence recall", "output error")],
            _drawn("read", READS, "read"),
        ),
    ],
    cells=SHORT[:1],
    table=table,
    labels=["25%", "50%"],
)
