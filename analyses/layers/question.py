"""Layers and heads: which need how much, what sinks are for, where evidence is seen, whether a layer can read what its neighbour chose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from analyses.contexts import Context, Tables
from analyses.figures import Claim, at_least, at_most, mean, rows, share
from analyses.measures import lost
from analyses.panels import axis, styled, sweep
from analyses.question import SHORT, WIDE, Chart, Question
from kvsim.advise.allocate import allocate, uniform
from kvsim.metrics.evidence import ANY, through_layers

MASS = 0.95
FIRST = 2  # layers that Quest reads whole
PAGE, READ = 16, 128
SINKS = (0, 1, 4, 5, 16)
ORDERS = {"quest": f"quest(read=tokens({READ}))", "oracle": f"oracle(read=tokens({READ}))"}
KEPT = {str(n): f"streaming_llm(hold=share(0.2), sinks={n})" for n in SINKS}
DISTANCES = (0, 1, 2, 4, 8)


def measure(context: Context) -> pl.DataFrame:
    every = replace(context, most=10**6)
    quest, oracle = every.replay({"quest": ORDERS["quest"]}, plans=True), every.replay({"oracle": ORDERS["oracle"]})
    heads = pl.concat([quest("heads"), oracle("heads")])
    each = heads.group_by("role", "policy", "layer", "q_head").agg(pl.col("mass_recall").cast(pl.Float64).mean())
    worst = each.group_by("role", "policy", "layer").agg(pl.col("mass_recall").min()).sort("policy", "layer")
    needed = pl.concat([pages_for(quest), pages_for(oracle)])
    part = pl.when(pl.col("layer") < FIRST).then(pl.lit(f"first {FIRST}")).otherwise(pl.lit("others"))
    return pl.concat(
        [
            rows(heads, {"mass recall": mean("mass_recall"), "output error": mean("rel_l2")}, at="layer"),
            rows(worst, {"worst head": mean("mass_recall")}, at="layer"),
            rows(needed, {"pages needed": mean("part")}, at="layer"),
            rows(needed, {"pages needed by group": mean("part")}, at=part),
            rows(heads, {"mass by heads": mean("mass_recall")}, at=pl.lit("mean of heads")),
            rows(worst, {"mass by heads": mean("mass_recall")}, at=pl.lit("worst head of a layer")),
            allotted(oracle),
            reused(quest),
            seen(quest),
            lost(context.replay(KEPT)("heads"), line=pl.lit("streaming_llm"), at="policy").with_columns(
                figure=pl.format("{} by sinks", "figure")
            ),
        ]
    )


def pages_for(run: Tables) -> pl.DataFrame:
    """-> role, policy, layer, q_head, part: of all pages, the fewest of its order with which a head's mean recall is MASS."""
    unit = ["role", "policy", "layer", "q_head"]
    reached = pl.col("pages").filter(pl.col("mass_recall_mean") >= MASS).min()
    there = run("ledger").group_by("role", "layer").agg(there=(pl.col("visible_tokens") / PAGE).ceil().mean())
    pages = run("curves").group_by(unit, maintain_order=True).agg(reached).join(there, on=["role", "layer"])
    return pages.with_columns(part=(pl.col("pages") / pl.col("there")).fill_null(1)).sort(unit)


def allotted(run: Tables) -> pl.DataFrame:
    """Rows of the pages that the oracle's order needs for a mean recall of 90% over all heads: as many for every head, as many for
    the heads of a layer, or each its own; chosen in hindsight on the same steps, so what a choice beforehand can reach at most."""
    found = []
    for (role,), curves in run("curves").filter(pl.col("policy") == "oracle").group_by("role", maintain_order=True):
        by_head = _table(curves, ["layer", "q_head"])
        by_layer = [x.reshape(curves["layer"].n_unique(), -1, x.shape[1]).mean(1) for x in by_head]
        for name, (cost, missed) in (("every head alike", by_head), ("by layer", by_layer), ("by head", by_head)):
            limit = 0.1 * len(missed)
            if name == "every head alike":
                choice = uniform(cost, missed, limit)
                pages = float(cost[:, choice].mean()) if choice is not None else float("nan")
            else:
                chosen = allocate(cost, missed, limit)
                pages = chosen.cost / len(cost) if chosen else float("nan")
            found.append((str(role), "pages a head", "oracle", name, pages, 1.0))
    return pl.DataFrame(found, ["role", "figure", "line", "at", "top", "below"], orient="row").fill_nan(None).drop_nulls()


