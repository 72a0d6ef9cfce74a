"""Traces in, six small frames out: what QEvict's tiers, windows, bits, starts and promotions are worth at the bytes they take.

A cell is the decode steps of one role on one trace. Means are over its contexts, steps and query heads of one layer. Recurrence and churn
count the cuts of the whole trace, whatever the role; so all frames but the first have only the answer's cell of each trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

import kvsim
from analyses.cells import FEWEST, ROLES, chosen
from kvsim.metrics.quality import ratio
from kvsim.metrics.spread import TELLING
from kvsim.policies.language import canonical, complete
from kvsim.policies.protocol import Part
from kvsim.synth.generate import synthesize
from kvsim.trace.open import Trace

HOLDS = (0.1, 0.2, 0.4)  # shares of the tokens visible
HOLD = 0.2  # of everything that does not compare budgets: what the notes on QEvict measure with
BITS = (2, 4, 8)
ANSWER = "answer"
FORCED, FREE = 2, 3  # roles

QEVICT, EVICT, H2O, CODES, ORACLE, RANDOM = (
    "QEvict",
    "eviction only, QEvict's scores",
    "eviction only, H2O",
    "quantisation only, KIVI",
    "oracle of eviction",
    "random tokens",
)
TIERS = {"2 tiers": 0.0, "3 tiers": 0.7}  # full and gone, or coded between them -> quant_share
TWO, THREE = TIERS
VARIED = {
    "start": "start",
    "cross": "window",
    "bits": "bits and quant_share",
    "budget": "budget",
    "period": "period",
    "decay": "decay",
}

Asked = Mapping[tuple[str, str], Part]  # (place along x, line) -> policy


@dataclass(frozen=True)
class Found:
    """Each with cell, policy (the line it is drawn on), at (its place along x), and the columns of `each` and `of_cuts`; cells: contexts,
    steps and layers that they rest on."""

    by_bytes: pl.DataFrame
    cross: pl.DataFrame
    bits: pl.DataFrame
    start: pl.DataFrame
    promotion: pl.DataFrame
    ledger: pl.DataFrame
    cells: pl.DataFrame


def swinging(folder: Path) -> Path:
    """A trace whose answer looks at two needles of four for 24 steps, at the other two for as long, and back."""
    path = folder / "swing"
    lengths = {"requests": 2, "prompt": 640, "steps": 96, "needles": 4, "swing": 24, "window_rows": 64}
    synthesize(path, seed=2, q_heads=4, kv_heads=2, head_dim=64, **lengths)  # type: ignore[arg-type]  # a dict of whole numbers
    return path


def asked() -> dict[str, Asked]:
    """Question -> its policies; those of several questions are replayed once."""
    qevict, share = partial(kvsim.qevict, hold=kvsim.share(HOLD)), kvsim.share
    budgets = {QEVICT: qevict, EVICT: partial(kvsim.qevict, quant_share=0.0), H2O: kvsim.h2o}
    budgets |= {ORACLE: kvsim.oracle_keep, RANDOM: kvsim.random_keep}
    out: dict[str, Asked] = {
        "by_bytes": {(f"{x:.0%}", name): make(hold=share(x)) for name, make in budgets.items() for x in HOLDS}
        | {(f"{n} bits", CODES): kvsim.kivi(bits=n, group=32, residual=32) for n in BITS},
        "cross": {(str(n), name): qevict(window=n, quant_share=q) for n in (1, 8, 32) for name, q in TIERS.items()},
        "bits": {(str(q), f"{n} bits"): qevict(bits=n, quant_share=q) for n in BITS for q in (0.3, 0.7, 0.9)},
        "start": {
            (x, name): qevict(init=x, quant_share=q) for x in ("last", "window", "column", "zeros") for name, q in TIERS.items()
        },
        "promotion": {(x, QEVICT): qevict(promotion=x) for x in ("ledger", "never", "shadow")},
    }
    tiered = {
        "budget": [(f"{x:.0%}", qevict(hold=share(x))) for x in HOLDS],
        "period": [(str(n), qevict(period=n)) for n in (1, 8, 32)],
        "decay": [(str(x), qevict(decay=x)) for x in (0.5, 0.9)],
        "bits": [(f"{line}, {at}", p) for (at, line), p in out["bits"].items()],
        **{q: [(at, p) for (at, line), p in out[q].items() if line == THREE] for q in ("start", "cross")},
    }
    return out | {"ledger": {(at, VARIED[what]): p for what, of in tiered.items() for at, p in of}}


def measure(traces: Iterable[str | Path], workers: int | None = None) -> Found:
    """Replays every trace twice (all policies; those of the windows with oracles beside) -> the frames."""
    parts = [_replayed(kvsim.open_trace(path), workers) for path in traces]
    every, cells = (pl.concat(tables) for tables in zip(*parts, strict=True))
    answers = every.filter(pl.col("cell").str.ends_with(ANSWER))
    frames = {name: _answered(every if name == "by_bytes" else answers, policies) for name, policies in asked().items()}
    return Found(**frames, cells=cells.sort("cell"))


def at_bytes(mine: pl.DataFrame, share: float) -> dict[str, dict[str, float]]:
    """Rows of one cell of `by_bytes` -> of every line the measures where it takes this share of the full cache's bytes, linear between its
    own budgets (KIVI: bits) in bytes as measured; lines that do not reach it are left out. A measure that is null is NaN."""
    out = {}
    for (line,), of in mine.sort("bytes").group_by("policy", maintain_order=True):
        x = of["bytes"].to_numpy()
        if x[0] <= share <= x[-1]:
            out[str(line)] = {
                m: float(np.interp(share, x, of[m].cast(pl.Float64).to_numpy())) for m in ("fmm", "evidence_recall", "rel_l2")
            }
    return out


def _id(policy: Part) -> str:
    """As tables name it."""
    return canonical(complete(policy))


def _answered(every: pl.DataFrame, policies: Asked) -> pl.DataFrame:
    rows = [(i, at, line, _id(policy)) for i, ((at, line), policy) in enumerate(policies.items())]
    named = pl.DataFrame(rows, schema=["order", "at", "policy", "id"], orient="row")
    found = named.join(every, on="id").sort("cell", "order")
    return found.select("cell", "policy", "at", pl.exclude("cell", "policy", "at", "order", "id"))


def _replayed(trace: Trace, workers: int | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """-> (cell, id, the numbers), and the cells, of one trace, at the middle one of its captured layers."""
    ids = [x.id for x in trace.captured_layers]
    layers = [ids[len(ids) // 2]]
    steps = sorted({s for r in trace.requests for s in chosen(r.roles[r.prompt :])})
    policies = list({_id(p): p for of in asked().values() for p in of.values()}.values())
    windows = [p for (_, tiers), p in asked()["cross"].items() if tiers == THREE]
    run = kvsim.replay(trace, policies, layers=layers, steps=steps, workers=workers)
    beside = kvsim.replay(trace, windows, layers=layers, steps=steps, workers=workers, explain=True)
    role = run.heads.select("request", "step", "role").unique()
    heads, ledger = by_cell(run.heads, trace), by_cell(run.ledger.join(role, on=["request", "step"]), trace)
    cells = heads.group_by("cell").agg(contexts=pl.col("request").n_unique(), steps=pl.col("step").n_unique())
    cells = cells.filter(pl.col("steps") >= FEWEST).with_columns(layers=pl.lit(layers))
    found = each(heads, ledger, trace).join(of_cuts(run, beside), on="id", how="left")
    return found.join(cells, on="cell", how="semi"), cells


def by_cell(table: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """A table with roles -> forced text and answers of it, with cell, and the policy's name as id. In a synthetic trace both are answers:
    its queries do the same in them."""
    synthetic = trace.manifest["source"]["model"] == "synthetic"
    role = pl.lit(ANSWER) if synthetic else pl.col("role").replace_strict(ROLES, return_dtype=pl.String)
    at = {"cell": pl.format("{}: {}", pl.lit(trace.id), role), "id": pl.col("policy").cast(pl.String)}
    return table.filter(pl.col("role").is_in([FORCED, FREE])).with_columns(**at)


def each(heads: pl.DataFrame, ledger: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """-> cell, id; fmm: mean dense mass on tokens evicted so far, disabled: on evicted and coded ones, as if codes were lost, too;
    rel_l2; evidence_recall (ratio of sums, null where hardly anything looks there); as shares of the full cache's bytes, sums over steps:
    bytes (rows on the device and all that comes with them), ledger (of these, codes kept beside full windows), host (off the device)."""
    at = ["cell", "id"]
    gone, coded, off = (pl.col(name).cast(pl.Float64) for name in ("mass_evicted", "mass_quant", "rel_l2"))
    looked = pl.col("evidence_dense").cast(pl.Float64).mean() >= TELLING
    evidence = pl.when(looked).then(ratio(pl.col("evidence_read"), pl.col("evidence_dense")))
    means = heads.group_by(at).agg(
        fmm=gone.mean(), disabled=(gone + coded.fill_null(0)).mean(), rel_l2=off.mean(), evidence_recall=evidence
    )
    row = pl.col("layer").replace_strict({x.id: x.row_bytes for x in trace.layers}, return_dtype=pl.Int64)
    whole = (pl.col("visible_tokens").cast(pl.Int64) * row).sum()
    meta = pl.col("meta_resident_bytes").cast(pl.Int64)
    beside = meta - pl.col("quant_tokens") * pl.col("scales")
    sums = (
        ledger.join(_scales(trace), on=["id", "layer"], how="left")
        .group_by(at)
        .agg(
            bytes=(pl.col("resident_bytes").cast(pl.Int64) + meta).sum() / whole,
            ledger=beside.sum() / whole,
            host=(pl.col("host_resident_bytes").cast(pl.Int64) + pl.col("ssd_resident_bytes")).sum() / whole,
        )
    )
    return means.join(sums, on=at)


def _scales(trace: Trace) -> pl.DataFrame:
    """-> id, layer, scales: bytes of scales and zeros that come with a coded row of one kv head. Only of QEvict, whose windows are coded
    whole; other policies keep no codes beside full rows."""
    rows = []
    for policy in {p for of in asked().values() for p in of.values() if isinstance(p, kvsim.qevict)}:
        k, v = policy.codecs.k, policy.codecs.v
        rows += [(_id(policy), x.id, k.layout(x.key_dim)[1] / policy.window + v.layout(x.value_dim)[1]) for x in trace.layers]
    return pl.DataFrame(rows, schema={"id": pl.String, "layer": pl.Int16, "scales": pl.Float64}, orient="row")


def of_cuts(run: kvsim.Run, beside: kvsim.Run) -> pl.DataFrame:
    """-> id; spells: how often a window lost its full place, returns: how many of these ended in one again, lir: returns / spells; churn:
    mean over cuts of the full tier's churn in tokens; promoted, demoted, evicted: windows; oracle, interval: lir of two oracles that see
    all tokens; cosine: of scores by decoded and by captured keys. Counts are sums over contexts; dormancy is one cut."""
    again = _recurrence(run).filter(pl.col("set") == "deployed").group_by("id")
    spells = again.agg(pl.col("returns").sum(), pl.col("spells").sum(), lir=_lir(), churn=pl.col("churn_full").mean())
    windows = [pl.col(f"windows_{x}").sum().alias(x) for x in ("promoted", "demoted", "evicted")]
    joint = run.events.filter(pl.col("kv_head") == pl.col("kv_head").min())  # one decision for the layer
    moves = joint.group_by(id=pl.col("policy").cast(pl.String)).agg(windows)
    seen = _recurrence(beside)
    oracles = seen.group_by("id").agg(
        oracle=_lir(pl.col("set") == "oracle"),
        interval=_lir(pl.col("set") == "oracle_interval"),
        cosine=pl.col("score_cosine").mean(),
    )
    return spells.join(moves, on="id", how="left").join(oracles, on="id", how="left")


def _recurrence(run: kvsim.Run) -> pl.DataFrame:
    found = run.scan("recurrence").filter(pl.col("dormancy") == 1).collect()
    return found.with_columns(id=pl.col("policy").cast(pl.String))


def _lir(of: pl.Expr | None = None) -> pl.Expr:
    """Returns over spells; null without a spell."""
    back, spells = (pl.col(n).filter(pl.lit(True) if of is None else of).sum() for n in ("returns", "spells"))
    return pl.when(spells > 0).then(back / spells)