def _table(curves: pl.DataFrame, unit: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """f64[units, budgets] twice: pages 1, 2, …, where a unit has no more (a window) all that it has; and the mass that they miss."""
    parts = curves.sort(*unit, "pages").group_by(unit, maintain_order=True).agg(pl.col("mass_recall_mean").cast(pl.Float64))
    each = [1 - np.array(x) for x in parts["mass_recall_mean"].to_list()]
    most, there = max(map(len, each)), np.array([[float(len(x))] for x in each])
    return np.minimum(np.arange(1.0, most + 1), there), np.stack([np.pad(x, (0, most - len(x)), mode="edge") for x in each])


def reused(run: Tables) -> pl.DataFrame:
    """Rows of the mass read with the pages that the layer so far below chose (all of its heads together), over layers that have one."""
    reuse = run("reuse").filter(pl.col("policy") == "quest")
    figures = {"mass by neighbour": mean("layer_mass_recall"), "pages by neighbour": mean("layer_pages")}
    there = reuse.filter(pl.col("distance") == max(DISTANCES)).select("request", "layer", "q_head", "step")
    return rows(reuse.join(there.unique(), on=["request", "layer", "q_head", "step"], how="semi"), figures, at="distance")


def seen(run: Tables) -> pl.DataFrame:
    """Rows of how many layers read something of the evidence, and which is the first."""
    found = through_layers(run.run.scan("evidence"), run.run.scan("heads")).filter(pl.col("scope") == ANY).collect()
    figures = {"first layer": mean("first"), "layers that hit": share("count", "layers")}
    return rows(run.named(found), figures, at=pl.lit("any span"))


CLAIMS = [
    Claim(
        notes=f"the first {FIRST} layers are hardly sparse, the others above 90% (on Quest, 1: measured on Llama 2; measure anew).",
        of=f"part of all pages that the oracle's order needs for 95% of the mass, first {FIRST} layers less the others",
        number=lambda f: f("pages needed by group", "oracle", f"first {FIRST}") - f("pages needed by group", "oracle", "others"),
        claimed=at_least(0),
        so=f"the first {FIRST} layers need {{}} of all pages more than the others.",
        form="+.1%",
        if_not=f"the first {FIRST} layers of this model need no more pages than the others ({{}}).",
    ),
    Claim(
        notes="more than 90% of most later layers can be left out (on Quest, 1).",
        of="part of all pages that the oracle's order needs for 95% of the mass, all but the first two layers",
        number=lambda f: f("pages needed by group", "oracle", "others"),
        claimed=at_most(0.1),
        so="the others need {} of their pages.",
        if_not="the others need {} of their pages for 95% of the mass: contexts of a thousand tokens are not as sparse as those of the paper.",
    ),
    Claim(
        notes="a mean over heads hides the few that need more (on Quest, 1).",
        of=f"mass read with {READ} tokens: mean of heads less the worst head of a layer",
        number=lambda f: f("mass by heads", "quest", "mean of heads") - f("mass by heads", "quest", "worst head of a layer"),
        claimed=at_least(0.05),
        so="the worst head of a layer reads {} less of its mass than the mean of heads.",
        form="+.1%",
        if_not="heads are alike: the worst of a layer reads {} less than the mean.",
    ),
    Claim(
        notes="budgets by layer are better than one rate for the model (on Quest, 1 and 3.2).",
        of="pages saved by budgets of a layer's own at 90% of the mass, chosen in hindsight, of those that equal budgets take",
        number=lambda f: 1 - f("pages a head", "oracle", "by layer") / f("pages a head", "oracle", "every head alike"),
        claimed=at_least(0.05),
        so="budgets by layer save {} of the pages at the same mean mass, at most.",
        if_not="budgets by layer save {} of the pages at most.",
    ),
    Claim(
        notes="heads differ as layers do (on Quest, 1).",
        of="pages saved by budgets of a head's own at 90% of the mass, chosen in hindsight",
        number=lambda f: 1 - f("pages a head", "oracle", "by head") / f("pages a head", "oracle", "every head alike"),
        claimed=at_least(0.05),
        so="budgets by head save {} at most.",
        if_not="budgets by head save {} at most.",
    ),
    Claim(
        notes="first tokens are sinks: they must stay (on QEvict, 4.1).",
        of="output error without a sink less that with 4, streaming_llm at 20%",
        number=lambda f: f("output error by sinks", "streaming_llm", 0) - f("output error by sinks", "streaming_llm", 4),
        claimed=at_least(0),
        so="without sinks the error is larger by {}.",
        if_not="sinks do not lower the error ({}).",
        form="+.3f",
    ),
    Claim(
        notes="five sinks, from the experience of StreamingLLM (on QEvict, 10q; its default is 4).",
        of="output error with 1 sink less that with 5",
        number=lambda f: f("output error by sinks", "streaming_llm", 1) - f("output error by sinks", "streaming_llm", 5),
        claimed=at_least(0),
        so="five sinks err less than one, by {}.",
        if_not="one sink is as good as five here ({}).",
        form="+.4f",
    ),
    Claim(
        notes="candidates of one layer may serve the next, and drift as representations do (on reading and evicting, 3).",
        of="mass read with the pages of the layer below less that with a layer's own, all heads' pages together",
        number=lambda f: f("mass by neighbour", "quest", 1) - f("mass by neighbour", "quest", 0),
        claimed=at_most(0),
        so="with the pages of the layer below a layer reads less of the mass ({}).",
        form="+.1%",
        if_not="a layer loses nothing with the pages of the layer below ({}).",
    ),
    Claim(
        notes="and the farther the layer, the more (on reading and evicting, 3).",
        of="mass read with the pages of the layer 8 below less that of the layer below",
        number=lambda f: f("mass by neighbour", "quest", 8) - f("mass by neighbour", "quest", 1),
        claimed=at_most(0),
        so="with those of the layer eight below still less ({}).",
        form="+.1%",
        if_not="eight layers away it is no worse than one ({}).",
    ),
    Claim(
        notes="in which layer is evidence first read, and in how many? (on Quest, 3.3).",
        of="layers that read something of the evidence, of all",
        number=lambda f: f("layers that hit", "quest", "any span"),
        claimed=None,
        so="at a step that looks at the evidence {} of the layers read something of it.",
        cells="answer",
    ),
    Claim(
        notes="the same: the first of them.",
        of="first layer that reads something of the evidence, counted from 0",
        number=lambda f: f("first layer", "quest", "any span"),
        claimed=None,
        so="the first that does is layer {}, on average.",
        form=".1f",
        cells="answer",
    ),
]


def _layers(frame: pl.DataFrame) -> object:
    y = {
        "pages needed": axis("part of all pages for 95% of the mass", 0, 1, ".0%"),
        "mass recall": axis(f"dense mass read with {READ} tokens", 0, 1, ".0%"),
        "worst head": axis("the same, worst head", 0, 1, ".0%"),
        "output error": axis("output error (relative L2)", 0),
    }
    return sweep(frame, y, "layer", styled(list(ORDERS)), "What layers need.", numeric=True)


def _sinks(frame: pl.DataFrame) -> object:
    y = {
        "output error by sinks": axis("output error (relative L2)", 0),
        "mass recall by sinks": axis("dense mass within reach", 0, 1, ".0%"),
    }
    return sweep(frame, y, "sinks (tokens)", styled(["streaming_llm"]), "Error by number of sinks.", [str(n) for n in SINKS])


def _neighbour(frame: pl.DataFrame) -> object:
    y = {
        "mass by neighbour": axis("dense mass read", 0, 1, ".0%"),
        "pages by neighbour": axis("pages of all heads of that layer", 0),
    }
    return sweep(frame, y, "layers below (0: its own pages)", styled(["quest"]), "Reuse of pages.", [str(n) for n in DISTANCES])


def _budgets(frame: pl.DataFrame) -> object:
    y = {"pages a head": axis("pages a head for 90% of the mass", 0)}
    return sweep(frame, y, "who has a budget", styled(["oracle"]), "Budgets by layer and head.", joined=False)


ALSO = "Not drawn: full attention, which reads everything."
QUESTION = Question(
    name="layers",
    title="Layers and heads",
    lead="Which layers and heads need how many pages, what do sinks do, where is evidence seen, and can a layer read its neighbour's choice?",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "layers",
            "What does each layer need?",
            f"All layers. Pages of 16 in quest's and in the oracle's order. {ALSO}",
            ["pages needed", "mass recall", "worst head", "output error"],
            _layers,
        ),
        Chart(
            "budgets",
            "What would budgets by layer or head save?",
            f"In hindsight, on the same steps. {ALSO}",
            ["pages a head"],
            _budgets,
        ),
        Chart(
            "sinks",
            "What are sinks for?",
            f"streaming_llm at 20% of the visible tokens: sinks and the newest. {ALSO} Nor an oracle of keeping.",
            ["output error by sinks", "mass recall by sinks"],
            _sinks,
        ),
        Chart(
            "neighbour",
            "Can a layer read what another chose?",
            f"Quest, {READ} tokens a head; pages of all heads of a layer together. {ALSO} "
            "Nor the oracle, whose pages of another layer nobody could have.",
            ["mass by neighbour", "pages by neighbour"],
            _neighbour,
        ),
    ],
    cells=(*SHORT, WIDE),
    labels=list(ORDERS),
)
